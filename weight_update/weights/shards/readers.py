"""Which ranks have to read a model together, told without reading anything."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from torch import nn

from weight_update.weights.shards.gather import is_shard, ranks_of
from weight_update.weights.shards.wrapped import is_gathered, is_wrapped


def readers_of(source: Any, ranks: int) -> set[int]:
    """Ranks of the trainer that hold parts of the weights; none when each holds them whole.

    Args:
        source: What an update is given.
        ranks: How many ranks the trainer has.

    Example:
        >>> readers_of(nn.Linear(1, 1), 4)
        set()
    """
    if isinstance(source, nn.Module) and is_wrapped(source):
        return set(range(ranks))
    sharded = (tensor for tensor in _tensors_of(source) if is_shard(tensor))
    found = {rank for shard in sharded for rank in ranks_of(shard) or range(ranks)}
    return found or (set(range(ranks)) if is_gathered(source) else set())


def _tensors_of(source: Any) -> Iterable[Any]:
    if isinstance(source, nn.Module):
        return source.parameters()
    return source.values() if isinstance(source, Mapping) else ()
