"""Reading values: one after the other, and with all ranks of a sharded trainer."""

from __future__ import annotations

from collections.abc import Generator, Sequence

import torch

from weight_update.weights.specs import Weight


def read_in_turn(weights: Sequence[Weight]) -> Generator[torch.Tensor]:
    """The values of some weights, in order, each read when it is asked for.

    The other ranks of a sharded trainer are told of all of them at once. Close the iterator if
    its end is not reached: what was announced is read all the same, or the others would wait.
    After a read that failed nothing is: no order is left that all could keep.

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
        for weight in waiting:
            yield weight.read()
    except GeneratorExit:
        for weight in waiting:
            if weight.turn is not None:
                weight.read()
        raise
