"""Whether two ranks extracted the same weights, told by a few short digests."""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import sha256
from itertools import pairwise

from weight_update.weights.specs import Weight

_SLICES = 32


def digests(weights: Sequence[Weight]) -> list[str]:
    """Digests of slices of what was extracted: they tell whether, and about where, two differ."""
    return [
        sha256("".join(map(_described, part)).encode()).hexdigest() for part in _slices(weights)
    ]


def differs_from(weights: Sequence[Weight], theirs: Sequence[str]) -> str | None:
    """The first name near which others extracted something else; None where they agree.

    Example:
        >>> differs_from([], digests([])) is None
        True
        >>> differs_from([], ["other"] * 32)
        ''
    """
    mine = digests(weights)
    for index, part in enumerate(_slices(weights)):
        if mine[index] != theirs[index]:
            return part[0].spec.name if part else ""
    return None


def _slices(weights: Sequence[Weight]) -> list[Sequence[Weight]]:
    ends = [len(weights) * index // _SLICES for index in range(_SLICES + 1)]
    return [weights[first:end] for first, end in pairwise(ends)]


def _described(weight: Weight) -> str:
    spec = weight.spec
    return f"{spec.name} {spec.dtype_name} {spec.shape} {weight.collective}\n"
