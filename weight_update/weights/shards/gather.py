"""Whole values of tensors that ranks hold in parts."""

from __future__ import annotations

from typing import Any

import torch


def is_shard(tensor: torch.Tensor) -> bool:
    """Whether other ranks hold parts of it, so that all must read it together."""
    return hasattr(tensor, "full_tensor")


def full(tensor: torch.Tensor) -> torch.Tensor:
    """The whole value, detached; of a shard, every rank must ask at the same time."""
    if not is_shard(tensor):
        return tensor.detach()
    shard: Any = tensor.detach()
    value: torch.Tensor = shard.full_tensor()
    return value
