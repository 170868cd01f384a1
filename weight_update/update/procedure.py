"""The update procedure: plan, pause, drain, begin, transfer, end, flush, stamp, count, continue.

It is the only one in the library. Every step runs on all engines at once, all steps share one
deadline, and whatever fails, :mod:`weight_update.update.settle` finds out what each engine
holds and leaves it in a state that the report names.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_EXCEPTION, wait
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
from weight_update.update.fleet import Fleet, Member
from weight_update.update.policy import Policy
from weight_update.update.protocols import Group, Packer
from weight_update.update.settle import settle
from weight_update.waiting import Deadline
from weight_update.weights.buckets import Bucket, Plan

_log = logging.getLogger("weight_update")

_WATCH_SECONDS = 0.02
_CULPRIT_SECONDS = 0.5
SKIPPED_FLUSH = "Skipping the SGLang radix-cache flush"


class Stopwatch:
    """Seconds by phase, and which phase runs now."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self.phase: Phase = "plan"
        self._start = time.perf_counter()

    @contextmanager
    def running(self, phase: Phase) -> Iterator[None]:
        """Times a phase; a failure inside it leaves the phase's name behind."""
        self.phase = phase
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
    policy: Policy
    deadline: Deadline
    watch: Stopwatch = field(default_factory=Stopwatch)
    warnings: list[str] = field(default_factory=list)

    def run(self) -> None:
        """Runs all steps.

        Raises:
            WeightUpdateError: A step failed; every engine was settled.
        """
        packed = self._prepare()
        paused_at = time.perf_counter()
        try:
            self._steps(packed)
        except BaseException as error:
            settle(self.fleet, self.group, self.policy, self.watch.phase, error)
            raise
        finally:
            self.watch.seconds["paused"] = time.perf_counter() - paused_at

    def _steps(self, packed: list[torch.Tensor]) -> None:
        self._each("pause", self._pause)
        self._each("drain", lambda m: m.engine.drain(self.policy.pause_mode, self.deadline))
        self._each("begin", self._begin)
        with self.watch.running("transfer"):
            self._transfer(packed)
        self._each("end", self._end)
        self._flush()
        self._stamp()
        with self.watch.running("count"):
            self.warnings += self.policy.counted()
        self._each("continue", self._resume)

    # -- before the pause ---------------------------------------------------------------

    def _prepare(self) -> list[torch.Tensor]:
        """Everything that can fail without an engine noticing: objections, the first pack."""
        with self.watch.running("plan"):
            mode = self.policy.pause_mode
            found = ((m.url, m.engine.objection(mode)) for m in self.fleet.members)
            objections = [f"{url}: {text}" for url, text in found if text]
            if objections:
                raise ConfigurationError("; ".join(objections), phase="plan")
            for member in self.fleet.members:
                member.start_attempt(len(self.plan.buckets), full=self.policy.full)
            return self.packer.pack(self.plan.buckets[0])

    # -- steps --------------------------------------------------------------------------

    def _each(self, phase: Phase, call: Callable[[Member], None]) -> None:
        with self.watch.running(phase):
            self.fleet.each(phase, call, self.deadline)

    def _pause(self, member: Member) -> None:
        member.maybe_paused = True  # before the call leaves: a lost answer may have paused it
        member.engine.pause(self.policy.pause_mode, self.deadline)

    def _begin(self, member: Member) -> None:
        member.session = member.engine.session()
        if member.session.open(self.deadline):
            member.doubt = "another trainer left its update open"

    def _end(self, member: Member) -> None:
        assert member.session is not None
        member.session.close(self.deadline)
        member.session = None

    def _resume(self, member: Member) -> None:
        if member.doubt:
            return  # only a full push makes it fit to serve
        member.engine.resume(self.deadline)
        member.maybe_paused = False

    def _stamp(self) -> None:
        label = self.policy.label
        if label is None:
            return

        def stamp(member: Member) -> None:
            member.label = None  # until the engine confirms, either label may be there
            member.engine.stamp(label, self.deadline)
            member.label = label

        self._each("stamp", stamp)

    def _flush(self) -> None:
        mode = self.policy.pause_mode

        def flush(member: Member) -> None:
            separate = self.policy.flush and not member.engine.flushes_with_update(mode)
            if member.flush_refused or (separate and member.engine.can_flush(mode)):
                member.engine.flush(self.deadline)
            member.finish_attempt()

        self._each("flush", flush)
        self._warn_of_stale_prefixes(mode)

    def _warn_of_stale_prefixes(self, mode: PauseMode) -> None:
        stale = [m.url for m in self.fleet.members if not m.engine.can_flush(mode)]
        consequence = "prefixes cached under the old weights may still be served"
        if not self.policy.flush and self.policy.full:
            self.warnings.append(f"the prefix cache was not flushed, as configured: {consequence}")
        elif self.policy.flush and stale:
            self.warnings.append(
                f"{SKIPPED_FLUSH}: {', '.join(stale)} cannot flush while paused by {mode!r}, so "
                f"{consequence}"
            )

    # -- transfer -----------------------------------------------------------------------

    def _transfer(self, packed: list[torch.Tensor]) -> None:
        """Packs each bucket while the one before it travels."""
        buckets = self.plan.buckets
        for index, bucket in enumerate(buckets):
            self._send(bucket, packed, last=index == len(buckets) - 1)
            if index + 1 < len(buckets):
                packed = self.packer.pack(buckets[index + 1])
            self._await_bucket()

    def _send(self, bucket: Bucket, packed: list[torch.Tensor], *, last: bool) -> None:
        self.fleet.start(lambda member: self._apply(member, bucket, last=last))
        self.group.broadcast(packed)

    def _apply(self, member: Member, bucket: Bucket, *, last: bool) -> None:
        assert member.session is not None
        mode = self.policy.pause_mode
        flush = last and self.policy.flush and member.engine.flushes_with_update(mode)
        try:
            member.session.apply(
                bucket,
                group_name=self.group.name,
                flat=self.packer.flat,
                flush=flush,
                deadline=self.deadline,
            )
        except EngineRejected as error:
            self._note_refusal(member, error)
        except WeightUpdateError as error:
            member.suspect(error.message)
            raise
        member.confirmed += 1

    def _note_refusal(self, member: Member, error: EngineRejected) -> None:
        """Raises unless the engine did what the attempt needed all the same."""
        if error.applied == "all":
            member.flush_refused = True  # loaded; the flush step asks again
        elif error.applied == "partly" and not self.policy.full:
            return  # a loader tripped over a warm-up's number, which was received
        else:
            if error.applied != "nothing":
                member.suspect(error.message)
            raise error

    def _await_bucket(self) -> None:
        """Watches every engine's answer while the bytes move; the first no ends the attempt."""
        calls = [member.call for member in self.fleet.members if member.call is not None]
        pending = set(calls)
        while pending:
            done, pending = wait(pending, _WATCH_SECONDS, return_when=FIRST_EXCEPTION)
            for call in done:
                call.result()
            if pending:
                self._check_wire()
        self._drain_wire()

    def _check_wire(self) -> None:
        """Raises if the wire broke or time is out; prefers the engine's own words."""
        try:
            self.group.moving()
        except WeightUpdateError:
            self._raise_culprit()
            raise
        if self.deadline.expired():
            self.fleet.gather("transfer", self.deadline)

    def _raise_culprit(self) -> None:
        calls = [member.call for member in self.fleet.members if member.call is not None]
        done, _ = wait(calls, _CULPRIT_SECONDS, return_when=FIRST_EXCEPTION)
        for call in done:
            call.result()

    def _drain_wire(self) -> None:
        """All engines said yes: what they confirmed must have left by now."""
        pause = 1e-5
        while self.group.moving():
            if self.deadline.expired():
                for member in self.fleet.members:
                    member.disbelieve("it confirmed a bucket that it never received")
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
            pause_mode=self.policy.pause_mode,
            warnings=tuple(self.warnings),
        )
