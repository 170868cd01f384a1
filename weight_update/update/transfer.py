"""The transfer: each bucket is announced to every engine and broadcast to all at once."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from dataclasses import dataclass, field
from itertools import count
from threading import Lock

from weight_update.errors import EngineRejected, UpdateTimeout, WeightUpdateError
from weight_update.update.fleet import Attempt, Fleet, Member, is_consequence
from weight_update.update.progress import Meter
from weight_update.update.protocols import Group
from weight_update.update.reader import Packed, Reader
from weight_update.update.rules import UpdateRules
from weight_update.waiting import Deadline
from weight_update.weights.buckets import Bucket, Plan
from weight_update.weights.cargo import Cargo
from weight_update.weights.growing_plan import GrowingPlan, is_last

_WATCH_SECONDS = 0.02
_POLL_SECONDS = 2e-4  # a bucket of 2 GiB travels 6 ms between two GPUs
# How long an engine's own words are waited for once the wire broke.
_CULPRIT_SECONDS = 0.5


@dataclass(frozen=True)
class _Sent:
    """A bucket that engines were told of, and the calls that tell when each has taken it.

    Engines may say so before its bytes are there: their GPUs keep the order.
    """

    bucket: Bucket
    calls: list[Future[None]]
    queued: bool


@dataclass(frozen=True)
class Transfer:
    """All buckets of a plan on their way to every engine of a fleet."""

    fleet: Fleet
    group: Group
    reader: Reader
    plan: Plan | GrowingPlan
    rules: UpdateRules
    deadline: Deadline
    meter: Meter
    object_to: Callable[[Bucket], None]
    _sent: deque[_Sent] = field(default_factory=deque, init=False)
    _counting: Lock = field(default_factory=Lock, init=False, repr=False)

    def run(self, first: Packed) -> None:
        """Sends all buckets; each is packed while the one before it travels, if there is room.

        Args:
            first: The first bucket.

        Raises:
            EngineRejected: An engine refused a bucket; the others' calls may still run.
            EngineUnreachable: A peer is gone.
            UpdateTimeout: A bucket had not arrived everywhere at the deadline.
        """
        packed: Packed | None = first
        for index in count():
            if packed is None:
                break
            if index:
                self.object_to(packed.bucket)
            unordered = packed.cargo.unordered
            self._send(packed.bucket, packed.give(), last=is_last(self.plan, index))
            self._await_all_but(1)
            self.reader.start(index + 1)
            self._await_all_but(1 if unordered else 0)
            packed = self.reader.finish("transfer", self.deadline)
        self._await_all_but(0)
        self._drain_wire()
        self._expect(self.plan.requests)

    def _expect(self, buckets: int) -> None:
        for member in self.fleet.members:
            member.attempt.buckets = buckets

    def _send(self, bucket: Bucket, cargo: Cargo, *, last: bool) -> None:
        # A stream may have another bucket: until it ended, no engine holds everything.
        self._expect(self.plan.requests + (not self.plan.ended))
        before = {member.url: member.call for member in self.fleet.members} if self._sent else {}

        def apply(member: Member, attempt: Attempt) -> None:
            earlier = before.get(member.url)
            try:
                self._apply(member, attempt, bucket, cargo, last=last)
            finally:
                if earlier is not None:
                    wait([earlier])  # the last call stands for all: none is under way after it
            if earlier is not None:
                earlier.result()

        for member in self.fleet.members:
            member.attempt.names |= bucket.names
        self.fleet.start(apply)
        self._sent.append(_Sent(bucket, self.fleet.calls(), cargo.queued))
        self.group.broadcast(cargo.tensors)

    def _apply(
        self, member: Member, attempt: Attempt, bucket: Bucket, cargo: Cargo, *, last: bool
    ) -> None:
        manners = self.rules.manners(member.url)
        flush = manners.flush and member.engine.flushes_with_update(manners.pause_mode)
        try:
            attempt.begun.apply(
                bucket,
                cargo,
                group_name=self.group.name,
                flush=last and flush,
                deadline=self.deadline,
            )
        except EngineRejected as error:
            self._note_refusal(attempt, error)
        except Exception as error:
            attempt.suspicion = str(getattr(error, "message", error))
            raise
        with self._counting:
            attempt.confirmed += 1

    def _note_refusal(self, attempt: Attempt, error: EngineRejected) -> None:
        """Raises unless the engine did what the attempt needed all the same."""
        if error.applied == "all":
            attempt.flush_owed = True  # loaded; the flush step asks again
        elif error.applied == "partly" and not self.rules.full:
            return  # a loader tripped over a warm-up's number, which was received
        else:
            if error.applied != "nothing":
                attempt.suspicion = error.message
            raise error

    def _await_all_but(self, buckets: int) -> None:
        """Waits until no more buckets than these are on their way."""
        while len(self._sent) > buckets:
            self._await_bucket(self._sent[0])
            self.meter.confirm(self._sent.popleft().bucket)

    def _await_bucket(self, sent: _Sent) -> None:
        """Watches every engine's answer while the bytes move; the first no ends the attempt."""
        pending = set(sent.calls)
        while pending:
            _, pending = wait(pending, _WATCH_SECONDS, return_when=FIRST_EXCEPTION)
            if _errors_of(self._calls):
                self._raise_culprit()
            if pending:
                self._check_wire()
                self.reader.check()
        if not sent.queued:
            self._drain_wire()

    def _raise_culprit(self) -> None:
        """Raises the error of the engine that began it.

        When one engine dies, the others fail to receive, and may be the first to say so.
        """
        calls = self._calls
        end = self.deadline.at_most(_CULPRIT_SECONDS)
        errors = _errors_of(calls)
        while all(map(is_consequence, errors)) and not end.expired():
            self.reader.check()  # another rank of the trainer may have begun it
            if self.reader.alone and all(call.done() for call in calls):
                break
            end.sleep(_WATCH_SECONDS)
            errors = _errors_of(calls)
        for error in sorted(errors, key=is_consequence):
            raise error

    @property
    def _calls(self) -> list[Future[None]]:
        """The calls for all buckets that are on their way."""
        return [call for sent in self._sent for call in sent.calls]

    def _check_wire(self) -> None:
        """Raises if the wire broke or time is out; prefers the engine's own words."""
        try:
            self.group.moving()
        except WeightUpdateError as error:
            self._raise_culprit()
            if len(self.fleet.members) == 1:
                error.engine = self.fleet.members[0].url
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
            self.reader.check()  # another rank of the trainer may be the one that takes nothing
            self.deadline.sleep(pause)
            pause = min(2 * pause, _POLL_SECONDS)


def _errors_of(calls: Sequence[Future[None]]) -> list[BaseException]:
    return [error for call in calls if call.done() and (error := call.exception())]
