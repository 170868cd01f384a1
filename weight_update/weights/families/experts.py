"""The experts of a layer, one by one, out of the tensors that hold them all."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

import torch

from weight_update.weights.families.layouts import Stack
from weight_update.weights.specs import Slice, TensorSpec, Weight

Read = Callable[[], torch.Tensor]


class Shelf:
    """Keeps the value that parts are being cut from: one at a time, until its last part.

    Values that are merged or gathered when they are read would otherwise be made anew for
    each part.

    Example:
        >>> shelf, made = Shelf(), []
        >>> make = lambda: made.append(1) or torch.zeros(2)
        >>> values = [shelf.take(make, part, parts=2) for part in (0, 1)]
        >>> len(made)
        1
    """

    def __init__(self) -> None:
        self._make: Read | None = None
        self._value: torch.Tensor | None = None

    def take(self, make: Read, part: int, parts: int) -> torch.Tensor:
        """The value that ``make`` returns; its first part makes it anew."""
        value = self._value if self._make is make and part else None
        if value is None:
            self._make = self._value = None  # the former goes before the next comes
            value = make()
        last = part == parts - 1
        self._make, self._value = (None, None) if last else (make, value)
        return value


def split(weight: Weight, stack: Stack, shelf: Shelf | None) -> Iterator[Weight]:
    """An expert after the other, its projections side by side; all of them are views.

    Args:
        weight: Of shape (experts, rows, columns).
        stack: What the rows hold.
        shelf: Keeps values between their parts; None where a value costs nothing.
    """
    experts, rows, columns = weight.spec.shape
    share, lies = rows // len(stack.parts), weight.at_hand
    for expert in range(experts):
        for part, read in enumerate(_readers(weight, expert, len(stack.parts), shelf)):
            name, first = stack.part(weight.spec.name, expert, stack.parts[part]), part * share
            spec = TensorSpec(name, weight.spec.dtype, (share, columns))
            cut = weight.derived(spec, partial(_rows_of, read, first, share))
            if lies:
                place = Slice(weight, (expert * rows + first) * columns, cut.read)
                cut = replace(cut, slice=place)
            yield cut


def _rows_of(read: Read, first: int, count: int) -> torch.Tensor:
    return read().narrow(0, first, count)


def _readers(weight: Weight, expert: int, parts: int, shelf: Shelf | None) -> list[Read]:
    """How each part of an expert gets the expert's matrix."""
    if weight.rows is not None:
        matrix: Read = partial(weight.rows, expert, expert + 1)
        return [partial(_expert, matrix, 0, part, parts, shelf) for part in range(parts)]
    total = weight.spec.shape[0] * parts
    first = expert * parts
    return [
        partial(_expert, weight.read, expert, first + part, total, shelf) for part in range(parts)
    ]


def _expert(make: Read, index: int, part: int, parts: int, shelf: Shelf | None) -> torch.Tensor:
    value = make() if shelf is None else shelf.take(make, part, parts)
    return value[index]
