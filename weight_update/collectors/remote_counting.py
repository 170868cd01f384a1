"""Collectors whose frames are made elsewhere: in worker processes, or by actors of Ray.

Their own ``increment_version()``, if they have one, moves a number that no frame carries. What
makes the frames is reached here through TorchRL's own calls: a receiver is planted into each
worker with ``register_scheme_receiver``, before any collects.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from itertools import count
from multiprocessing.connection import Connection
from threading import Lock
from typing import Any

from weight_update.collectors.counting import Counters, Remote
from weight_update.collectors.worker_counting import Workers, count_at, pipes
from weight_update.errors import ConfigurationError
from weight_update.waiting import spawn

_PLANT_SECONDS = 30.0
# An actor that makes a batch answers when it is done; it counts before it makes the next one.
_BUSY_SECONDS = 0.25

_DEAD = ["is gone"]

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
        self._counters.add(context)

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


class Actors:
    """The actors that make the frames of one collector.

    Args:
        handles: Who they are now.
        call: Has one count a version, and returns Ray's reference.
        owner: What they belong to, for warnings.
    """

    def __init__(
        self,
        handles: Callable[[], Sequence[Any]],
        call: Callable[[Any, int], Any],
        owner: str,
    ) -> None:
        self._handles = handles
        self._call = call
        self._owner = owner
        self._busy: dict[Any, tuple[int, Any]] = {}
        self._dead: list[Any] = []
        self._one_at_a_time = Lock()

    def count(self, version: int, seconds: float) -> list[str]:
        """Tells all actors; one that is busy counts when it is done with its batch.

        One that is dead for good is told of once.

        Args:
            version: The version that the engines have now.
            seconds: The most that is waited; busy ones are waited for much less.

        Returns:
            What went wrong, now or with a version that was told before, in words.
        """
        with self._one_at_a_time:
            living = [(i, h) for i, h in enumerate(self._handles()) if h not in self._dead]
            self._busy |= {self._call(handle, version): (i, handle) for i, handle in living}
            answered = _answered(list(self._busy), min(seconds, _BUSY_SECONDS))
            outcomes = [(*self._busy.pop(ref), _outcome(ref)) for ref in answered]
            self._dead += [handle for _, handle, words in outcomes if words == _DEAD]
        return [f"actor {i} of {self._owner} {w}" for i, _, words in outcomes for w in words]

    def close(self) -> None:
        """Nothing is told any more."""
        self._handles, self._busy = tuple, {}


def remote_of(collector: Any) -> Remote | None:
    """Who counts elsewhere for a collector; None when it makes its frames itself.

    Raises:
        ConfigurationError: Its workers collect already, so that they can't be told.
    """
    name = type(collector).__name__
    if hasattr(collector, "remote_collectors"):
        return _planted_in_actors(collector, name)
    if hasattr(collector, "procs") and hasattr(collector, "map_fn"):
        return _planted_in_workers(collector, name)
    increment = getattr(collector, "increment_version", None)
    if hasattr(increment, "remote"):
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
    from weight_update.collectors.torchrl_adapter import count_path  # it builds on this file

    key = _new_key()
    _await(spawn(_plant_in_actors, collector.remote_collectors, key), name)
    path = count_path(key)
    return Actors(
        lambda: collector.remote_collectors,
        lambda handle, version: handle.cascade_execute.remote(path, version),
        name,
    )


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


def _answered(references: list[Any], seconds: float) -> list[Any]:
    """Those of Ray's references that have an answer, by then at the latest."""
    import ray

    if not references:
        return []
    done, _ = ray.wait(references, num_returns=len(references), timeout=seconds, fetch_local=False)
    return list(done)


def _outcome(reference: Any) -> list[str]:
    import ray
    from ray import exceptions

    try:
        told = ray.get(reference)
    except exceptions.ActorDiedError:
        return _DEAD
    except exceptions.RayActorError:  # Ray may be starting it again
        return ["does not answer"]
    except Exception as error:  # noqa: BLE001 - whatever the actor raised; the engines are updated
        return [f"failed ({type(error).__name__}: {error})"]
    return told if isinstance(told, list) else []
