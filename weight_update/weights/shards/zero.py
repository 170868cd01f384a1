"""DeepSpeed ZeRO-3: parameters that are empty until all ranks gather them."""

from __future__ import annotations

import sys
from typing import Any

import torch

from weight_update.errors import ConfigurationError


def is_part(tensor: torch.Tensor) -> bool:
    """Whether DeepSpeed holds the value in parts."""
    return hasattr(tensor, "ds_id")


def shape_of(tensor: torch.Tensor) -> tuple[int, ...]:
    """The shape of the whole value."""
    part: Any = tensor
    return tuple(part.ds_shape)


def full(tensor: torch.Tensor) -> torch.Tensor:
    """A copy of the whole value; every rank must ask at the same time."""
    with _deepspeed().zero.GatheredParameters([tensor]):
        return tensor.detach().clone()  # what was gathered goes when the block ends


def _deepspeed() -> Any:
    # Such a parameter can only exist once deepspeed was imported.
    try:
        return sys.modules["deepspeed"]
    except KeyError:
        raise ConfigurationError(
            "a parameter has ds_id, as DeepSpeed gives it, and deepspeed is not imported",
            phase="plan",
        ) from None
