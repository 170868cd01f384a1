"""The plan of a stream: it is known as far as the stream was read."""

from __future__ import annotations

from collections.abc import Iterator

from weight_update.weights.buckets import Bucket, Plan
from weight_update.weights.specs import TensorSpec


class GrowingPlan:
    """Buckets that are made while those before them travel; each is taken once.

    What was taken is remembered by its specs only: the values are gone with the bucket.

    Args:
        source: Makes the buckets.

    Attributes:
        ended: Whether the stream was read to its end.
        requests: Buckets that were taken.
        nbytes: Their payload bytes.
        buckets: Empty: none is kept.

    Example:
        >>> plan = GrowingPlan(iter([Bucket(())]))
        >>> plan.ended, plan.take(0), plan.take(1), plan.ended
        (False, Bucket(weights=(), flat=True), None, True)
    """

    buckets: tuple[Bucket, ...] = ()

    def __init__(self, source: Iterator[Bucket]) -> None:
        self.ended = False
        self.requests = 0
        self.nbytes = 0
        self._source = source
        self._specs: list[TensorSpec] = []

    def take(self, index: int) -> Bucket | None:
        """The next bucket, whose number is ``index``; None after the last."""
        bucket = next(self._source, None)
        if bucket is None:
            self.ended = True
            return None
        self._specs.extend(bucket.specs)
        self.requests, self.nbytes = index + 1, self.nbytes + bucket.nbytes
        return bucket

    @property
    def tensors(self) -> int:
        """Tensors that were taken."""
        return len(self._specs)

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Their shapes."""
        return {spec.name: spec.shape for spec in self._specs}

    @property
    def names(self) -> Iterator[str]:
        """Their names."""
        return (spec.name for spec in self._specs)


def is_last(plan: Plan | GrowingPlan, index: int) -> bool:
    """Whether a bucket is surely the last one; of a stream, that is known too late."""
    return plan.ended and index == plan.requests - 1
