"""The engines of an update and what is known of each of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from dataclasses import dataclass, field

from weight_update.errors import (
    EngineRejected,
    EngineUnreachable,
    Phase,
    UpdateTimeout,
    WeightUpdateError,
)
from weight_update.facts import Sighting
from weight_update.report import EngineOutcome, EngineState, Verification
from weight_update.update.protocols import Engine, Session
from weight_update.waiting import Deadline, hand_over

SILENT = (EngineUnreachable, UpdateTimeout)
FOUND_PAUSED = (
    "was found paused and is left so: whoever paused it may have left it half updated, and a "
    "full push resumes it"
)
MISLABELLED = "serves the weights of a failed update under an older label"


@dataclass
class Attempt:
    """What one attempt brought to one engine.

    The calls of an attempt write here and nowhere else: an answer that comes after the
    attempt was given up lands in an object that nobody reads any more.

    Attributes:
        names: The weights that it brought, or may have.
        full: Whether they are the model's; a warm-up brings none of it.
        buckets: Update requests that it takes.
        label: What the engine showed when it began.
        session: The engine's update, once it was begun.
        found_open: Another update was open on the engine.
        confirmed: Buckets that the engine confirmed.
        flush_owed: The engine loaded everything, but could not flush its cache yet.
        flushed: Its cache is as clean as the rules want it.
        verified: How it proved what it holds.
        suspicion: Why the engine's answers do not tell what it holds; empty when they do.
    """

    names: set[str] = field(default_factory=set)
    full: bool = True
    buckets: int = 0
    label: str | None = None
    session: Session | None = None
    found_open: bool = False
    confirmed: int = 0
    flush_owed: bool = False
    flushed: bool = False
    verified: Verification = "unverified"
    suspicion: str = ""

    @property
    def begun(self) -> Session:
        """The engine's update.

        Raises:
            WeightUpdateError: None was begun.
        """
        if self.session is None:
            raise WeightUpdateError("no update was begun", phase="begin")
        return self.session

    @property
    def complete(self) -> bool:
        """Whether the engine surely holds everything."""
        return 0 < self.buckets == self.confirmed and not self.suspicion

    def doubt_left(self, before: str) -> str:
        """Why the engine does not hold one clean version if the attempt ends here.

        Args:
            before: The same, before the attempt.

        Example:
            >>> Attempt(buckets=4, confirmed=1).doubt_left("")
            '1 of 4 buckets applied'
            >>> Attempt(full=False, buckets=1, confirmed=1).doubt_left("mixed before")
            'mixed before'
        """
        if not self.full:
            return before
        if self.suspicion:
            return self.suspicion
        if self.confirmed:
            return f"{self.confirmed} of {self.buckets} buckets applied"
        return before


@dataclass(eq=False)
class Member:
    """What the trainer knows of one engine; only the updating thread writes it.

    Attributes:
        ranks: Ranks of the engine in the group.
        known: It is an engine, and not a router in front of some.
        met: It was inspected since it last started.
        instance: Which start of the server was seen last.
        incarnation: How often it was seen to have left a group, by a new start or for another
            trainer's; a group of an earlier one is of no use.
        owing: Groups that requests name which it never answered; dropping one may end it.
        left_out: It failed, and a quorum went on without it.
        found_paused: It was paused, and not by this trainer: whoever did it may have left it
            half updated, so only a full push resumes it.
        names: The names that it was checked to know.
        shapes: The shapes that it took, by name.
        brought: The names that pushes brought since it started.
        lost: Those that it lost with a restart, or missed; a push must hold them all.
        asked: It was asked what it can prove.
        digests: It makes digests of its weights.
        describes: They say what they are of.
        state: Which weights it holds.
        label: The version label that it is known to show; None when that is uncertain.
        maybe_paused: A pause was asked for and no continue was confirmed since.
        maybe_open: An update was begun and its end was not confirmed.
        doubt: Why it does not hold one clean version; empty when it does. It outlives an
            attempt: only a full push heals.
        owed: Names of the weights that a push must hold to heal it.
        mislabelled: It serves the weights of a failed update under an older label.
        detail: What went wrong, for the report.
        attempt: The attempt that runs, or the last one.
        call: The call that runs on it, or the last one.
    """

    engine: Engine
    rank_offset: int = 0
    ranks: int = 1
    known: bool = False
    met: bool = False
    instance: str | None = None
    incarnation: int = 0
    owing: frozenset[str] = frozenset()
    left_out: bool = False
    found_paused: bool = False
    names: frozenset[str] = frozenset()
    shapes: Mapping[str, tuple[int, ...]] = field(default_factory=dict, repr=False)
    brought: frozenset[str] = frozenset()
    lost: frozenset[str] = frozenset()
    asked: bool = False
    digests: bool = False
    describes: bool = False
    state: EngineState = EngineState.OLD
    label: str | None = None
    maybe_paused: bool = False
    maybe_open: bool = False
    doubt: str = ""
    owed: frozenset[str] = frozenset()
    mislabelled: bool = False
    detail: str = ""
    attempt: Attempt = field(default_factory=Attempt)
    call: Future[None] | None = field(default=None, repr=False)

    @property
    def url(self) -> str:
        """The engine's URL."""
        return self.engine.url

    @property
    def answered_well(self) -> bool:
        """Whether the last call ended without an error."""
        return self.call is not None and self.call.done() and self.call.exception() is None

    @property
    def unanswered(self) -> bool:
        """Whether the engine never answered the last call, and may carry it out yet."""
        if self.call is None or not self.call.done():
            return self.call is not None
        return isinstance(self.call.exception(), UpdateTimeout)

    @property
    def failed_itself(self) -> bool:
        """Whether its last call did not end well, and not only because another engine's did."""
        if self.call is None or not self.call.done():
            return self.call is not None
        error = self.call.exception()
        return error is not None and not is_consequence(error)

    def note_debt(self, group: str) -> None:
        """Notes that it may yet obey a request that names a group."""
        if self.engine.ends_without_group and self.call is not None and may_obey(self.call):
            self.owing |= {group}

    def is_another(self, seen: Sighting) -> bool:
        """Whether what is seen is another start of the server than the one known."""
        return None not in (seen.instance, self.instance) and seen.instance != self.instance

    def start(self, attempt: Attempt) -> None:
        """Starts an attempt; what the last one left behind on the engine is kept."""
        self.attempt, self.call, self.detail = attempt, None, ""
        attempt.label = self.label
        self.state = EngineState.MIXED if self.doubt else EngineState.OLD

    def renew(self, brought: Iterable[str]) -> None:
        """Everything is applied and the cache is as clean as the rules want it.

        Args:
            brought: The names that the attempt brought, unless the one before it brought the same.
        """
        self.state, self.doubt, self.owed = EngineState.NEW, "", frozenset()
        self.mislabelled = True  # until the label is written
        self.found_paused = False
        self.brought, self.lost = self.brought.union(brought), frozenset()

    def healed_by_another(self) -> None:
        """Another trainer's update counted on, and the engine generates: it is that one's now."""
        self.state, self.doubt, self.owed = EngineState.OLD, "", frozenset()
        self.maybe_paused = self.maybe_open = self.mislabelled = self.found_paused = False

    def forget(self) -> None:
        """The engine restarted: what was known of it is gone with the old process."""
        self.state, self.doubt = EngineState.OLD, ""
        self.maybe_paused = self.maybe_open = self.mislabelled = self.found_paused = False
        self.met = self.asked = False
        self.lost, self.brought = self.lost | self.brought | self.owed, frozenset()
        self.owed = self.names = self.owing = frozenset()
        self.shapes = {}
        self.incarnation += 1

    def outcome(self) -> EngineOutcome:
        """The engine's line in the report."""
        clean = self.state in (EngineState.OLD, EngineState.NEW)
        label = self.label if clean else None
        label_note = MISLABELLED if self.mislabelled and clean else ""
        pause_note = FOUND_PAUSED if self.found_paused else ""
        detail = "; ".join(note for note in (label_note, pause_note, self.detail) if note)
        paused = self.maybe_paused or self.found_paused
        verified = self.attempt.verified
        return EngineOutcome(self.url, self.state, label, paused, detail, verified)


class Fleet:
    """Several engines that are asked at once, so that none waits for another's answer.

    Args:
        members: The engines; their order fixes the rank offsets.
    """

    def __init__(self, members: Iterable[Member]) -> None:
        self.members = list(members)

    @property
    def identity(self) -> tuple[tuple[str, int], ...]:
        """Which engines these are, each as of its last start."""
        return tuple((member.url, member.incarnation) for member in self.members)

    def start(self, call: Callable[[Member, Attempt], None]) -> None:
        """Starts ``call`` on every engine; :meth:`gather` waits for it."""
        for member in self.members:
            member.call = hand_over(call, member, member.attempt)

    def calls(self) -> list[Future[None]]:
        """The calls that run, or the last ones, in the engines' order."""
        return [member.call for member in self.members if member.call is not None]

    def gather(self, phase: Phase, deadline: Deadline) -> None:
        """Waits until every engine's call ended well.

        Raises:
            WeightUpdateError: The first engine that failed, as soon as it did; the calls on
                the others may still run.
            UpdateTimeout: Some had not answered at the deadline.
        """
        calls = self.calls()
        done, pending = wait(calls, timeout=deadline.remaining(), return_when=FIRST_EXCEPTION)
        raise_first(call for call in calls if call in done)
        if pending:
            late = [member.url for member in self.members if member.call in pending]
            others = f"; nor from {', '.join(late[1:])}" if late[1:] else ""
            raise UpdateTimeout(
                f"no answer within {deadline.seconds:.1f} s{others}",
                engine=late[0],
                engines=late,
                phase=phase,
                remedy="look at the engine's log; a step gets a share of timeout=",
            )

    def each(
        self, phase: Phase, call: Callable[[Member, Attempt], None], deadline: Deadline
    ) -> None:
        """Runs ``call`` on every engine at once and waits for all."""
        self.start(call)
        self.gather(phase, deadline)


def may_obey(call: Future[None]) -> bool:
    """Whether an engine that was told to do something never said what became of it."""
    return not call.done() or isinstance(call.exception(), SILENT)


def is_consequence(error: BaseException) -> bool:
    """Whether an engine only says that another one, or the trainer, broke the broadcast."""
    return isinstance(error, EngineRejected) and "Failed to receive" in error.message


def culprits(error: WeightUpdateError, members: Iterable[Member]) -> list[Member]:
    """The engines without which an attempt might have succeeded, once they were settled.

    Args:
        error: What ended the attempt.
        members: The engines that took part.
    """
    named = [member for member in members if member.url in error.engines]
    if error.phase == "connect":  # who came to the rendezvous waits, and is not to blame
        return named
    failed = [m for m in members if m.state is EngineState.UNREACHABLE or m.failed_itself]
    if error.phase == "transfer":  # all are late when one is
        lied = [m for m in members if m.attempt.suspicion and m.answered_well]
        return failed or lied or named
    return failed + [member for member in named if member not in failed]


def answers(engine: Engine, deadline: Deadline) -> bool:
    """Tells an engine that is lost from one that is only slow to answer one call, or says no."""
    try:
        engine.label(deadline)
    except SILENT:
        return False
    except WeightUpdateError:
        return True
    return True


def raise_first(calls: Iterable[Future[None]]) -> None:
    """Raises the error of the first of some finished calls that has one."""
    for call in calls:
        call.result()
