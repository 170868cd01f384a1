"""The plan: which tensors travel together in which update request (pure functions)."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import ceil

from weight_update.weights.cargo import Packs
from weight_update.weights.families.fused import group_of as fused_group_of
from weight_update.weights.families.fused import set_of
from weight_update.weights.pieces import pieces
from weight_update.weights.specs import TensorSpec, Weight

_log = logging.getLogger("weight_update")

DEFAULT_BUCKET_BYTES = {"cuda": 2 << 30, "cpu": 64 << 20}
"""An engine spends 3-7 ms on a request whatever its size, so on GPUs buckets are as large as
memory allows: two of them exist on the trainer, one on the engine. On a CPU the wire is slow
beside a request, and fresh memory is slow beside the wire, so they are smaller."""

GroupOf = Callable[[str], str | None]


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
    def names(self) -> frozenset[str]:
        """Names of the weights."""
        return frozenset(spec.name for spec in self.specs)

    @cached_property
    def announcement(self) -> str:
        """Names, dtypes and full shapes in wire order, as JSON; encoded once for all engines.

        Example:
            >>> Bucket(()).announcement
            '{"names": [], "dtypes": [], "shapes": []}'
        """
        names = [spec.name for spec in self.specs]
        dtypes = [spec.dtype_name for spec in self.specs]
        shapes = [spec.shape for spec in self.specs]
        return json.dumps({"names": names, "dtypes": dtypes, "shapes": shapes})

    @cached_property
    def pieces(self) -> tuple[Weight, ...]:
        """The weights as they are best read into one buffer."""
        return tuple(pieces(self.weights))

    @cached_property
    def nbytes(self) -> int:
        """Payload bytes: the contiguous tensors one after the other, without padding."""
        return sum(weight.spec.nbytes for weight in self.weights)


@dataclass(frozen=True)
class Plan:
    """All buckets of one update."""

    buckets: tuple[Bucket, ...]

    @property
    def requests(self) -> int:
        """Update requests an engine gets, as far as they are known."""
        return len(self.buckets)

    @property
    def ended(self) -> bool:
        """Whether no other bucket can come."""
        return True

    def take(self, index: int) -> Bucket | None:
        """A bucket, in wire order; None after the last."""
        return self.buckets[index] if index < len(self.buckets) else None

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
    weights: Iterable[Weight],
    bucket_bytes: int,
    packs: Packs = _packs_all,
    *,
    even: bool = False,
    group_of: GroupOf = fused_group_of,
) -> Plan:
    """Fills buckets in order and closes each before it would exceed ``bucket_bytes``.

    A tensor or a group larger than that travels alone. The experts of a layer stay together
    where they fit, and are divided between experts where they do not, or where ``even`` buckets are
    fewer for it. Tensors that are packed come before those that travel as they are. Inside a packed
    bucket, every offset is a multiple of the item size: engines read each tensor in place, and
    refuse an offset that breaks an item.

    Args:
        weights: The weights, in send order.
        bucket_bytes: Upper bound of a bucket of several tensors, in bytes.
        packs: Whether a tensor is packed into a buffer with others.
        even: Spreads the weights evenly over as few buckets: a last bucket that is nearly
            empty would leave two full-sized buffers allocated for nothing.
        group_of: The group that a name belongs to; its members share a request.

    Example:
        >>> import torch
        >>> from weight_update.weights.extract import extract_weights
        >>> tensors = {"a": torch.zeros(2), "b": torch.zeros(2), "c": torch.zeros(9)}
        >>> plan = plan_buckets(extract_weights(tensors), bucket_bytes=16)
        >>> [[spec.name for spec in bucket.specs] for bucket in plan.buckets]
        [['a', 'b'], ['c']]
    """
    units = _Units(weights, group_of)
    apart = units.divided(bucket_bytes, packs, even=even)
    if not units.join_sets(bucket_bytes):
        return apart
    together = units.divided(bucket_bytes, packs, even=even)
    # Sets of half a bucket and more would leave much of each bucket empty.
    return apart if even and apart.requests < together.requests else together


class _Units:
    """What must share a request, in the order of their first members.

    Attributes:
        members: The weights of each.
        nbytes: Their bytes.
    """

    def __init__(self, weights: Iterable[Weight], group_of: GroupOf) -> None:
        self.members: dict[str, list[Weight]] = {}
        self.nbytes: dict[str, int] = {}
        self._places: dict[int, int] = {}
        for place, weight in enumerate(weights):
            spec = weight.spec
            self._places[id(weight)] = place
            key = group_of(spec.name) or f"\n{spec.name}"  # no group is called like this
            if key in self.members:
                self.members[key].append(weight)
                self.nbytes[key] += spec.nbytes
            else:
                self.members[key] = [weight]
                self.nbytes[key] = spec.nbytes

    def divided(self, limit: int, packs: Packs, *, even: bool) -> Plan:
        """The plan in which every unit has its own place."""
        packed: list[str] = []
        single: list[str] = []
        for key in self.members:
            (packed if self.is_packed(key, packs) else single).append(key)
        flat, plain = (
            self.filled(lane, self.even(lane, limit) if even else limit)
            for lane in (packed, single)
        )
        return Plan((*map(_aligned, flat), *(Bucket(tuple(group), flat=False) for group in plain)))

    def join_sets(self, limit: int) -> bool:
        """Makes one unit of a set of groups, where it fits; returns whether there are any."""
        large = [k for k, size in self.nbytes.items() if size > limit and len(self.members[k]) > 1]
        _tell("larger than bucket_bytes=%d, and travel(s) in a larger bucket", large, limit)
        homes = {key: home for key in self.members if (home := set_of(key))}
        sets: dict[str, int] = {}
        for key, home in homes.items():
            sets[home] = sets.get(home, 0) + self.nbytes[key]
        wide = [home for home, size in sets.items() if size > limit]
        _tell("larger than bucket_bytes=%d, and divided between its experts", wide, limit)
        if len(wide) == len(sets):
            return False
        members: dict[str, list[Weight]] = {}
        for key, weights in self.members.items():
            home = homes.get(key, key)
            members.setdefault(key if sets.get(home, 0) > limit else home, []).extend(weights)
        self.nbytes = {key: sets[key] if key in sets else self.nbytes[key] for key in members}
        self.members = members
        return True

    def is_packed(self, key: str, packs: Packs) -> bool:
        """Whether a unit travels in a flat bucket: all of it does, or none.

        A small member follows large ones that travel as they are, unless it is of a dtype that
        none of them has: it may be one that cannot travel so.
        """
        weights = self.members[key]
        apart = [weight.spec.dtype for weight in weights if not packs(weight.spec)]
        return not apart or any(weight.spec.dtype not in apart for weight in weights)

    def even(self, lane: Sequence[str], limit: int) -> int:
        """The size that spreads a lane evenly over as few buckets as ``limit`` asks for."""
        sizes = [size for key in lane if (size := self.nbytes[key]) <= limit]
        buckets = ceil(sum(sizes) / limit) or 1
        return min(limit, ceil(sum(sizes) / buckets) + max(sizes, default=limit))

    def filled(self, lane: Sequence[str], limit: int) -> Iterator[list[Weight]]:
        """The weights of each bucket of a lane, each bucket in send order.

        The experts of a layer come out of two large tensors, and are read fastest as they lie.
        """
        bucket: list[Weight] = []
        size = 0
        for key in lane:
            if bucket and size + self.nbytes[key] > limit:
                yield sorted(bucket, key=self._place)
                bucket, size = [], 0
            bucket += self.members[key]
            size += self.nbytes[key]
        if bucket:
            yield sorted(bucket, key=self._place)

    def _place(self, weight: Weight) -> int:
        return self._places[id(weight)]


def _tell(what: str, groups: Sequence[str], limit: int) -> None:
    if groups:
        text = f"%d group(s) of weights that engines fuse are {what}: %s%s"
        more = ", ..." if len(groups) > 1 else ""
        _log.info(text, len(groups), limit, groups[0], more)


def _aligned(group: list[Weight]) -> Bucket:
    """In the order given where that breaks no item, or else by item size, largest first."""
    offset = 0
    for weight in group:
        if offset % weight.spec.dtype.itemsize:
            group = sorted(group, key=lambda weight: -weight.spec.dtype.itemsize)
            break
        offset += weight.spec.nbytes
    return Bucket(tuple(group))
