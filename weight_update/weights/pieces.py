"""Neighbours that lie side by side in one tensor, which are read and copied as one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from math import prod

import torch

from weight_update.errors import WeightMismatchError
from weight_update.weights.specs import TensorSpec, Weight


def pieces(weights: Sequence[Weight]) -> Iterator[Weight]:
    """The same values in the same order, in as few weights as they can be read in.

    The experts of a layer are hundreds of weights, and two tensors.

    Example:
        >>> from weight_update.weights.specs import Slice
        >>> stack = torch.arange(6.0).view(3, 2)
        >>> whole = Weight(TensorSpec("s", stack.dtype, (3, 2)), stack.device, stack.detach)
        >>> rows = [partial(stack.__getitem__, row) for row in range(3)]
        >>> weights = [
        ...     Weight(
        ...         TensorSpec(f"row {row}", stack.dtype, (2,)),
        ...         stack.device,
        ...         read,
        ...         slice=Slice(whole, 2 * row, read),
        ...     )
        ...     for row, read in enumerate(rows)
        ... ]
        >>> [piece.read().tolist() for piece in pieces([weights[1], weights[2], weights[0]])]
        [[2.0, 3.0, 4.0, 5.0], [0.0, 1.0]]
    """
    run: list[Weight] = []
    for weight in weights:
        if run and not _continues(weight, run[-1]):
            yield _joined(run)
            run = []
        run.append(weight)
    if run:
        yield _joined(run)


def _continues(weight: Weight, before: Weight) -> bool:
    here, there = weight.slice, before.slice
    if here is None or there is None or here.whole is not there.whole:
        return False
    if here.read is not weight.read or there.read is not before.read:
        return False  # something is made of what lies there
    return here.first == there.first + prod(before.spec.shape)


def _joined(run: list[Weight]) -> Weight:
    place = run[0].slice
    if place is None or len(run) == 1:
        return run[0]
    count = sum(prod(weight.spec.shape) for weight in run)
    names = f"{run[0].spec.name} ... {run[-1].spec.name}"
    spec = TensorSpec(names, run[0].spec.dtype, (count,))
    return replace(run[0], spec=spec, read=partial(_cut, place.whole, place.first, count))


def _cut(whole: Weight, first: int, count: int) -> torch.Tensor:
    value = whole.read()
    if value.shape != whole.spec.shape:
        raise WeightMismatchError(
            f"{whole.spec.name!r} was {whole.spec.shape} and is {tuple(value.shape)} now",
            phase="transfer",
            remedy="do not change the model while an update runs",
        )
    return value.reshape(-1)[first : first + count]
