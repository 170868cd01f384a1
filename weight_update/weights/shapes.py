"""Shapes of a push against those that an engine has."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from math import prod

Shape = tuple[int, ...]


def misshapen(
    ours: Mapping[str, Shape], theirs: Mapping[str, Shape], *, trims: bool = False
) -> Iterator[tuple[str, Shape, Shape]]:
    """Names that both have, with shapes of which one cannot be loaded as the other.

    A shape of another number of dimensions is another only if it has another number of values:
    engines flatten kernels of convolutions.

    Args:
        ours: What would be sent.
        theirs: What the engine has, as far as it is known.
        trims: Whether rows beyond the engine's are cut off on the way.

    Example:
        >>> list(misshapen({"a": (8, 4), "b": (2,)}, {"a": (4, 8), "c": (3,)}))
        [('a', (8, 4), (4, 8))]
        >>> list(misshapen({"a": (72, 4)}, {"a": (64, 4)}, trims=True))
        []
    """
    for name, shape in ours.items():
        wanted = theirs.get(name, shape)
        if shape != wanted and not _fits(shape, wanted, trims):
            yield name, shape, wanted


def _fits(ours: Shape, theirs: Shape, trims: bool) -> bool:
    if len(ours) != len(theirs):
        return prod(ours) == prod(theirs)
    return trims and ours[1:] == theirs[1:] and ours > theirs
