"""The ranks of a sharded trainer: one leads and talks to the engines, the others read with it.

A shard becomes a whole value only if every rank that holds a part takes part in the gather, in
the same order. So the leader says what is read next, and the others read exactly that:

1. Every rank says that it is ready, with digests of what it extracted, or with its error. An
   error, another list, or a rank that does not come in time ends the update on all of them
   before any engine is touched.
2. The leader updates the engines. Before it reads a bucket it announces the bucket's weights;
   the others read them too, throw the values away, and watch for the end meanwhile. One whose
   read fails says so, which the leader finds with :meth:`Crew.check`.
3. The leader says how it ended: all return the same report, or raise the same error.

Nothing of this is a collective. Who waits for a slow engine waits for a message, by a deadline
of its own, and no time-out of the training group runs meanwhile.
"""

from __future__ import annotations

import threading
import uuid
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from hashlib import sha256
from itertools import count, pairwise
from typing import Any, Protocol
from weakref import WeakKeyDictionary

import torch

from weight_update.errors import (
    ConfigurationError,
    Phase,
    UpdateTimeout,
    WeightMismatchError,
    WeightUpdateError,
    wrapped,
)
from weight_update.report import UpdateReport, error_from_dict
from weight_update.waiting import Deadline, spawn
from weight_update.weights.shards.held import let_go
from weight_update.weights.specs import Turn, Weight

_FIRST_POLL_SECONDS = 0.001
_LAST_POLL_SECONDS = 0.02
# An update may take this much longer than its time-out; so the others wait for its end.
_GRACE_SECONDS = 5.0
# After a failure, what a rank waits for its own reads: training goes on at once otherwise, and
# its collectives would meet those that still run.
_LET_GO_SECONDS = 1.0
_SLICES = 32

Update = Callable[[], UpdateReport]


class Channel(Protocol):
    """Messages between the ranks of one trainer; a message stays until it is removed."""

    @property
    def rank(self) -> int:
        """This process among all ranks."""

    @property
    def ranks(self) -> int:
        """How many ranks there are."""

    def post(self, key: str, message: Mapping[str, Any]) -> None:
        """Leaves a message, in place of one that is there."""

    def peek(self, key: str) -> dict[str, Any] | None:
        """The message that is there, which stays; None if there is none."""

    def remove(self, key: str) -> bool:
        """Takes a message away; False if there was none (any more)."""


OpenChannel = Callable[[], Channel | None]


class _Reads:
    """What one update has announced on this rank and not read yet."""

    def __init__(self) -> None:
        self._left = 0
        self._changed = threading.Condition()

    def idle(self, seconds: float) -> bool:
        """Waits until everything is read; False if it is not in time."""
        with self._changed:
            return self._changed.wait_for(lambda: self._left == 0, seconds)

    def expect(self, number: int) -> None:
        """So many more follow."""
        with self._changed:
            self._left += number

    def read(self, weight: Weight) -> torch.Tensor:
        """Reads one of the weights that were announced."""
        if self._left == 0:
            raise WeightUpdateError(
                f"{weight.spec.name!r} is read without the other ranks, or after one failed",
                phase="transfer",
            )
        try:
            value = weight.read()
        except BaseException:
            self.give_up()
            raise
        with self._changed:
            self._left = max(0, self._left - 1)
            self._changed.notify_all()
        return value

    def give_up(self) -> None:
        """Nothing that was announced is read any more: after a failure no order can be kept."""
        with self._changed:
            self._left = 0
            self._changed.notify_all()


@dataclass
class _Desk:
    """What a rank keeps from one update to the next.

    Attributes:
        busy: Held by the update that runs.
        reads: Of the last update; one that failed may have left some behind.
        litter: Messages of updates that are over, by who was to hear them.
    """

    busy: threading.Lock = field(default_factory=threading.Lock)
    reads: _Reads = field(default_factory=_Reads)
    litter: dict[tuple[int, ...], list[str]] = field(default_factory=dict)


_desks: WeakKeyDictionary[Any, _Desk] = WeakKeyDictionary()


class Crew:
    """The ranks that read one list of weights together, as one of them sees them.

    1. :meth:`of` says whether anything has to be read together at all.
    2. :meth:`run` runs the update on the leader, which calls :meth:`lead` once it needs the
       weights, and follows on all others.

    Args:
        ranks: All that take part, this one included.
        channel: Messages between them.
        weights: What this rank extracted; the same on all.
        trouble: Why it could not.

    Attributes:
        leads: Whether this rank talks to the engines.
    """

    def __init__(
        self,
        ranks: Sequence[int],
        channel: Channel,
        weights: Sequence[Weight],
        trouble: Exception | None = None,
    ) -> None:
        self._leader = min(ranks)
        self._others = tuple(sorted(set(ranks) - {self._leader}))
        self._channel = channel
        self._weights = weights
        self._trouble = trouble
        self._desk = _desks.setdefault(channel, _Desk())
        self._reads = _Reads()
        self._entered = self._over = False
        self._attempt = uuid.uuid4().hex
        self._said = 0
        self._present: set[int] = set()
        self._deadline = Deadline(0.0)
        self._reading: Future[None] | None = None
        self._complained = False
        self.leads = channel.rank == self._leader

    @classmethod
    def of(cls, weights: Sequence[Weight], open_channel: OpenChannel) -> Crew | None:
        """The crew that reads ``weights``; None where this rank can read all by itself.

        Args:
            weights: What this rank extracted.
            open_channel: Opens the channel, or returns None where there is but one rank.

        Raises:
            ConfigurationError: This rank holds no part of them.
        """
        together = [weight for weight in weights if weight.collective]
        channel = open_channel() if together else None
        if channel is None:
            return None
        everybody = range(channel.ranks)
        return cls._among({r for w in together for r in w.ranks or everybody}, channel, weights)

    @classmethod
    def without_weights(
        cls, ranks: Collection[int], trouble: Exception, open_channel: OpenChannel
    ) -> Crew | None:
        """The crew of a rank that could not extract what the others wait to read with it.

        Args:
            ranks: Who takes part; none if nothing is read together.
            trouble: What went wrong; all of them will raise it.
            open_channel: As in :meth:`of`.
        """
        channel = open_channel() if ranks else None
        return None if channel is None else cls._among(set(ranks), channel, (), trouble)

    @classmethod
    def _among(
        cls,
        ranks: set[int],
        channel: Channel,
        weights: Sequence[Weight],
        trouble: Exception | None = None,
    ) -> Crew | None:
        if channel.rank not in ranks:
            raise ConfigurationError(
                f"rank {channel.rank} holds no part of these weights; ranks "
                f"{', '.join(map(str, sorted(ranks)))} do",
                phase="plan",
                remedy="call update_weights() on those ranks only",
            )
        return None if len(ranks) == 1 else cls(sorted(ranks), channel, weights, trouble)

    def run(self, update: Update, deadline: Deadline) -> UpdateReport:
        """Runs ``update`` on the leader, and follows it on the others.

        Args:
            update: Updates the engines; it gets its weights from :meth:`lead`.
            deadline: By when every rank must have come. An update that runs is waited for as
                long as it says.

        Raises:
            WeightUpdateError: The same on all ranks.
        """
        self._deadline = deadline
        try:
            return self._command(update) if self.leads else self._follow()
        finally:
            self._over = True
            if self._entered:
                self._tidy()
                self._desk.busy.release()

    # -- the leader ---------------------------------------------------------------------

    def lead(self) -> tuple[Weight, ...]:
        """Waits until every rank is ready, and returns the weights, which then are read together.

        Raises:
            WeightUpdateError: A rank failed, has other weights, or did not come in time.
        """
        self._enter()
        if self._trouble is not None:
            with suppress(UpdateTimeout):
                dict(self._muster())
            raise self._trouble
        ready = dict(self._muster())
        self._sweep()
        mine = _digests(self._weights)
        for rank, message in sorted(ready.items()):
            if message["error"] is not None:
                raise _of_rank(rank, message["error"])
            self._compare(rank, mine, message["digests"])
        self._await_earlier_reads()
        return tuple(self._in_turn(index, weight) for index, weight in enumerate(self._weights))

    def check(self) -> None:
        """Raises the error of another rank whose read failed."""
        fault = self._channel.peek(f"{self._attempt}/fault")
        if fault is not None:
            raise _of_rank(fault["rank"], fault["error"])

    def _command(self, update: Update) -> UpdateReport:
        try:
            if self._trouble is not None:
                self.lead()
            report = update()
        except BaseException as error:
            with suppress(Exception):  # the first error is the one to raise
                self._dismiss(error)
            raise
        self._say({"report": report.to_dict()})
        self._await_hearing()
        return report

    def _dismiss(self, error: BaseException) -> None:
        if not self._entered:  # it failed before it asked for the weights
            self._deadline = self._deadline.afresh(_LET_GO_SECONDS)
            with suppress(WeightUpdateError):
                self.lead()
        self._say({"error": _plain(error, "plan")})
        self._reads.idle(_LET_GO_SECONDS)
        self._await_hearing()

    def _await_hearing(self) -> None:
        """Who holds the store must not end the process before all have heard how it ended."""
        waiting, end = set(self._present), self._deadline.afresh(_LET_GO_SECONDS)
        for pause in _pauses():
            waiting -= {r for r in waiting if self._channel.remove(f"{self._attempt}/heard/{r}")}
            if not waiting:
                return self._sweep()
            if end.expired():
                return None
            end.sleep(pause)
        return None

    def _muster(self) -> Iterator[tuple[int, dict[str, Any]]]:
        """Every other rank and what it has to say, as they come; each is told where to listen."""
        missing = set(self._others)
        for pause in _pauses():
            for rank in sorted(missing):
                message = self._channel.peek(f"ready/{rank}")
                # One that has given up meanwhile took its message back.
                if message is not None and self._channel.remove(f"ready/{rank}"):
                    missing.remove(rank)
                    self._present.add(rank)
                    self._answer(message["token"])
                    yield rank, message
            if not missing:
                return
            if self._deadline.expired():
                raise _absent(missing, self._deadline)
            self._deadline.sleep(pause)

    def _answer(self, token: str) -> None:
        patience = self._deadline.remaining() + _GRACE_SECONDS
        self._channel.post(f"answer/{token}", {"attempt": self._attempt, "seconds": patience})

    def _compare(self, rank: int, mine: list[str], theirs: list[str]) -> None:
        apart = [index for index in range(_SLICES) if mine[index] != theirs[index]]
        if apart:
            names = [weight.spec.name for weight in _slices(self._weights)[apart[0]]]
            where = f" from {names[0]!r} on" if names else ""
            raise WeightMismatchError(
                f"rank {rank} has other weights than rank {self._leader}{where}",
                phase="plan",
                remedy="pass the same model on every rank, wrapped alike",
            )

    def _in_turn(self, index: int, weight: Weight) -> Weight:
        """A weight that is read by announcement, and whole: the others do not know which rows."""
        if not weight.collective:
            return weight
        turn = Turn(index, self._announce)
        return replace(weight, read=partial(self._reads.read, weight), rows=None, turn=turn)

    def _announce(self, indices: Sequence[int]) -> None:
        if self._over:
            raise WeightUpdateError("the update that this bucket belongs to is over")
        if not self._reads.idle(self._deadline.remaining()):
            raise _stuck(self._channel.rank)
        self._reads.expect(len(indices))
        self._say({"read": list(indices)})

    def _say(self, message: Mapping[str, Any]) -> None:
        litter = self._desk.litter.setdefault(self._others, [])
        if not self._said:
            litter.append(f"{self._attempt}/fault")
        litter.append(f"{self._attempt}/{self._said}")
        self._said += 1
        self._channel.post(litter[-1], message)

    def _sweep(self) -> None:
        """Removes what was said before: every rank that is ready has heard it."""
        for key in self._desk.litter.pop(self._others, ()):
            self._channel.remove(key)

    # -- the others ---------------------------------------------------------------------

    def _follow(self) -> UpdateReport:
        self._enter()
        try:
            self._await_earlier_reads()
        except WeightUpdateError as error:
            self._trouble = self._trouble or error
        token = self._report_for_duty()
        try:
            self._listen(token)
            return self._obey()
        except (KeyboardInterrupt, SystemExit) as interrupt:
            self._desert(interrupt)
            raise

    def _obey(self) -> UpdateReport:
        """Reads what is announced until the end is."""
        for number in count():
            message = self._await(f"{self._attempt}/{number}")
            if "read" not in message:
                break
            self._read_too(message["read"])
        return self._end(message)

    def _desert(self, interrupt: BaseException) -> None:
        """Nobody shall wait for a rank that leaves."""
        with suppress(WeightUpdateError):
            self._channel.remove(f"ready/{self._channel.rank}")
            self._complain(interrupt)

    def _report_for_duty(self) -> str:
        """Says that this rank is ready, or why it is not."""
        token = uuid.uuid4().hex
        trouble = None if self._trouble is None else _plain(self._trouble, "plan")
        ready = {"token": token, "digests": _digests(self._weights), "error": trouble}
        self._channel.post(f"ready/{self._channel.rank}", ready)
        return token

    def _listen(self, token: str) -> None:
        """Waits until the leader has taken note, and learns where it speaks."""
        key = f"answer/{token}"
        end = self._deadline.afresh(self._deadline.remaining() + _GRACE_SECONDS)
        answer = self._seen(key, end)
        if answer is None and not self._channel.remove(f"ready/{self._channel.rank}"):
            answer = self._seen(key, self._deadline.afresh(_GRACE_SECONDS))  # it was taken just now
        if answer is None:
            raise _absent({self._leader}, self._deadline)
        self._channel.remove(key)
        self._attempt = answer["attempt"]
        self._deadline = self._deadline.afresh(answer["seconds"] + _GRACE_SECONDS)

    def _await(self, key: str) -> dict[str, Any]:
        message = self._seen(key, self._deadline)
        if message is None:
            raise UpdateTimeout(
                f"rank {self._leader}, which talks to the engines, has said nothing for "
                f"{self._deadline.seconds:.1f} s",
                phase="transfer",
                remedy="look at that rank: it has ended, or hangs",
            )
        return message

    def _seen(self, key: str, deadline: Deadline) -> dict[str, Any] | None:
        """The message under a key as soon as it is there; None at the deadline."""
        for pause in _pauses():
            message = self._channel.peek(key)
            if message is not None or deadline.expired():
                return message
            self._look_after_reads()
            deadline.sleep(pause)
        return None

    def _read_too(self, indices: Sequence[int]) -> None:
        self._reads.expect(len(indices))
        self._reading = spawn(self._read_all, self._reading, indices, _callers_stream())

    def _read_all(
        self,
        before: Future[None] | None,
        indices: Sequence[int],
        stream: AbstractContextManager[Any],
    ) -> None:
        try:
            if before is not None:
                before.result()
            with torch.no_grad(), stream:
                for index in indices:
                    self._reads.read(self._weights[index])
                _await_stream()
        except BaseException:
            self._reads.give_up()
            raise

    def _look_after_reads(self) -> None:
        error = self._read_error()
        if error is not None and not self._complained:
            self._complained = True
            self._complain(error)

    def _read_error(self) -> BaseException | None:
        reading = self._reading
        return reading.exception() if reading is not None and reading.done() else None

    def _complain(self, error: BaseException) -> None:
        fault = {"rank": self._channel.rank, "error": _plain(error, "transfer")}
        self._channel.post(f"{self._attempt}/fault", fault)

    def _end(self, message: Mapping[str, Any]) -> UpdateReport:
        heard = f"{self._attempt}/heard/{self._channel.rank}"
        if "error" in message:
            self._channel.post(heard, {})
            self._reads.idle(_LET_GO_SECONDS)
            raise error_from_dict(message["error"]) from (self._trouble or self._read_error())
        if not self._reads.idle(self._deadline.remaining()):
            raise _stuck(self._channel.rank)
        self._channel.post(heard, {})
        return UpdateReport.from_dict(message["report"])

    # -- both ---------------------------------------------------------------------------

    def _enter(self) -> None:
        """One update at a time: the ranks would not agree whose gather comes first."""
        if not self._desk.busy.acquire(timeout=self._deadline.remaining()):
            raise UpdateTimeout(
                f"another update of rank {self._channel.rank} still ran after "
                f"{self._deadline.seconds:.1f} s",
                phase="plan",
            )
        self._entered = True

    def _await_earlier_reads(self) -> None:
        """A gather that an earlier update left behind must not meet those of this one."""
        if not self._desk.reads.idle(self._deadline.remaining() / 2):
            raise _stuck(self._channel.rank)
        self._desk.reads = self._reads
        let_go()

    def _tidy(self) -> None:
        if self._desk.reads.idle(0.0):
            let_go()


def _plain(error: BaseException, phase: Phase) -> dict[str, Any]:
    if not isinstance(error, Exception):
        error = WeightUpdateError(f"it was interrupted by {type(error).__name__}", phase=phase)
    return wrapped(error, phase).to_dict()


def _of_rank(rank: int, plain: Mapping[str, Any]) -> WeightUpdateError:
    return error_from_dict({**plain, "message": f"rank {rank}: {plain['message']}"})


def _absent(ranks: Iterable[int], deadline: Deadline) -> UpdateTimeout:
    several = ", ".join(map(str, sorted(ranks)))
    return UpdateTimeout(
        f"rank(s) {several} did not call update_weights() within {deadline.seconds:.1f} s",
        phase="plan",
        remedy="of a sharded trainer every rank calls it",
    )


def _stuck(rank: int) -> UpdateTimeout:
    return UpdateTimeout(
        f"the training group is stuck: rank {rank} is still in a gather that an update began",
        phase="plan",
        remedy="another rank did not take part in it; once the group's own time-out ends it, look "
        "whether the group still works, else restart the trainer",
    )


def _slices(weights: Sequence[Weight]) -> list[Sequence[Weight]]:
    ends = [len(weights) * index // _SLICES for index in range(_SLICES + 1)]
    return [weights[first:end] for first, end in pairwise(ends)]


def _digests(weights: Sequence[Weight]) -> list[str]:
    """Digests of slices of what was extracted: they tell whether, and about where, two differ."""
    return [
        sha256("".join(map(_described, part)).encode()).hexdigest() for part in _slices(weights)
    ]


def _described(weight: Weight) -> str:
    spec = weight.spec
    return f"{spec.name} {spec.dtype_name} {spec.shape} {weight.collective}\n"


def _pauses() -> Iterator[float]:
    pause = _FIRST_POLL_SECONDS
    while True:
        yield pause
        pause = min(1.3 * pause, _LAST_POLL_SECONDS)


def _callers_stream() -> AbstractContextManager[Any]:
    """What the trainer computes on: what it has just written is read after that."""
    cuda: Any = torch.cuda
    return cuda.stream(cuda.current_stream()) if cuda.is_initialized() else nullcontext()


def _await_stream() -> None:
    """A read on a GPU has only begun when it returns; it is over when the stream is through."""
    cuda: Any = torch.cuda
    if cuda.is_initialized():
        cuda.current_stream().synchronize()
