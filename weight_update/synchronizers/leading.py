"""Which rank of a sharded trainer speaks to the engines."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from weight_update.transports.rank_channel import open_channel
from weight_update.weights.shards.readers import readers_of


def leads(source: Callable[[], Any]) -> bool:
    """Whether this rank speaks to the engines; one that holds all weights by itself does.

    Args:
        source: Returns what is sent; asked only where there are other ranks.

    Example:
        >>> leads(dict)
        True
    """
    channel = open_channel()
    readers = set() if channel is None else readers_of(source(), channel.ranks)
    return channel is None or not readers or channel.rank == min(readers)
