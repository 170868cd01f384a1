"""Weights as a model family's checkpoint holds them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from torch import nn

from weight_update.weights.specs import Weight


def as_checkpoint(weights: Iterable[Weight], model: nn.Module) -> Iterator[Weight]:
    """The weights under the names, and in the layout, that ``model.save_pretrained`` writes."""
    yield from weights
