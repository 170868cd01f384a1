"""Reads that all ranks do in the same order, on one of them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from weight_update.errors import WeightUpdateError
from weight_update.update.reader import callers_stream
from weight_update.waiting import spawn
from weight_update.weights.specs import Turn, Weight


class Reads:
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

    def untouched(self, number: int) -> bool:
        """Whether so many were announced, and none of them is read yet."""
        return self._left == number

    def in_turn(
        self, weights: Sequence[Weight], announce: Callable[[Sequence[int]], None]
    ) -> tuple[Weight, ...]:
        """The weights, read as announced, and whole: the others do not know which rows.

        Args:
            weights: What this rank extracted.
            announce: Tells of those that are read next.
        """

        def placed(index: int, weight: Weight) -> Weight:
            if not weight.collective:
                return weight
            read, turn = partial(self.read, weight), Turn(index, announce)
            return replace(weight, read=read, rows=None, into=None, turn=turn)

        return tuple(placed(index, weight) for index, weight in enumerate(weights))

    def give_up(self) -> None:
        """Nothing that was announced is read any more: after a failure no order can be kept."""
        with self._changed:
            self._left = 0
            self._changed.notify_all()


class ReadingAlong:
    """Reads what the leader reads, in its order, and throws it away; in threads.

    Args:
        weights: What this rank extracted.
        reads: Counts what is left.
    """

    def __init__(self, weights: Sequence[Weight], reads: Reads) -> None:
        self._weights = weights
        self._reads = reads
        self._last: Future[None] | None = None

    @property
    def done(self) -> bool:
        """Whether nothing is under way."""
        return self._last is None or self._last.done()

    def then(self, indices: Sequence[int]) -> None:
        """Reads some more, after what is being read."""
        self.then_do(len(indices), partial(self.read, indices))

    def then_do(self, number: int, work: Callable[[], None]) -> None:
        """Does something, after what is being read, that reads so many more."""
        self._reads.expect(number)
        self._last = spawn(self._do, self._last, work, callers_stream())

    def read(self, indices: Sequence[int]) -> None:
        """Reads some, now."""
        for index in indices:
            self._reads.read(self._weights[index])

    def error(self) -> BaseException | None:
        """Why the last read failed; None if it did not, so far."""
        last = self._last
        return last.exception() if last is not None and last.done() else None

    def _do(
        self,
        before: Future[None] | None,
        work: Callable[[], None],
        stream: AbstractContextManager[object],
    ) -> None:
        try:
            if before is not None:
                before.result()
            with torch.no_grad(), stream:
                work()
                _await_stream()
        except BaseException:
            self._reads.give_up()
            raise


def _await_stream() -> None:
    """A read on a GPU has only begun when it returns; it is over when the stream is through."""
    cuda: Any = torch.cuda
    if cuda.is_initialized():
        cuda.current_stream().synchronize()
