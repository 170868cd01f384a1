"""What an update reports: the version, the time it took by phase, and each engine's state."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field, fields
from enum import StrEnum
from typing import Any, Literal, TypeVar, get_args

from weight_update.errors import Phase, WeightUpdateError, kind_of_error
from weight_update.options import PauseMode, Way

Verification = Literal["checksum", "sample", "unverified", "off"]
InFlight = Literal["aborted", "retracted", "frozen"]
_Value = TypeVar("_Value")

_IN_FLIGHT: dict[PauseMode, InFlight] = {
    "abort": "aborted",
    "retract": "retracted",
    "in_place": "frozen",
}


class EngineState(StrEnum):
    """Which weights an engine holds after an update.

    Example:
        >>> EngineState("new") is EngineState.NEW
        True
        >>> EngineState.MIXED == "mixed"
        True
    """

    OLD = "old"
    """Nothing of this update was applied; the engine serves what it served before."""
    NEW = "new"
    """All of it was applied; no cached prefix of old weights can be served, unless a warning of
    the report says that the cache was not flushed."""
    MIXED = "mixed"
    """Partly applied, or applied with a stale cache: only a full push heals it."""
    UNREACHABLE = "unreachable"
    """No answer; its state is unknown."""


@dataclass(frozen=True)
class EngineOutcome:
    """How one engine came out of an update.

    Attributes:
        url: The engine, as the caller named it.
        state: Which weights it holds.
        version: The label it serves under, or None when that is not known.
        paused: Whether it is (or may be) still paused.
        detail: Why it is not simply ``new``; empty otherwise.
        verified: How it proved that it holds what was sent: by ``checksum`` or by ``sample``;
            ``unverified`` where there was nothing to compare with, ``off`` when nobody asked.
        pause_mode: The pause mode of the update on this engine; None outside of an update, or
            where it ended before any pause was due.
    """

    url: str
    state: EngineState
    version: str | None
    paused: bool
    detail: str = ""
    verified: Verification = "unverified"
    pause_mode: PauseMode | None = None

    @property
    def in_flight(self) -> InFlight | None:
        """What became of requests that ran when it paused; None where no pause mode is known.

        ``aborted``: ended early, with what they had. ``retracted``: computed anew and carried
        on by the new weights. ``frozen``: carried on over the old weights' KV cache.
        """
        return None if self.pause_mode is None else _IN_FLIGHT[self.pause_mode]

    @property
    def held(self) -> bool:
        """Whether it is kept paused because its weights are mixed."""
        return self.paused and self.state is EngineState.MIXED

    def to_dict(self) -> dict[str, Any]:
        """The outcome as plain JSON values."""
        return {**asdict(self), "state": self.state.value, "in_flight": self.in_flight}

    def __str__(self) -> str:
        pause = ", paused" if self.paused else ""
        detail = f": {self.detail}" if self.detail else ""
        return f"{self.url} {self.state} (version {self.version or 'unknown'}{pause}){detail}"


@dataclass(frozen=True)
class Progress:
    """How far a running update is.

    Attributes:
        phase: The phase that runs.
        bytes_done: Payload bytes that every engine confirmed.
        bytes_total: Payload bytes of the plan; 0 until it is made.
        bucket: Buckets that every engine confirmed.
        buckets: Buckets of the plan; 0 until it is made.
    """

    phase: Phase
    bytes_done: int
    bytes_total: int
    bucket: int
    buckets: int


ProgressHook = Callable[[Progress], None]


@dataclass(frozen=True)
class Route:
    """The way that the bytes of an update took.

    Attributes:
        way: ``broadcast``, ``ipc``, ``disk``, or ``request`` for an adapter.
        backend: What carried them, such as ``nccl`` or ``gloo``; ``none`` where no group did.
        bucket_bytes: No bucket of several tensors was larger; ``sys.maxsize`` for no bound.
        reasons: What was chosen and why; empty where nothing had to be.

    Example:
        >>> print(Route("broadcast", "nccl", 2 << 30, ("one broadcast a tensor: 291 tensors",)))
        by broadcast over nccl, in buckets of 2.15 GB (one broadcast a tensor: 291 tensors)
    """

    way: Way
    backend: str
    bucket_bytes: int
    reasons: tuple[str, ...] = ()

    def __str__(self) -> str:
        why = f" ({'; '.join(self.reasons)})" if self.reasons else ""
        over = "" if self.backend == "none" else f" over {self.backend}"
        bounded = self.bucket_bytes < sys.maxsize  # what hands weights over itself has no buckets
        buckets = f", in buckets of {_amount(self.bucket_bytes)}" if bounded else ""
        return f"by {self.way}{over}{buckets}{why}"


@dataclass(frozen=True)
class UpdateReport:
    """What one :meth:`update_weights` call did.

    Attributes:
        version: The policy version after the call. It moves once every engine has everything,
            so an update that failed before then leaves it, and one that could only not resume
            an engine does not.
        bytes: Payload bytes of the plan, for each engine.
        tensors: Tensors of the plan.
        buckets: Update requests of the plan, for each engine.
        seconds: Wall seconds by phase (``plan``, ``connect``, ``pause``, ``drain``, ``begin``,
            ``transfer``, ``end``, ``flush``, ``verify``, ``stamp``, ``count``, ``continue``), and
            ``paused`` (from the first pause call to the last continue) and ``total``.
        engines: Outcome by engine URL, as given.
        warnings: What the caller should know although the update succeeded.
        route: The way that the bytes took; None before there was one.

    Example:
        >>> outcome = EngineOutcome("http://a:1", EngineState.NEW, "3", paused=False)
        >>> report = UpdateReport(
        ...     version=3, bytes=2_000_000_000, tensors=291, buckets=1,
        ...     seconds={"transfer": 0.5, "paused": 0.55, "total": 0.6},
        ...     engines={"http://a:1": outcome})
        >>> report.gigabytes_per_second
        4.0
        >>> print(report)
        version 3: 291 tensors, 2.00 GB in 1 bucket, 4.00 GB/s, 600 ms, paused 550 ms (transfer 500)
          http://a:1 new (version 3)
        >>> report.to_dict()["engines"]["http://a:1"]["state"]
        'new'
        >>> UpdateReport.from_dict(report.to_dict()) == report
        True
    """

    version: int
    bytes: int
    tensors: int
    buckets: int
    seconds: Mapping[str, float]
    engines: Mapping[str, EngineOutcome]
    warnings: tuple[str, ...] = field(default=())
    route: Route | None = None

    @property
    def verification(self) -> Verification:
        """The weakest proof that an engine with the new weights gave.

        ``checksum``: digests of all its weights equal those of what was sent, or those of
        another engine of the same layout. ``sample``: some of its weights were read back.
        """
        given = [o.verified for o in self.engines.values() if o.state is EngineState.NEW]
        return max(given, key=get_args(Verification).index, default="unverified")

    @property
    def pause_mode(self) -> PauseMode | None:
        """The pause mode; None where engines differ, of which each outcome has its own."""
        return _only(outcome.pause_mode for outcome in self.engines.values())

    @property
    def in_flight(self) -> InFlight | None:
        """What became of requests that ran when the engines paused; None where that differs."""
        return _only(outcome.in_flight for outcome in self.engines.values())

    @property
    def gigabytes_per_second(self) -> float:
        """Payload bytes over the seconds of the transfer phase (GB = 1e9 bytes)."""
        transfer = self.seconds.get("transfer", 0.0)
        return self.bytes / transfer / 1e9 if transfer > 0 else 0.0

    def engine_lines(self) -> list[str]:
        """One line an engine: URL, state, version, whether it is paused, and why."""
        return [str(outcome) for outcome in self.engines.values()]

    def to_dict(self) -> dict[str, Any]:
        """The report as plain JSON values."""
        plain = asdict(self)
        plain["seconds"] = dict(self.seconds)
        plain["warnings"] = list(self.warnings)
        if self.route is not None:
            plain["route"]["reasons"] = list(self.route.reasons)
        plain["gigabytes_per_second"] = self.gigabytes_per_second
        plain["verification"] = self.verification
        plain["pause_mode"], plain["in_flight"] = self.pause_mode, self.in_flight
        plain["engines"] = {url: outcome.to_dict() for url, outcome in self.engines.items()}
        return plain

    @classmethod
    def from_dict(cls, plain: Mapping[str, Any]) -> UpdateReport:
        """The report that :meth:`to_dict` made plain; what can be computed is left out."""
        outcomes = {
            url: EngineOutcome(**{**_given(EngineOutcome, o), "state": EngineState(o["state"])})
            for url, o in plain["engines"].items()
        }
        given = _given(cls, plain)
        given |= {"engines": outcomes, "warnings": tuple(plain["warnings"])}
        if route := plain["route"]:
            given["route"] = Route(**{**route, "reasons": tuple(route["reasons"])})
        return cls(**given)

    @property
    def headline(self) -> str:
        """The report in one line, engines left out."""
        still = self.seconds.get("paused")
        paused = "" if still is None else f", paused {1e3 * still:.0f} ms"
        return (
            f"version {self.version}: {_count(self.tensors, 'tensor')}, {_amount(self.bytes)} in "
            f"{_count(self.buckets, 'bucket')}, {self.gigabytes_per_second:.2f} GB/s, "
            f"{1e3 * self.seconds.get('total', 0.0):.0f} ms{paused} ({self._phases()})"
        )

    def __str__(self) -> str:
        notes = [f"  warning: {warning}" for warning in self.warnings]
        route = [] if self.route is None else [f"  {self.route}"]
        lines = [f"  {line}" for line in self.engine_lines()]
        return "\n".join([self.headline, *route, *lines, *self._fates(), *notes])

    def _fates(self) -> list[str]:
        """What became of requests in flight, where engines differ in that."""
        fates: dict[InFlight, list[str]] = {}
        for outcome in self.engines.values():
            if outcome.in_flight is not None:
                fates.setdefault(outcome.in_flight, []).append(outcome.url)
        parts = [f"{fate} on {', '.join(urls)}" for fate, urls in fates.items()]
        return [f"  requests in flight: {', '.join(parts)}"] if len(parts) > 1 else []

    def _phases(self) -> str:
        phases = [(k, v) for k, v in self.seconds.items() if k not in ("total", "paused")]
        return ", ".join(f"{name} {1e3 * seconds:.0f}" for name, seconds in phases)


def _given(kind: Any, plain: Mapping[str, Any]) -> dict[str, Any]:
    """What a dataclass is made of, without what can be computed."""
    return {field.name: plain[field.name] for field in fields(kind)}


def _only(values: Iterable[_Value]) -> _Value | None:
    """The value that all share."""
    found = set(values)
    return found.pop() if len(found) == 1 else None


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"


def _amount(size: int) -> str:
    for unit, scale in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if size >= scale:
            return f"{size / scale:.2f} {unit}"
    return f"{size} B"


def error_from_dict(plain: Mapping[str, Any]) -> WeightUpdateError:
    """The error that :meth:`WeightUpdateError.to_dict` made plain, of its own kind.

    Example:
        >>> from weight_update.errors import UpdateTimeout
        >>> error = UpdateTimeout("too late", engine="http://a:1", phase="pause")
        >>> again = error_from_dict(error.to_dict())
        >>> type(again) is type(error), str(again) == str(error)
        (True, True)
    """
    error = kind_of_error(plain["kind"])(
        plain["message"], engine=plain["engine"], phase=plain["phase"], remedy=plain["remedy"]
    )
    error.engines = tuple(plain["engines"])
    if plain["report"] is not None:
        error.report = UpdateReport.from_dict(plain["report"])
    return error
