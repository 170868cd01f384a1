"""The plan: which tensors travel together in which update request (pure functions)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import ceil

from weight_update.weights.specs import TensorSpec, Weight

DEFAULT_BUCKET_BYTES = {"cuda": 2 << 30, "cpu": 64 << 20}
"""An engine spends 3-7 ms on a request whatever its size, so on GPUs buckets are as large as
memory allows: two of them exist on the trainer, one on the engine. On a CPU the wire is slow
beside a request, and fresh memory is slow beside the wire, so they are smaller."""

Packs = Callable[[TensorSpec], bool]


@dataclass(frozen=True)
class Bucket:
    """The weights of one update request, in wire order.

    Attributes:
        weights: The weights.
        flat: Whether they travel as the bytes of one buffer, or as one broadcast a tensor.
    """

    weights: tuple[Weight, ...]
    flat: bool = True

    @cached_property
    def specs(self) -> tuple[TensorSpec, ...]:
        """What the request announces, in wire order."""
        return tuple(weight.spec for weight in self.weights)

    @cached_property
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

    @cached_property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shape of each tensor."""
        return {spec.name: spec.shape for bucket in self.buckets for spec in bucket.specs}

    @property
    def names(self) -> Iterator[str]:
        """Names of the tensors, in wire order."""
        return (spec.name for bucket in self.buckets for spec in bucket.specs)


def _packs_all(_: TensorSpec) -> bool:
    return True


def plan_buckets(
    weights: Iterable[Weight], bucket_bytes: int, packs: Packs = _packs_all, *, even: bool = False
) -> Plan:
    """Fills buckets in order and closes each before it would exceed ``bucket_bytes``.

    A tensor larger than that travels alone. Tensors that are packed come before those that
    travel as they are. Inside a packed bucket, tensors are ordered by item size, largest first,
    so that every offset is a multiple of the item size: engines read each tensor in place and
    refuse an offset that breaks an item.

    Args:
        weights: The weights, in send order.
        bucket_bytes: Upper bound of a bucket of several tensors, in bytes.
        packs: Whether a tensor is packed into a buffer with others.
        even: Spreads the weights evenly over as few buckets: a last bucket that is nearly
            empty would leave two full-sized buffers allocated for nothing.

    Example:
        >>> import torch
        >>> from weight_update.weights.extract import extract_weights
        >>> tensors = {"a": torch.zeros(2), "b": torch.zeros(2), "c": torch.zeros(9)}
        >>> plan = plan_buckets(extract_weights(tensors), bucket_bytes=16)
        >>> [[spec.name for spec in bucket.specs] for bucket in plan.buckets]
        [['a', 'b'], ['c']]
    """
    packed: list[Weight] = []
    single: list[Weight] = []
    for weight in weights:
        (packed if packs(weight.spec) else single).append(weight)
    flat, plain = (
        _filled(lane, _even(lane, bucket_bytes) if even else bucket_bytes)
        for lane in (packed, single)
    )
    return Plan((*map(_aligned, flat), *(Bucket(tuple(group), flat=False) for group in plain)))


def _even(lane: Sequence[Weight], limit: int) -> int:
    """The size that spreads a lane evenly over as few buckets as ``limit`` asks for."""
    sizes = [weight.spec.nbytes for weight in lane if weight.spec.nbytes <= limit]
    buckets = ceil(sum(sizes) / limit) or 1
    return min(limit, ceil(sum(sizes) / buckets) + max(sizes, default=limit))


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
