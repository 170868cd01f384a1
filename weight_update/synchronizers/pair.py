"""Two sides that hand weights over, as the procedure sees them: an engine, a session, a group."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from weight_update.errors import Phase, RefitAborted, WeightUpdateError, wrapped
from weight_update.facts import Digests, Intake, NameCheck, Sighting
from weight_update.options import PauseMode, Way
from weight_update.synchronizers.exchange import Exchange, Refit
from weight_update.transports.in_request import NoGroup
from weight_update.update.protocols import Session
from weight_update.waiting import Deadline
from weight_update.weights.buckets import Bucket, Plan
from weight_update.weights.cargo import Cargo, Format, Terms
from weight_update.weights.growing_plan import GrowingPlan
from weight_update.weights.specs import TensorSpec


class Pair:
    """Policy and generation, as one engine of the procedure."""

    harmless_name = ""
    flush_skipped = ""
    salts_prefixes = False
    ends_without_group = False
    layout: str | None = None
    ranks: int | None = 1
    intake = Intake(any_shape=True)

    def __init__(self, name: str, exchange: Exchange) -> None:
        self.url = name
        self._exchange = exchange
        self._refit = Refit(0)
        self._layouts = 0
        self._label: str | None = None

    def start(self, refit: Refit) -> None:
        """Learns what the next refit is to do, and whether the same engines are there."""
        with self._asked("plan"):
            self._refit = refit
            self._layouts += self._exchange.look()

    @contextmanager
    def _asked(self, phase: Phase) -> Iterator[None]:
        """Whatever a side raises is an error of this engine."""
        try:
            yield
        except Exception as error:  # noqa: BLE001 - raised as one of ours
            failure = _abort_of(error, phase) or wrapped(error, phase)
            failure.engine = failure.engine or self.url
            failure.engines = failure.engines or (self.url,)
            raise failure from failure.__cause__

    def inspect(self, deadline: Deadline) -> None:
        """Nothing: whoever made the two sides has looked at their servers."""

    def objection(self, mode: PauseMode) -> str | None:
        """Rows object before any phase starts."""
        return None

    def workers(self, deadline: Deadline) -> tuple[str, ...]:
        """None: this is no router."""
        return ()

    def observe(self, deadline: Deadline, *, readiness: bool = True) -> Sighting:
        """The last version, and which layout of engines it is; neither side shows more."""
        return Sighting(self._label, None, str(self._layouts))

    def label(self, deadline: Deadline) -> str | None:
        """The last version that came."""
        return self._label

    def check_names(self, names: Sequence[str], deadline: Deadline) -> NameCheck:
        """Names are between the two sides."""
        return NameCheck()

    def digests(self, deadline: Deadline) -> Digests | None:
        """Weights are between the two sides."""
        return None

    def first_values(self, name: str, deadline: Deadline) -> tuple[float, ...] | None:
        """Weights are between the two sides."""
        return None

    def join(self, **_: Any) -> None:
        """Nothing: the meeting connects both sides."""

    def leave(self, group_name: str, deadline: Deadline) -> None:
        """Nothing: the next connection replaces this one."""

    def pause(self, mode: PauseMode, deadline: Deadline, *, again: bool) -> None:
        """Pauses generation, by its own mode."""
        with self._asked("pause"):
            self._exchange.pause()

    def drain(self, mode: PauseMode, deadline: Deadline) -> None:
        """Nothing: the pause answers when requests are dealt with."""

    def resume(self, deadline: Deadline) -> None:
        """Continues generation."""
        with self._asked("continue"):
            self._exchange.resume()

    def can_flush(self, mode: PauseMode) -> bool:
        """Generation can, or has nothing to flush."""
        return True

    def flushes_with_update(self, mode: PauseMode) -> bool:
        """Nothing travels that could carry a flush."""
        return False

    def flush(self, deadline: Deadline) -> None:
        """Empties the KV cache."""
        with self._asked("flush"):
            if not self._exchange.invalidate():
                raise WeightUpdateError("KV cache invalidation failed", phase="flush")

    def flush_once(self, deadline: Deadline) -> bool:
        """Asks for one flush; whether it was done."""
        with self._asked("flush"):
            return self._exchange.invalidate()

    def stamp(self, label: str, deadline: Deadline) -> None:
        """Remembers the version: neither side keeps one."""
        self._label = label

    def session(self, way: Way) -> Session:
        """A session for one refit."""
        return _Session(self._exchange, self._refit, self._asked)

    def close(self) -> None:
        """Nothing: both sides belong to whoever made them."""


class _Session:
    """One refit of two sides."""

    def __init__(
        self,
        exchange: Exchange,
        refit: Refit,
        asked: Callable[[Phase], AbstractContextManager[None]],
    ) -> None:
        self._exchange, self._refit, self._asked = exchange, refit, asked
        self._is_open = False

    def open(self, deadline: Deadline) -> bool:
        """Begins the update; who left another one open cannot be known."""
        with self._asked("begin"):
            self._exchange.begin()
        self._is_open = True
        return False

    def apply(
        self, bucket: Bucket, cargo: Cargo, *, group_name: str, flush: bool, deadline: Deadline
    ) -> None:
        """Has the policy send and the generation receive."""
        with self._asked("transfer"):
            self._exchange.transfer(self._refit, deadline.at_most(self._exchange.patience))

    def close(self, deadline: Deadline) -> None:
        """Ends the update."""
        with self._asked("end"):
            self._exchange.end()
        self._is_open = False

    def recover(self, deadline: Deadline) -> None:
        """Ends the update if it was begun."""
        if self._is_open:
            self.close(deadline)


class Meeting(NoGroup):
    """The connection of two sides, where a group would be."""

    def __init__(self, exchange: Exchange, earlier: int) -> None:
        super().__init__()
        self._exchange, self._again = exchange, earlier > 0

    def join(self) -> None:
        """Connects both sides, if that is due."""
        self._exchange.connect(again=self._again)


class NothingToPack:
    """Packs nothing: the policy sends by itself."""

    def format(self, specs: Sequence[TensorSpec] | None, terms: Terms) -> Format:
        """All in one bucket."""
        return Format(sys.maxsize, lambda _: True)

    def reserve(self, plan: Plan | GrowingPlan) -> None:
        """Nothing is kept."""

    def objections(self, plan: Plan | GrowingPlan) -> list[str]:
        """None."""
        return []

    def pack(self, bucket: Bucket) -> Cargo:
        """Nothing."""
        return Cargo()

    def abandon(self) -> None:
        """Nothing is kept."""


def _abort_of(error: Exception, phase: Phase) -> RefitAborted | None:
    """The error again, if it says that workers gave up at their deadline."""
    words = f"{type(error).__name__}: {error}"
    if isinstance(error, RefitAborted) or not any(mark in words for mark in RefitAborted.marks):
        return None
    aborted = RefitAborted(
        words,
        phase=phase,
        remedy="call reconcile_communicator(absent_shards, force=True), and sync again",
    )
    aborted.__cause__ = error
    return aborted
