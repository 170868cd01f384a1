"""The update procedure, the only one in the library.

Plan, pause, drain, begin, transfer, end, flush, verify, stamp, count, continue. Every step runs
on all engines at once and gets a part of one deadline. Whatever fails,
:mod:`weight_update.update.settle` finds out what each engine holds and leaves it in a state that
the report names.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from weight_update.errors import (
    ConfigurationError,
    EngineUnreachable,
    Phase,
)
from weight_update.options import PauseMode, Way
from weight_update.update.fleet import Attempt, Fleet, Member
from weight_update.update.objections import Objections
from weight_update.update.progress import Stopwatch
from weight_update.update.protocols import Group, Packer
from weight_update.update.reader import Packed, Reader, nobody_else
from weight_update.update.rules import UpdateRules
from weight_update.update.settle import GRACE_SECONDS, RESTARTED, Failure, settle
from weight_update.update.transfer import Transfer
from weight_update.update.verify import prove, verify_fleet
from weight_update.waiting import Deadline, hand_over, spawn
from weight_update.weights.buckets import Plan
from weight_update.weights.growing_plan import GrowingPlan

# A step gets half of what is left, so that one that hangs leaves time for others to go on
# without its engine. The two that may rightly take long get nearly all of it, unless a quorum
# may go on.
_SHARE = 0.5
_LONG_SHARE = 0.9
_LONG: frozenset[Phase] = frozenset({"transfer", "flush"})


@dataclass
class Procedure:
    """One attempt to bring a plan to every engine of a fleet."""

    fleet: Fleet
    group: Group
    packer: Packer
    plan: Plan | GrowingPlan
    rules: UpdateRules
    deadline: Deadline
    watch: Stopwatch = field(default_factory=Stopwatch)
    warnings: list[str] = field(default_factory=list)
    reader: Reader | None = None
    way: Way = "broadcast"
    _paused_at: float = field(default=0.0, init=False, repr=False)
    _reader: Reader = field(init=False, repr=False)
    _objections: Objections = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self._reader = self.reader or Reader(self.packer, self.plan, nobody_else)
        self._objections = Objections(self.fleet, self.packer, self.plan, self.rules)

    def run(self) -> None:
        """Runs all steps.

        Raises:
            WeightUpdateError: A step failed; every engine was settled.
        """
        try:
            first = [self._prepare()]
            self._run_paused(first)
        finally:
            self._reader.let_go()

    def _run_paused(self, first: list[Packed]) -> None:
        self._paused_at = time.perf_counter()
        try:
            self._steps(first)
        except BaseException as error:
            self._settle(error)
            self._note_pause()
            raise

    def _note_pause(self) -> None:
        self.watch.seconds["paused"] = time.perf_counter() - self._paused_at

    def _steps(self, first: list[Packed]) -> None:
        self._pause()
        self._each("drain", lambda m, _, d: m.engine.drain(self._mode_of(m), d))
        self._begin()
        with self._running("transfer"):
            self._transfer(first.pop(), self._share_of("transfer"))
        self._end()
        self._flush()
        self._verify()
        self._stamp()
        self._count()
        self._continue()

    def _settle(self, error: BaseException) -> None:
        self._believe_answers()
        grace = self.deadline.afresh(GRACE_SECONDS)
        failure = Failure(self.group, self.rules, self.watch.phase, error, grace, self._prove)
        try:
            try:
                settle(self.fleet, failure)
            except (KeyboardInterrupt, SystemExit):
                settle(self.fleet, failure)  # leaving now would leave a whole fleet paused
                raise
        except Exception as second:  # noqa: BLE001 - the first error is the one to raise
            error.add_note(f"settling the engines failed as well: {second!r}")

    def _prove(self, member: Member, deadline: Deadline) -> None:
        if self.rules.verify != "off":
            prove(member, self.plan, self.rules.verify, deadline)

    def _believe_answers(self) -> None:
        """Takes note of what single engines confirmed in a step that failed on others."""
        done = {"flush": self._flushed, "stamp": self._stamped, "continue": self._continued}
        note = done.get(self.watch.phase)
        for member in self.fleet.members:
            if note is not None and member.answered_well:
                note(member)

    # -- before the pause ---------------------------------------------------------------

    def _prepare(self) -> Packed:
        """Everything that can fail without an engine noticing: objections, the first pack."""
        with self.watch.running("plan"):
            self._objections.to_plan()
            self._reader.begin()
            first = self._reader.finish("plan", self._share_of("plan"))
            if first is None:
                raise ConfigurationError("there are no weights to send", phase="plan")
            self._objections.to_stream(first.bucket)
            for member in self.fleet.members:
                member.start(Attempt(full=self.rules.full, buckets=self.plan.requests))
            self._objections.of_engines(self._share_of("plan"))
            return first

    # -- steps --------------------------------------------------------------------------

    @contextmanager
    def _running(self, phase: Phase) -> Iterator[None]:
        for member in self.fleet.members:
            member.call = None  # an answer of the step before is none to this one
        with self.watch.running(phase):
            yield

    def _share_of(self, phase: Phase) -> Deadline:
        patient = phase in _LONG and not self.rules.regroups
        return self.deadline.share(_LONG_SHARE if patient else _SHARE)

    def _each(self, phase: Phase, call: Callable[[Member, Attempt, Deadline], None]) -> None:
        deadline = self._share_of(phase)
        with self._running(phase):
            self.fleet.each(phase, lambda m, a: call(m, a, deadline), deadline)

    def _pause(self) -> None:
        again = {m.url: m.maybe_paused or m.found_paused for m in self.fleet.members}
        for member in self.fleet.members:
            member.maybe_paused = True  # before any call leaves: a lost answer may have paused
        self._each("pause", lambda m, _, d: m.engine.pause(self._mode_of(m), d, again=again[m.url]))

    def _mode_of(self, member: Member) -> PauseMode:
        return self.rules.manners(member.url).pause_mode

    def _begin(self) -> None:
        ours = {member.url for member in self.fleet.members if member.maybe_open}
        for member in self.fleet.members:
            member.maybe_open = True
            member.attempt.session = member.engine.session(self.way)

        def begin(member: Member, attempt: Attempt, deadline: Deadline) -> None:
            found_open = attempt.begun.open(deadline)
            attempt.found_open = found_open and member.url not in ours

        self._each("begin", begin)
        for member in self.fleet.members:
            if member.attempt.found_open and not self.rules.whole:
                raise ConfigurationError(
                    "another trainer left its update open, so the engine's weights are mixed",
                    engine=member.url,
                    phase="begin",
                    remedy="push a whole model, not a mapping that may hold some weights only",
                )

    def _transfer(self, first: Packed, deadline: Deadline) -> None:
        Transfer(
            self.fleet,
            self.group,
            self._reader,
            self.plan,
            self.rules,
            deadline,
            self.watch.meter,
            lambda bucket: self._objections.to_bucket(bucket, deadline),
        ).run(first)
        self._objections.to_end(deadline)

    def _end(self) -> None:
        self._each("end", lambda _, attempt, d: attempt.begun.close(d))
        for member in self.fleet.members:
            member.maybe_open = False

    def _flush(self) -> None:
        def flush(member: Member, attempt: Attempt, deadline: Deadline) -> None:
            mode, wanted = self._mode_of(member), self.rules.manners(member.url).flush
            streamed = not self.plan.buckets  # its last bucket was not known to be the last
            separate = wanted and (streamed or not member.engine.flushes_with_update(mode))
            if attempt.flush_owed or (separate and member.engine.can_flush(mode)):
                member.engine.flush(deadline)

        self._each("flush", flush)
        for member in self.fleet.members:
            self._flushed(member)
        self._warn_of_stale_prefixes()

    def _flushed(self, member: Member) -> None:
        member.attempt.flushed = True

    def _verify(self) -> None:
        rules, asked = self.rules, self.rules.full and self.rules.verify != "off"
        with self.watch.running("verify"):
            if asked:
                deadline = self._share_of("verify")
                verify_fleet(
                    self.fleet, self.plan, rules.verify, whole=rules.whole, deadline=deadline
                )
        for member in self.fleet.members if rules.full else ():
            repeated = member.shapes is self.plan.shapes
            member.renew(() if repeated else member.attempt.names)
            if rules.whole:  # some weights alone may have been taken in a shape that is wrong
                member.shapes = self.plan.shapes
            if not asked:
                member.attempt.verified = "off"

    def _warn_of_stale_prefixes(self) -> None:
        members = self.fleet.members if self.rules.full else ()
        unasked = [m for m in members if not self.rules.manners(m.url).flush]
        unable = [
            m for m in members if m not in unasked and not m.engine.can_flush(self._mode_of(m))
        ]
        stale = [*unasked, *unable]
        salted = all(m.engine.salts_prefixes for m in stale)
        way_out = "rollouts.salted() keeps requests clear of them" if salted else "use 'abort'"
        consequence = f"prefixes cached under the old weights may still be served; {way_out}"
        if unasked:
            which = "" if len(unasked) == len(members) else f" of {_urls(unasked)}"
            self.warnings.append(
                f"the prefix cache{which} was not flushed, as configured: {consequence}"
            )
        alike: dict[tuple[str, PauseMode], list[Member]] = {}
        for member in unable:
            found = member.engine.flush_skipped, self._mode_of(member)
            alike.setdefault(found, []).append(member)
        for (words, mode), some in alike.items():
            self.warnings.append(
                f"{words}: {_urls(some)} cannot flush while paused by {mode!r}, so {consequence}"
            )

    def _stamp(self) -> None:
        label = self.rules.label
        if label is None:
            return
        for member in self.fleet.members:
            member.label = None  # until the engine confirms, either label may be there
        self._each("stamp", lambda m, a, d: _stamp(m, a, label, d))
        for member in self.fleet.members:
            self._stamped(member)

    def _stamped(self, member: Member) -> None:
        member.label, member.mislabelled = self.rules.label, False

    def _count(self) -> None:
        """Counts in a thread: a hook that hangs must not keep a whole fleet paused."""
        with self.watch.running("count"):
            counting = spawn(self.rules.counted)
            try:
                self.warnings += counting.result(self.deadline.remaining() / 2)
            except TimeoutError:
                self.warnings.append("the collectors did not count the version in time")

    def _continue(self) -> None:
        self._each("continue", self._resume)
        for member in self.fleet.members:
            self._continued(member)
        self._note_pause()
        label = self.rules.label
        if label is not None:
            self._each("continue", lambda m, a, d: _look_again(m, a, label, "continue", d))

    def _resume(self, member: Member, _: Attempt, deadline: Deadline) -> None:
        if not _unfit(member):
            member.engine.resume(deadline)

    def _continued(self, member: Member) -> None:
        member.maybe_paused = _unfit(member)


def _urls(members: Iterable[Member]) -> str:
    return ", ".join(member.url for member in members)


def _stamp(member: Member, attempt: Attempt, label: str, deadline: Deadline) -> None:
    """Stamps beside a look: who started anew before shows it; who does now, in the last look."""
    looking = hand_over(_look_again, member, attempt, label, "stamp", deadline)
    member.engine.stamp(label, deadline)
    looking.result()


def _look_again(
    member: Member, attempt: Attempt, label: str, phase: Phase, deadline: Deadline
) -> None:
    """A server that started anew says yes to everything, on the weights it started with."""
    seen = member.engine.observe(deadline, readiness=False)
    if member.is_another(seen) or seen.label not in (None, label, attempt.label):
        raise _restarted(member, phase)


def _restarted(member: Member, phase: Phase) -> EngineUnreachable:
    member.attempt.suspicion = RESTARTED
    return EngineUnreachable(
        RESTARTED,
        engine=member.url,
        phase=phase,
        remedy="push again: it is joined anew",
    )


def _unfit(member: Member) -> bool:
    """Whether only a full push may let it serve: it is mixed, or somebody else paused it."""
    return bool(member.doubt) or member.found_paused
