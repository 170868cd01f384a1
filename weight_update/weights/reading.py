"""Reading values: one after the other, and with all ranks of a sharded trainer."""

from __future__ import annotations

from collections.abc import Generator, Iterable, Sequence
from itertools import repeat

import torch

from weight_update.weights.specs import Weight


def read_in_turn(
    weights: Sequence[Weight], places: Iterable[torch.Tensor | None] = repeat(None)
) -> Generator[torch.Tensor]:
    """The values of some weights, in order, each read when it is asked for.

    The other ranks of a sharded trainer are told of all of them at once. Close the iterator if
    its end is not reached: what was announced is read all the same, or the others would wait.
    After a read that failed nothing is: no order is left that all could keep.

    Args:
        weights: What is read.
        places: Where a value will be copied to, for each of them that has such a place: those that
            can be made there come there at once.

    Example:
        >>> from weight_update.weights.extract import extract_weights
        >>> weights = extract_weights({"a": torch.ones(1), "b": torch.zeros(1)})
        >>> [float(value) for value in read_in_turn(weights)]
        [1.0, 0.0]
    """
    turns = [weight.turn for weight in weights if weight.turn is not None]
    if turns:
        turns[0].announce([turn.index for turn in turns])
    waiting = iter(weights)
    try:
        for weight, place in zip(waiting, places, strict=False):
            yield weight.read() if place is None or weight.into is None else weight.into(place)
    except GeneratorExit:
        for weight in waiting:
            if weight.turn is not None:
                weight.read()
        raise
