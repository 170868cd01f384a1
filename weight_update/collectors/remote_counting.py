"""Collectors whose frames are made elsewhere: in worker processes, or by actors of Ray.

Their own ``increment_version()``, if they have one, moves a number that no frame carries. What
makes the frames is reached here through TorchRL's own calls: a receiver is planted into each
worker with ``register_scheme_receiver``, before any collects.
"""

from __future__ import annotations

import logging
import multiprocessing
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from itertools import count
from multiprocessing.connection import Connection
from typing import Any

from weight_update.collectors.actor_counting import Actors
from weight_update.collectors.counting import Counters, Remote, is_handle
from weight_update.collectors.torchrl_adapter import actor_of, count_path
from weight_update.collectors.worker_counting import Workers, count_at, pipes
from weight_update.errors import ConfigurationError
from weight_update.waiting import spawn

_log = logging.getLogger("weight_update")

_PLANT_SECONDS = 30.0
_planted = count()


class Receiver:
    """What counts beside a collector that makes frames, in the process where it does.

    It has the methods that TorchRL calls of a scheme which receives.

    Args:
        end: Where versions are told; None when it is called.
    """

    initialized_on_sender = False
    initialized_on_receiver = False
    synchronized_on_receiver = False
    context: Any = None

    def __init__(self, end: Connection | None = None) -> None:
        self._end = end
        self._counters = Counters()

    def init_on_receiver(self, *, context: Any, **ignored: Any) -> None:
        """Says who makes frames here."""
        self.initialized_on_receiver = True
        self.context = context
        register(self._counters, context)

    def connect(self, **ignored: Any) -> None:
        """Starts to listen."""
        self.synchronized_on_receiver = True
        if self._end is not None:
            count_at(self._end, self.count)

    def count(self, version: int) -> list[str]:
        """Counts a version; returns what went wrong, in words."""
        return self._counters.count(version)

    def receive(self, timeout: float | None = None) -> None:
        """Nothing: weights go to engines."""

    def shutdown(self) -> None:
        """Counts no more."""
        self._counters.clear()


def register(counters: Counters, collector: Any) -> None:
    """Has a collector count; one that counts already is left as it is.

    Raises:
        ConfigurationError: It has no ``increment_version``, or its workers can't be reached.
    """
    if isinstance(collector, type):
        raise ConfigurationError(
            f"a collector is needed, and {collector.__name__} is a class",
            remedy="register what was made of it",
        )
    collector = _actor_behind(collector)
    if collector in counters:
        return
    remote = _remote_of(collector)
    here = callable(getattr(collector, "increment_version", None))
    if not here and remote is None:
        raise ConfigurationError(f"{type(collector).__name__} has no increment_version()")
    _warn_of_untracked(collector)
    counters.join(collector, remote, here=here)


def _actor_behind(collector: Any) -> Any:
    """The handle of the actor that a collector stands for; else what is given.

    Its own ``increment_version()`` waits for an actor that is busy, or is gone.
    """
    actor = actor_of(collector)
    return actor if is_handle(actor) else collector


def _warn_of_untracked(collector: Any) -> None:
    if getattr(collector, "policy_version_tracker", collector) is None:
        _log.warning(
            "%s tracks no policy version: it counts nothing, and its samples carry no version; "
            "make it with track_policy_version=True",
            type(collector).__name__,
        )


def _remote_of(collector: Any) -> Remote | None:
    """Who counts elsewhere for a collector; None when it makes its frames itself.

    Raises:
        ConfigurationError: Its workers collect already, so that they can't be told.
    """
    name = type(collector).__name__
    if hasattr(collector, "remote_collectors"):
        return _planted_in_actors(collector, name)
    if hasattr(collector, "procs") and hasattr(collector, "map_fn"):
        return _planted_in_workers(collector, name)
    if is_handle(collector):
        return Actors(lambda: (collector,), lambda handle, _: _increment(handle), repr(collector))
    return None


def _increment(handle: Any) -> Any:
    return handle.increment_version.remote()


def _planted_in_workers(collector: Any, name: str) -> Workers:
    if getattr(collector, "running", False):
        # A worker that is told something while it collects drops what it collected.
        raise _unreachable(name, "they collect already")
    workers, ends = pipes(multiprocessing, len(collector.procs), name)
    key = _new_key()
    plants = [({key: Receiver(end)},) for end in ends.all]
    planting = spawn(collector.map_fn, "register_scheme_receiver", plants)
    try:
        _await(planting, name)
    except BaseException:
        workers.close()
        raise
    finally:
        ends.close()
    return workers


def _planted_in_actors(collector: Any, name: str) -> Actors:
    key = _new_key()
    _await(spawn(_plant_in_actors, collector.remote_collectors, key), name)
    return receivers_in(lambda: collector.remote_collectors, key, name)


def receivers_in(handles: Callable[[], Sequence[Any]], key: str | None, owner: str) -> Actors:
    """The actors of a collector, in each of which a receiver is registered under a key."""
    path = count_path(key)
    return Actors(handles, lambda h, version: h.cascade_execute.remote(path, version), owner)


def _plant_in_actors(handles: Sequence[Any], key: str) -> None:
    import ray

    ray.get([h.register_scheme_receiver.remote({key: Receiver()}) for h in handles])


def _await(planting: Future[Any], name: str) -> None:
    try:
        planting.result(_PLANT_SECONDS)
    except TimeoutError:
        raise _unreachable(name, f"no answer within {_PLANT_SECONDS:.0f} s") from None
    except Exception as error:
        raise _unreachable(name, f"{type(error).__name__}: {error}") from error


def _unreachable(name: str, why: str) -> ConfigurationError:
    return ConfigurationError(
        f"the workers of {name}, whose numbers its frames carry, can't be told to count: {why}",
        remedy="register it before its first batch is asked for, "
        'or hand it weight_sync_schemes={"policy": scheme}',
    )


def _new_key() -> str:
    # Two senders may plant into one worker: each has a receiver of its own.
    return f"weight_update counts {next(_planted)}"
