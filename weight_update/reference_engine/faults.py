"""Faults that a reference engine can be told to commit, and where they strike."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import asdict, dataclass, fields
from typing import Any, Literal, TypeVar, get_args

Kind = Literal[
    "refuse",
    "hang",
    "die",
    "stop",
    "slow",
    "close",
    "non_json",
    "success_false",
    "lie",
    "wrong_count",
    "drop",
]
When = Literal["before_join", "after_receive", "after_load", "before_answer"]

_AT_THE_EDGE = frozenset(get_args(Kind)) - {"wrong_count", "drop"}
_IN_THE_SCHEDULER = frozenset({"refuse", "hang", "die", "stop", "slow"})

#: The kinds that can strike at each moment.
KINDS_WHEN: dict[When, frozenset[str]] = {
    "before_join": _AT_THE_EDGE,
    "after_receive": _IN_THE_SCHEDULER | {"wrong_count", "drop"},
    "after_load": _IN_THE_SCHEDULER,
    "before_answer": _AT_THE_EDGE,
}


_Named = TypeVar("_Named", bound=tuple[Any, ...])


@dataclass(frozen=True)
class Fault:
    """One misbehaviour of the engine at one route.

    Args:
        path: The route that misbehaves, such as ``/update_weights_from_distributed``.
        kind: ``refuse`` answers ``status`` and ``message``; ``hang`` never answers; ``die``
            ends the process at once; ``stop`` freezes it (SIGSTOP); ``slow`` waits
            ``seconds`` and goes on; ``close`` drops the connection; ``non_json`` answers a
            page of HTML with ``status``; ``success_false`` answers 200 with
            ``success: false``; ``lie`` answers 200 and success; ``wrong_count`` takes
            ``tensors`` tensors instead of those that were announced; ``drop`` receives all,
            loads all but ``names``, and says that all is well.
        when: ``before_join`` strikes before the route is entered (nothing is received);
            ``before_answer`` strikes after the route did its work; ``after_receive`` and
            ``after_load`` strike inside an update, in the scheduler, which is blocked or
            killed with it.
        status: The HTTP status of ``refuse`` and ``non_json``.
        message: The text of the answer.
        after: How many calls pass unharmed first.
        times: How many calls are harmed then; None harms all.
        tensors: For ``after_receive`` and ``after_load``: strike once this many tensors of
            the call have been taken; None strikes after the last.
        seconds: How long ``slow`` waits.
        rank: For ``after_receive`` and ``after_load``: the tensor parallel rank that misbehaves;
            None for all. Only rank 0 answers, so what another one refuses shows in the output.
        names: For ``drop``: the tensors that are not loaded; None for all of the call.

    Example:
        >>> Fault("/update_weights_from_distributed", "die", when="after_receive", tensors=2).kind
        'die'
    """

    path: str
    kind: Kind
    when: When = "before_join"
    status: int = 400
    message: str = "injected fault"
    after: int = 0
    times: int | None = None
    tensors: int | None = None
    seconds: float = 1.0
    rank: int | None = None
    names: tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        _require(self.kind, get_args(Kind), "kind")
        _require(self.when, get_args(When), "when")
        if self.kind not in KINDS_WHEN[self.when]:
            raise ValueError(f"{self.kind!r} cannot strike {self.when!r}")
        if self.kind == "wrong_count" and self.tensors is None:
            raise ValueError("'wrong_count' needs tensors: how many are taken")
        if self.names is not None and self.kind != "drop":
            raise ValueError(f"only 'drop' takes names, not {self.kind!r}")
        if self.rank is not None and not self.inside_update:
            raise ValueError(f"only rank 0 answers: rank {self.rank} cannot strike {self.when!r}")

    @property
    def inside_update(self) -> bool:
        """Whether this fault strikes in the scheduler rather than in the HTTP layer."""
        return self.when in ("after_receive", "after_load")

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as JSON data."""
        return asdict(self)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Fault:
        """Build a fault from JSON data.

        Raises:
            ValueError: A field is unknown, missing or out of range.
        """
        unknown = set(data) - {field.name for field in fields(cls)}
        if unknown:
            raise ValueError(f"a fault has no fields {sorted(unknown)}")
        if missing := {"path", "kind"} - set(data):
            raise ValueError(f"a fault needs {' and '.join(sorted(missing))}")
        names = data.get("names")
        return cls(**{**data, "names": None if names is None else tuple(names)})


def _require(value: str, choices: Sequence[str], what: str) -> None:
    if value not in choices:
        raise ValueError(f"unknown {what} {value!r}; choose from {', '.join(choices)}")


class FaultBoard:
    """The armed faults and how many calls each has seen."""

    def __init__(self, faults: Sequence[Fault] = ()) -> None:
        self._seen: list[list[Any]] = []
        for fault in faults:
            self.arm(fault)

    def arm(self, fault: Fault) -> None:
        """Arm one more fault."""
        self._seen.append([fault, 0])

    def clear(self) -> None:
        """Disarm all faults; a call that already hangs stays so."""
        self._seen.clear()

    def take(self, path: str) -> tuple[Fault, ...]:
        """Count one call to ``path`` and return the faults that harm it."""
        harmed = []
        for entry in self._seen:
            fault, seen = entry
            if fault.path != path:
                continue
            entry[1] = seen + 1
            if seen >= fault.after and (fault.times is None or seen < fault.after + fault.times):
                harmed.append(fault)
        return tuple(harmed)


#: The faults of the HTTP call being served; set at the edge, read where an update starts.
ACTIVE: ContextVar[tuple[Fault, ...]] = ContextVar("active_faults", default=())


def die() -> None:
    """End this process without a word to anybody."""
    os.kill(os.getpid(), signal.SIGKILL)


def freeze() -> None:
    """Stop this process until somebody sends SIGCONT."""
    os.kill(os.getpid(), signal.SIGSTOP)


def strike(faults: Sequence[Fault], when: When, taken: int, total: int) -> None:
    """Commit those of ``faults`` that are due once ``taken`` of ``total`` tensors are done."""
    for fault in faults:
        due = total if fault.tensors is None else fault.tensors
        if fault.when == when and due == taken and fault.kind in _SCHEDULER_EFFECTS:
            _SCHEDULER_EFFECTS[fault.kind](fault)


def count_taken(faults: Sequence[Fault], announced: int) -> int:
    """Return how many tensors an update takes of those that were ``announced``."""
    wrong = [fault.tensors for fault in faults if fault.kind == "wrong_count"]
    return next((count for count in wrong if count is not None), announced)


def without_dropped(faults: Sequence[Fault], arrivals: Sequence[_Named]) -> list[_Named]:
    """Return those of ``arrivals``, which start with their name, that no fault drops."""
    drops = [fault for fault in faults if fault.kind == "drop"]
    return [a for a in arrivals if not any(f.names is None or a[0] in f.names for f in drops)]


def _raise(fault: Fault) -> None:
    raise RuntimeError(fault.message)


_SCHEDULER_EFFECTS: dict[str, Callable[[Fault], object]] = {
    "refuse": _raise,
    "hang": lambda fault: threading.Event().wait(),
    "die": lambda fault: die(),
    "stop": lambda fault: freeze(),
    "slow": lambda fault: time.sleep(fault.seconds),
}
