"""The update procedure: plan, pause, drain, begin, transfer, end, flush, stamp, count, continue.

It is the only one in the library. Every step runs on all engines at once, all steps share one
deadline, and whatever fails, :mod:`weight_update.update.settle` finds out what each engine
holds and leaves it in a state that the report names.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch

from weight_update.errors import (
    ConfigurationError,
    EngineRejected,
    Phase,
    UpdateTimeout,
    WeightUpdateError,
)
from weight_update.options import PauseMode
from weight_update.report import UpdateReport
from weight_update.update.fleet import Attempt, Fleet, Member
from weight_update.update.progress import Meter
from weight_update.update.protocols import Group, Packer, Session
from weight_update.update.rules import UpdateRules
from weight_update.update.settle import settle
from weight_update.waiting import Deadline, spawn
from weight_update.weights.buckets import Bucket, Plan

_WATCH_SECONDS = 0.02
# How long an engine's own words are waited for once the wire broke.
_CULPRIT_SECONDS = 0.5


class Stopwatch:
    """Seconds by phase, and which phase runs now."""

    def __init__(self, meter: Meter | None = None) -> None:
        self.meter = meter or Meter()
        self.seconds: dict[str, float] = {}
        self.phase: Phase = "plan"
        self._start = time.perf_counter()

    @contextmanager
    def running(self, phase: Phase) -> Iterator[None]:
        """Times a phase; a failure inside it leaves the phase's name behind."""
        self.phase = phase
        self.meter.enter(phase)
        start = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[phase] = self.seconds.get(phase, 0.0) + time.perf_counter() - start

    def finish(self) -> dict[str, float]:
        """All seconds so far, with ``total``."""
        return {**self.seconds, "total": time.perf_counter() - self._start}


@dataclass
class Procedure:
    """One attempt to bring a plan to every engine of a fleet."""

    fleet: Fleet
    group: Group
    packer: Packer
    plan: Plan
    rules: UpdateRules
    deadline: Deadline
    watch: Stopwatch = field(default_factory=Stopwatch)
    warnings: list[str] = field(default_factory=list)
    _packed: list[torch.Tensor] = field(default_factory=list, init=False, repr=False)

    def run(self) -> None:
        """Runs all steps.

        Raises:
            WeightUpdateError: A step failed; every engine was settled.
        """
        self._packed = self._prepare()
        paused_at = time.perf_counter()
        try:
            self._steps()
        except BaseException as error:
            self._settle(error)
            raise
        finally:
            self.watch.seconds["paused"] = time.perf_counter() - paused_at

    def _steps(self) -> None:
        self._pause()
        self._each("drain", lambda m, _: m.engine.drain(self.rules.pause_mode, self.deadline))
        self._begin()
        with self.watch.running("transfer"):
            self._transfer()
        self._end()
        self._flush()
        self._stamp()
        self._count()
        self._continue()

    def _settle(self, error: BaseException) -> None:
        self._believe_answers()
        try:
            settle(self.fleet, self.group, self.rules, self.watch.phase, error)
        except Exception as second:  # noqa: BLE001 - the first error is the one to raise
            error.add_note(f"settling the engines failed as well: {second!r}")

    def _believe_answers(self) -> None:
        """Takes note of what single engines confirmed in a step that failed on others."""
        done = {"flush": self._flushed, "stamp": self._stamped, "continue": self._continued}
        note = done.get(self.watch.phase)
        for member in self.fleet.members if note else ():
            if note and member.answered_well:
                note(member)

    # -- before the pause ---------------------------------------------------------------

    def _prepare(self) -> list[torch.Tensor]:
        """Everything that can fail without an engine noticing: objections, the first pack."""
        with self.watch.running("plan"):
            self._object(frozenset(self.plan.names))
            self.packer.reserve(self.plan)
            for member in self.fleet.members:
                member.start(Attempt(full=self.rules.full, buckets=len(self.plan.buckets)))
            return self.packer.pack(self.plan.buckets[0])

    def _object(self, names: frozenset[str]) -> None:
        """Raises with every objection at once."""
        mode = self.rules.pause_mode
        found = [(m.url, m.engine.objection(mode)) for m in self.fleet.members]
        objections = [f"{url}: {text}" for url, text in found if text]
        for member in self.fleet.members if self.rules.full and not self.rules.whole else ():
            lacking = sorted(member.owed - names) if member.doubt else []
            if lacking:
                objections.append(
                    f"{member.url} holds mixed weights, and this push lacks {len(lacking)} of the "
                    f"tensors that heal it: {lacking[0]!r}, ..."
                )
        objections += self.packer.objections(self.plan)
        if objections:
            raise ConfigurationError("; ".join(objections), phase="plan")

    # -- steps --------------------------------------------------------------------------

    def _each(self, phase: Phase, call: Callable[[Member, Attempt], None]) -> None:
        with self.watch.running(phase):
            self.fleet.each(phase, call, self.deadline)

    def _pause(self) -> None:
        for member in self.fleet.members:
            member.maybe_paused = True  # before any call leaves: a lost answer may have paused
        self._each("pause", lambda m, _: m.engine.pause(self.rules.pause_mode, self.deadline))

    def _begin(self) -> None:
        ours = {member.url for member in self.fleet.members if member.maybe_open}
        for member in self.fleet.members:
            member.maybe_open = True
            member.attempt.session = member.engine.session()

        def begin(member: Member, attempt: Attempt) -> None:
            found_open = _session_of(attempt).open(self.deadline)
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

    def _end(self) -> None:
        self._each("end", lambda _, attempt: _session_of(attempt).close(self.deadline))
        for member in self.fleet.members:
            member.maybe_open = False

    def _flush(self) -> None:
        mode = self.rules.pause_mode

        def flush(member: Member, attempt: Attempt) -> None:
            separate = self.rules.flush and not member.engine.flushes_with_update(mode)
            if attempt.flush_refused or (separate and member.engine.can_flush(mode)):
                member.engine.flush(self.deadline)

        self._each("flush", flush)
        for member in self.fleet.members:
            self._flushed(member)
        self._warn_of_stale_prefixes(mode)

    def _flushed(self, member: Member) -> None:
        if self.rules.full:
            member.renew()

    def _warn_of_stale_prefixes(self, mode: PauseMode) -> None:
        stale = [m for m in self.fleet.members if not m.engine.can_flush(mode)]
        consequence = "prefixes cached under the old weights may still be served"
        if not self.rules.full:
            return
        if not self.rules.flush:
            self.warnings.append(f"the prefix cache was not flushed, as configured: {consequence}")
        elif stale:
            self.warnings.append(
                f"{stale[0].engine.flush_skipped}: {', '.join(m.url for m in stale)} cannot flush "
                f"while paused by {mode!r}, so {consequence}"
            )

    def _stamp(self) -> None:
        label = self.rules.label
        if label is None:
            return
        for member in self.fleet.members:
            member.label = None  # until the engine confirms, either label may be there
        self._each("stamp", lambda m, _: m.engine.stamp(label, self.deadline))
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

    def _resume(self, member: Member, _: Attempt) -> None:
        if not member.doubt:  # only a full push makes a mixed engine fit to serve
            member.engine.resume(self.deadline)

    def _continued(self, member: Member) -> None:
        member.maybe_paused = bool(member.doubt)

    # -- transfer -----------------------------------------------------------------------

    def _transfer(self) -> None:
        """Packs each bucket while the one before it travels; none is held once it arrived."""
        buckets = self.plan.buckets
        packed, self._packed = self._packed, []
        for index, bucket in enumerate(buckets):
            self._send(bucket, packed, last=index == len(buckets) - 1)
            if index + 1 < len(buckets):
                packed = self.packer.pack(buckets[index + 1])
            self._await_bucket()
            self.watch.meter.confirm(bucket)

    def _send(self, bucket: Bucket, packed: list[torch.Tensor], *, last: bool) -> None:
        def apply(member: Member, attempt: Attempt) -> None:
            flush = self.rules.flush and member.engine.flushes_with_update(self.rules.pause_mode)
            try:
                _session_of(attempt).apply(
                    bucket,
                    group_name=self.group.name,
                    flush=last and flush,
                    deadline=self.deadline,
                )
            except EngineRejected as error:
                self._note_refusal(attempt, error)
            except Exception as error:
                attempt.suspicion = str(getattr(error, "message", error))
                raise
            attempt.confirmed += 1

        names = frozenset(spec.name for spec in bucket.specs)
        for member in self.fleet.members:
            member.attempt.names |= names
        self.fleet.start(apply)
        self.group.broadcast(packed)

    def _note_refusal(self, attempt: Attempt, error: EngineRejected) -> None:
        """Raises unless the engine did what the attempt needed all the same."""
        if error.applied == "all":
            attempt.flush_refused = True  # loaded; the flush step asks again
        elif error.applied == "partly" and not self.rules.full:
            return  # a loader tripped over a warm-up's number, which was received
        else:
            if error.applied != "nothing":
                attempt.suspicion = error.message
            raise error

    def _await_bucket(self) -> None:
        """Watches every engine's answer while the bytes move; the first no ends the attempt."""
        calls = self.fleet.calls()
        pending = set(calls)
        while pending:
            done, pending = wait(pending, _WATCH_SECONDS, return_when=FIRST_EXCEPTION)
            if any(call.exception() for call in done):
                self._raise_culprit()
            if pending:
                self._check_wire()
        self._drain_wire()

    def _raise_culprit(self) -> None:
        """Raises the error of the engine that began it.

        When one engine dies, the others fail to receive, and may be the first to say so.
        """
        calls = self.fleet.calls()
        end = self.deadline.at_most(_CULPRIT_SECONDS)
        errors = _errors_of(calls)
        while all(map(_is_consequence, errors)) and not all(c.done() for c in calls):
            if end.expired():
                break
            time.sleep(_WATCH_SECONDS)
            errors = _errors_of(calls)
        for error in sorted(errors, key=_is_consequence):
            raise error

    def _check_wire(self) -> None:
        """Raises if the wire broke or time is out; prefers the engine's own words."""
        try:
            self.group.moving()
        except WeightUpdateError:
            self._raise_culprit()
            raise
        if self.deadline.expired():
            self.fleet.gather("transfer", self.deadline)

    def _drain_wire(self) -> None:
        """All engines said yes: what they confirmed must have left by now."""
        pause = 1e-5
        while self.group.moving():
            if self.deadline.expired():
                for member in self.fleet.members:
                    member.attempt.suspicion = "it confirmed a bucket that it never received"
                raise UpdateTimeout(
                    "every engine confirmed the bucket, but its bytes never left",
                    phase="transfer",
                )
            time.sleep(pause)
            pause = min(2 * pause, 1e-3)

    def report(self, version: int) -> UpdateReport:
        """What this attempt did."""
        return UpdateReport(
            version=version,
            bytes=self.plan.nbytes,
            tensors=self.plan.tensors,
            buckets=len(self.plan.buckets),
            seconds=self.watch.finish(),
            engines=self.fleet.outcomes(),
            pause_mode=self.rules.pause_mode,
            warnings=tuple(self.warnings),
        )


def _errors_of(calls: Sequence[Future[None]]) -> list[BaseException]:
    return [error for call in calls if call.done() and (error := call.exception())]


def _is_consequence(error: BaseException) -> bool:
    return isinstance(error, EngineRejected) and "Failed to receive" in error.message


def _session_of(attempt: Attempt) -> Session:
    if attempt.session is None:
        raise WeightUpdateError("no update was begun", phase="begin")
    return attempt.session
