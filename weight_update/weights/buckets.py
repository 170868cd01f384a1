"""The plan: which tensors travel together in which update request (pure functions)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from weight_update.weights.specs import TensorSpec, Weight

DEFAULT_BUCKET_BYTES = {"cuda": 2 << 30, "cpu": 256 << 20}
"""An engine spends 3-7 ms on a request whatever its size, so buckets are as large as memory
allows: two of them exist on the trainer, one on the engine."""


@dataclass(frozen=True)
class Bucket:
    """The weights of one update request, in wire order."""

    weights: tuple[Weight, ...]

    @property
    def specs(self) -> tuple[TensorSpec, ...]:
        """What the request announces, in wire order."""
        return tuple(weight.spec for weight in self.weights)

    @property
    def nbytes(self) -> int:
        """Payload bytes: the contiguous tensors one after the other, without padding."""
        return sum(weight.spec.nbytes for weight in self.weights)


@dataclass(frozen=True)
class Plan:
    """All buckets of one update."""

    buckets: tuple[Bucket, ...]

    @property
    def tensors(self) -> int:
        """Tensors sent."""
        return sum(len(bucket.weights) for bucket in self.buckets)

    @property
    def nbytes(self) -> int:
        """Payload bytes sent to each engine."""
        return sum(bucket.nbytes for bucket in self.buckets)

    @property
    def names(self) -> Iterator[str]:
        """Names of the tensors, in wire order."""
        return (spec.name for bucket in self.buckets for spec in bucket.specs)


def plan_buckets(weights: Sequence[Weight], bucket_bytes: int) -> Plan:
    """Fills buckets in order and closes each before it would exceed ``bucket_bytes``.

    A tensor larger than that travels alone. Inside a bucket, tensors are ordered by item
    size, largest first, so that every offset is a multiple of the item size: engines read
    each tensor in place and refuse an offset that breaks an item.

    Args:
        weights: The weights, in send order.
        bucket_bytes: Upper bound of a bucket of several tensors, in bytes.

    Example:
        >>> import torch
        >>> from weight_update.weights.extract import extract_weights
        >>> tensors = {"a": torch.zeros(2), "b": torch.zeros(2), "c": torch.zeros(9)}
        >>> plan = plan_buckets(extract_weights(tensors), bucket_bytes=16)
        >>> [[spec.name for spec in bucket.specs] for bucket in plan.buckets]
        [['a', 'b'], ['c']]
    """
    return Plan(tuple(_aligned(group) for group in _filled(weights, bucket_bytes)))


def _filled(weights: Sequence[Weight], bucket_bytes: int) -> Iterator[list[Weight]]:
    group: list[Weight] = []
    size = 0
    for weight in weights:
        nbytes = weight.spec.nbytes
        if group and size + nbytes > bucket_bytes:
            yield group
            group, size = [], 0
        group.append(weight)
        size += nbytes
    if group:
        yield group


def _aligned(group: list[Weight]) -> Bucket:
    return Bucket(tuple(sorted(group, key=lambda weight: -weight.spec.dtype.itemsize)))
