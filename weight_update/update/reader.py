"""The reader: packs buckets in a thread of its own, under the deadline.

Reading a model can wait for other ranks, a slow generator or a file system that hangs. The
update gives up on it in time; the thread is left behind, with buffers that nobody else uses.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, wait
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from weight_update.errors import Phase, UpdateTimeout
from weight_update.update.protocols import Packer
from weight_update.waiting import Deadline, hand_over, spawn
from weight_update.weights.buckets import Bucket, Plan
from weight_update.weights.cargo import Cargo
from weight_update.weights.growing_plan import GrowingPlan

T = TypeVar("T")

_WATCH_SECONDS = 0.02
# What a failed update waits for a bucket that is just being packed.
_LET_GO_SECONDS = 0.2


def nobody_else() -> None:
    """Nobody else takes part in the reading, so nobody can fail."""


@dataclass
class Packed:
    """A bucket and what travels for it."""

    bucket: Bucket
    cargo: Cargo

    def give(self) -> Cargo:
        """The cargo, for the last time: nobody holds a bucket once it arrived."""
        given, self.cargo = self.cargo, Cargo()
        return given


class Reader:
    """Reads and packs the buckets of a plan, one ahead of the wire.

    Args:
        packer: Packs them.
        plan: What to read.
        check: Raises when somebody else who has to take part in the reading failed.

    Attributes:
        check: As given.
        alone: Nobody else takes part.
    """

    def __init__(self, packer: Packer, plan: Plan | GrowingPlan, check: Callable[[], None]) -> None:
        self._packer = packer
        self._plan = plan
        self.check = check
        self.alone = check is nobody_else
        self._running: Future[Packed | None] | None = None
        self._over = False

    def begin(self) -> None:
        """Begins to read the first bucket, if nobody has told it before."""
        if self._running is None:
            self._packer.reserve(self._plan)
            self.start(0)

    def start(self, index: int) -> None:
        """Begins to read a bucket."""
        run = spawn if isinstance(self._plan, GrowingPlan) else hand_over  # whose code makes it?
        self._running = run(self._pack, index, callers_stream())

    def finish(self, phase: Phase, deadline: Deadline) -> Packed | None:
        """The bucket that was begun, or None when there is none any more.

        Raises:
            UpdateTimeout: It could not be read by the deadline.
        """
        running = self._running
        if running is None:
            return None
        packed = in_time(running, f"bucket {self._plan.requests}", phase, deadline, self.check)
        self._running = None
        return packed

    def let_go(self) -> None:
        """Ends without a bucket that is still being packed, or not even read."""
        self._over = True
        running, self._running = self._running, None
        if running is not None and not wait([running], timeout=_LET_GO_SECONDS).done:
            self._packer.abandon()

    def _pack(self, index: int, stream: AbstractContextManager[object]) -> Packed | None:
        with stream:
            bucket = self._plan.take(index)
            if bucket is None or self._over:  # the packer serves another update by now
                return None
            cargo = self._packer.pack(bucket)
            if cargo.tensors:  # it is announced: encoded now, beside the wire
                _ = bucket.announcement
            return Packed(bucket, cargo)


def in_time(
    reading: Future[T], what: str, phase: Phase, deadline: Deadline, check: Callable[[], None]
) -> T:
    """What a thread that reads weights returns.

    Raises:
        UpdateTimeout: It did not return by the deadline, and is left behind.
    """
    while not wait([reading], timeout=min(_WATCH_SECONDS, deadline.remaining())).done:
        check()
        if deadline.expired():
            raise UpdateTimeout(
                f"{what} could not be read in {deadline.seconds:.1f} s",
                phase=phase,
                remedy="look at what the weights come from: other ranks, a generator, a disk",
            )
    return reading.result()


def callers_stream() -> AbstractContextManager[object]:
    """What the caller computes on: the values that it has just written are read after it."""
    cuda: Any = torch.cuda
    return cuda.stream(cuda.current_stream()) if cuda.is_initialized() else nullcontext()
