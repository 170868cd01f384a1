"""What the facades of inference servers share: calls to all of them, and memory that they free."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, field, replace
from typing import Any, Generic, Literal, Protocol, TypedDict, TypeVar, get_args

from weight_update.delivery.arguments import read_options
from weight_update.delivery.delivery import Delivery
from weight_update.delivery.deployment import Deployment
from weight_update.delivery.ranks import Ranks, leads
from weight_update.errors import UpdateTimeout, WeightUpdateError, first_of
from weight_update.options import (
    Backend,
    DeviceLike,
    DTypeLike,
    LoadFormat,
    NameMap,
    OnFailure,
    PauseMode,
    Quorum,
    TrainerRanks,
    Transport,
    UpdateOptions,
    Verify,
    WhenBusy,
    check_choice,
    check_flag,
)
from weight_update.waiting import Deadline, spawn

_log = logging.getLogger("weight_update")

T = TypeVar("T")
R = TypeVar("R")
E = TypeVar("E", bound="Served")

Part = Literal["weights", "kv_cache"]
PARTS: tuple[Part, ...] = get_args(Part)
"""What an engine frees between rollouts, in the order in which it takes it back."""


class ServerOptions(TypedDict, total=False):
    """What every facade of servers takes besides.

    :class:`~weight_update.SGLangWeightSyncScheme` explains each, and has the same defaults.
    """

    master_address: str | None
    master_port: int | None
    device: DeviceLike
    backend: Backend
    bucket_bytes: int | None
    load_format: LoadFormat
    transport: Transport
    directory: str | None
    trainer_ranks: TrainerRanks
    dtype: DTypeLike
    name_map: NameMap | None
    trim_vocabulary: bool
    check_finite: bool
    timeout: float
    api_key: str | None
    admin_api_key: str | None
    tls_verify: bool
    ca_file: str | None
    use_proxies: bool
    on_failure: OnFailure
    quorum: Quorum
    initial_version: int | None
    verify: Verify
    when_busy: WhenBusy


def options_of(given: ServerOptions, **more: Any) -> UpdateOptions:
    """Options from keywords, and from the environment for those that are not given.

    Args:
        given: What the caller of a facade gave.
        more: Fields of the options that the facade itself decides.

    Raises:
        ConfigurationError: One cannot work.
        TypeError: One is unknown.

    Example:
        >>> options_of({"timeout": 5.0}, pause_mode="abort").pause_mode
        'abort'
    """
    unknown = set(given) - set(ServerOptions.__annotations__)
    if unknown:
        raise TypeError(
            f"unexpected keyword argument(s): {', '.join(sorted(unknown))}; besides its own, a "
            f"generation takes {', '.join(sorted(ServerOptions.__annotations__))}"
        )
    return read_options({**given, **more})


# An answer is waited for by the call itself; this is for a thread that is late to say so.
_LATE_SECONDS = 5.0


class Served(Protocol):
    """One engine, as a facade speaks to it outside of updates."""

    url: str

    def start_of(self, deadline: Deadline) -> str | None:
        """Something that every start of the engine makes anew; None when it shows none."""

    def await_idle(self, deadline: Deadline) -> None:
        """Waits until no request runs; raises UpdateTimeout if some still do."""

    def release(self, parts: Sequence[Part], deadline: Deadline) -> None:
        """Frees parts of its memory; it is idle."""

    def resume(self, part: Part, deadline: Deadline) -> None:
        """Takes a part back that it freed."""

    def flush(self, deadline: Deadline) -> None:
        """Drops its prefix cache, asking again while it is busy."""

    def close(self) -> None:
        """Closes connections."""


@dataclass
class Occupation(Generic[E]):
    """What one engine has freed of its memory.

    An engine may end over a part that is freed or taken back twice, so what was asked for is
    remembered, and forgotten when the engine started anew.

    Attributes:
        engine: The engine.
        freed: What it has freed, as far as this process knows.
    """

    engine: E
    freed: set[Part] = field(default_factory=set)
    _start: str | None = None

    def release(self, deadline: Deadline) -> None:
        """Frees what is not freed yet, once no request runs."""
        self._notice_restart(deadline)
        parts = [part for part in PARTS if part not in self.freed]
        if not parts:
            return
        self.engine.await_idle(deadline)
        try:
            self.engine.release(parts, deadline)
        except UpdateTimeout:
            self.freed.update(parts)  # it was told, and obeys as soon as it can
            raise
        self.freed.update(parts)

    def resume(self, wanted: Sequence[Part], deadline: Deadline) -> None:
        """Takes back what is wanted and freed, weights first."""
        if not self.freed:
            return
        self._notice_restart(deadline)
        for part in PARTS:
            if part in wanted and part in self.freed:
                self._resume(part, deadline)

    def find_freed(self, deadline: Deadline) -> None:
        """Takes note that the engine's memory is freed, though it should have been taken back."""
        self.freed.update(PARTS)
        self._notice_restart(deadline)

    def _resume(self, part: Part, deadline: Deadline) -> None:
        try:
            self.engine.resume(part, deadline)
        except UpdateTimeout:
            self.freed.discard(part)  # as above
            raise
        self.freed.discard(part)

    def _notice_restart(self, deadline: Deadline) -> None:
        start = self.engine.start_of(deadline)
        if start != self._start:
            self.freed.clear()
        self._start = start


class ServedGeneration(ABC, Generic[E]):
    """Inference servers as a synchronizer's generation side.

    Args:
        names: URLs of the servers, or names of engines that are no servers.
        options: Everything that shapes an update.
        open_engine: Makes what speaks to the engine of a name; called when it is first needed.
        needs_offload: Whether the servers free their memory between rollouts.

    Attributes:
        urls: The names.
        options: As given.
        needs_offload: As given.
        refit_info: What a policy said it would send.
        policy: Whose weights the servers get, once there is a synchronizer. Of the ranks of a
            sharded trainer, which all make a generation, one speaks to the servers.
    """

    refit_info: Any = None
    policy: Any = None

    def __init__(
        self,
        names: Sequence[str],
        options: UpdateOptions,
        open_engine: Callable[[str], E],
        *,
        needs_offload: bool = False,
    ) -> None:
        check_flag("needs_offload", needs_offload)
        self.urls = tuple(names)
        self.options = options
        self.needs_offload = needs_offload
        self._delivery: Delivery | None = None
        self._served = [Occupation(open_engine(name)) for name in self.urls]

    @property
    def cfg(self) -> Mapping[str, Any]:
        """The part of a generation's configuration that synchronizers look at."""
        return {}

    @property
    def pause_generation_mode(self) -> PauseMode:
        """What becomes of requests in flight."""
        return self.options.effective_pause_mode()

    def delivery(self, *, colocated: bool, timeout_s: float | None, policy: Any) -> Delivery:
        """What brings a policy's weights to these servers.

        Args:
            colocated: Whether trainer and servers share their devices: servers open memory that
                the trainer shares.
            timeout_s: Seconds for a whole update; None takes the options'.
            policy: The trainer's side.

        Raises:
            ConfigurationError: The options ask for a transport that does not go with it.
        """
        options = self.options if timeout_s is None else replace(self.options, timeout=timeout_s)
        options = replace(options, transport=self._transport(colocated=colocated))
        self.policy = policy
        self._delivery = Delivery(self.urls, options, self._deployment)
        return self._delivery

    @abstractmethod
    def _transport(self, *, colocated: bool) -> Transport:
        """The transport that goes with a placement; raises if the options ask for another one."""

    @abstractmethod
    def _deployment(self, options: UpdateOptions, ranks: Ranks) -> Deployment:
        """The deployment of these servers."""

    def prepare_refit_info(self, info: Any) -> None:
        """Notes what will come; the servers themselves are told by each request.

        Args:
            info: Name to (shape, dtype) of what the policy sends.
        """
        self.refit_info = info

    def prepare_for_generation(self, *, tags: Sequence[str] | None = None) -> None:
        """Has the servers take back memory that :meth:`finish_generation` freed.

        What was not freed is left alone, so it may be repeated. A server that keeps no copy of its
        weights elsewhere has none until an update brings them, and generates nothing before.

        Args:
            tags: ``"weights"``, ``"kv_cache"`` or both; None for all. Weights come first.

        Raises:
            WeightUpdateError: A server did not do it.
        """
        for tag in tags or ():
            check_choice("tag", tag, Part)
        wanted = [part for part in PARTS if tags is None or part in tags]
        if self.needs_offload and self._leads():
            self._on_all(lambda o, d: o.resume(wanted, d))

    def finish_generation(self) -> None:
        """Has the servers free their memory, once no request runs; may be repeated.

        Give them no request until :meth:`prepare_for_generation` took all of it back.

        Raises:
            WeightUpdateError: A server did not do it, or still has requests.
        """
        if self.needs_offload and self._leads():
            self._on_all(lambda o, d: o.release(d))

    def invalidate_kv_cache(self) -> bool:
        """Drops the prefix cache of every server; False if one did not (the log says why)."""
        try:
            self._on_all(lambda o, d: o.engine.flush(d))
        except WeightUpdateError as error:
            _log.warning(error)
            return False
        return True

    def shutdown(self) -> None:
        """Closes connections; it may be used again."""
        for occupation in self._served:
            occupation.engine.close()

    def _leads(self) -> bool:
        return self.policy is None or leads(self.policy.source, self.options.trainer_ranks)

    def _on_all(self, call: Callable[[Occupation[E], Deadline], R]) -> list[R]:
        return on_all(self._served, call, Deadline(self.options.timeout))


def on_all(engines: Sequence[T], call: Callable[[T, Deadline], R], deadline: Deadline) -> list[R]:
    """The results of a call for all engines, made at once and waited for one and all.

    Args:
        engines: What is called for.
        call: Keeps to the deadline that it is given.
        deadline: Bound of all calls.

    Raises:
        WeightUpdateError: The first failure; notes tell of the others.
    """
    calls = [spawn(call, engine, deadline) for engine in engines]
    wait(calls, timeout=deadline.remaining() + _LATE_SECONDS)
    errors = [error for error in map(_error_of, calls) if error is not None]
    if errors:
        raise first_of(errors)
    return [one.result() for one in calls]


def _error_of(call: Future[Any]) -> BaseException | None:
    if not call.done():
        return UpdateTimeout("an engine's call did not come back in time")
    return call.exception()
