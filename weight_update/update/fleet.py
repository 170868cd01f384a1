"""The engines of an update and what is known of each of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from dataclasses import dataclass, field

from weight_update.errors import Phase, UpdateTimeout, WeightUpdateError
from weight_update.report import EngineOutcome, EngineState
from weight_update.update.protocols import Engine, Session
from weight_update.waiting import Deadline, spawn


@dataclass
class Member:
    """What the trainer knows of one engine.

    Attributes:
        state: Which weights it holds.
        label: The version label that it is known to show; None when that is uncertain.
        maybe_paused: A pause was asked for and no continue was confirmed since.
        session: The update that may be open on it.
        confirmed: Buckets of this attempt that it confirmed.
        full: Whether this attempt brings every weight.
        buckets: Buckets of this attempt.
        flush_refused: It loaded everything, but could not flush its cache yet.
        doubt: Why it does not hold one clean version; empty when it does. It outlives an
            attempt: only a full push heals.
        detail: What went wrong, for the report.
        call: The call that runs on it now, or the last one.
    """

    engine: Engine
    rank_offset: int = 0
    state: EngineState = EngineState.OLD
    label: str | None = None
    maybe_paused: bool = False
    session: Session | None = None
    full: bool = True
    buckets: int = 0
    confirmed: int = 0
    flush_refused: bool = False
    doubt: str = ""
    detail: str = ""
    call: Future[None] | None = field(default=None, repr=False)

    @property
    def url(self) -> str:
        """The engine's URL."""
        return self.engine.url

    def start_attempt(self, buckets: int = 0, *, full: bool = True) -> None:
        """Forgets the last attempt, except what it left behind on the engine."""
        self.full, self.buckets, self.confirmed, self.flush_refused = full, buckets, 0, False
        self.detail = ""
        self.state = EngineState.MIXED if self.doubt else EngineState.OLD

    def finish_attempt(self) -> None:
        """Everything is applied and the cache is as clean as the policy wants it."""
        if self.full:
            self.state, self.doubt, self.flush_refused = EngineState.NEW, "", False

    def suspect(self, why: str) -> None:
        """What the engine holds cannot be told from its answers any more."""
        if self.full:
            self.doubt = why

    def disbelieve(self, why: str) -> None:
        """The engine's confirmations turned out to be worth nothing."""
        self.confirmed = 0
        self.suspect(why)

    def conclude(self) -> None:
        """Settles the state of a failed attempt from what was confirmed and what is doubted."""
        if self.state is EngineState.NEW:
            return
        if self.confirmed and not self.doubt:
            self.suspect(f"{self.confirmed} of {self.buckets} buckets applied")
        self.state = EngineState.MIXED if self.doubt else EngineState.OLD
        self.detail = self.doubt or self.detail

    def forget(self, label: str | None) -> None:
        """The engine restarted: what was known of it is gone with the old process."""
        self.state, self.label, self.doubt = EngineState.OLD, label, ""
        self.maybe_paused, self.session = False, None

    def outcome(self) -> EngineOutcome:
        """The engine's line in the report."""
        clean = self.state in (EngineState.OLD, EngineState.NEW)
        label = self.label if clean else None
        return EngineOutcome(self.url, self.state, label, self.maybe_paused, self.detail)


class Fleet:
    """Several engines that are asked at once, so that none waits for another's answer.

    Args:
        engines: The engines; their order fixes the rank offsets.
    """

    def __init__(self, engines: Iterable[Engine]) -> None:
        self.members = [Member(engine) for engine in engines]

    def outcomes(self) -> dict[str, EngineOutcome]:
        """State of each engine, by URL."""
        return {member.url: member.outcome() for member in self.members}

    def start(self, call: Callable[[Member], None]) -> None:
        """Starts ``call`` on every engine; :meth:`gather` waits for it."""
        for member in self.members:
            member.call = spawn(call, member)

    def gather(self, phase: Phase, deadline: Deadline) -> None:
        """Waits until every engine's call ended well.

        Raises:
            WeightUpdateError: The first engine that failed, as soon as it did; the calls on
                the others may still run.
            UpdateTimeout: Some had not answered at the deadline.
        """
        calls = {member.call: member for member in self.members if member.call is not None}
        done, pending = wait(calls, timeout=deadline.remaining(), return_when=FIRST_EXCEPTION)
        for call in done:
            call.result()
        if pending:
            late = [member.url for call, member in calls.items() if call in pending]
            others = f"; nor from {', '.join(late[1:])}" if late[1:] else ""
            raise UpdateTimeout(
                f"no answer within {deadline.seconds:.1f} s{others}",
                engine=late[0],
                phase=phase,
            )

    def each(self, phase: Phase, call: Callable[[Member], None], deadline: Deadline) -> None:
        """Runs ``call`` on every engine at once and waits for all."""
        self.start(call)
        self.gather(phase, deadline)


def wrapped(error: Exception, phase: Phase) -> WeightUpdateError:
    """Any exception as one of the library's own, its cause kept."""
    if isinstance(error, WeightUpdateError):
        return error
    wrapper = WeightUpdateError(f"{type(error).__name__}: {error}", phase=phase)
    wrapper.__cause__ = error
    return wrapper
