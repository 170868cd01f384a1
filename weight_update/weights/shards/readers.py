"""Which ranks have to read a model together, told without reading anything."""

from __future__ import annotations

from typing import Any

from torch import nn

from weight_update.weights.shards.gather import is_shard, ranks_of
from weight_update.weights.shards.wrapped import is_wrapped


def readers_of(source: Any, ranks: int) -> set[int]:
    """Ranks of the trainer that hold parts of a model; none when each holds it whole.

    Args:
        source: What an update is given.
        ranks: How many ranks the trainer has.

    Example:
        >>> readers_of(nn.Linear(1, 1), 4)
        set()
    """
    if not isinstance(source, nn.Module):
        return set()
    if is_wrapped(source):
        return set(range(ranks))
    sharded = (parameter for parameter in source.parameters() if is_shard(parameter))
    return {rank for shard in sharded for rank in ranks_of(shard) or range(ranks)}
