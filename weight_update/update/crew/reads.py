"""Reads that all ranks do in the same order, on one of them."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager
from typing import Any

import torch

from weight_update.errors import WeightUpdateError
from weight_update.update.reader import callers_stream
from weight_update.waiting import spawn
from weight_update.weights.specs import Weight


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

    def then(self, indices: Sequence[int]) -> None:
        """Reads some more, after what is being read."""
        self._reads.expect(len(indices))
        self._last = spawn(self._read_all, self._last, indices, callers_stream())

    def error(self) -> BaseException | None:
        """Why the last read failed; None if it did not, so far."""
        last = self._last
        return last.exception() if last is not None and last.done() else None

    def _read_all(
        self,
        before: Future[None] | None,
        indices: Sequence[int],
        stream: AbstractContextManager[object],
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


def _await_stream() -> None:
    """A read on a GPU has only begun when it returns; it is over when the stream is through."""
    cuda: Any = torch.cuda
    if cuda.is_initialized():
        cuda.current_stream().synchronize()
