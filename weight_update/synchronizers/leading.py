"""Which rank of a sharded trainer speaks to the engines."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from weight_update.delivery.ranks import takers
from weight_update.options import TrainerRanks
from weight_update.transports.rank_channel import open_channel


def leads(source: Callable[[], Any], trainer_ranks: TrainerRanks = "one") -> bool:
    """Whether this rank speaks to the engines; one that holds all weights by itself does.

    Args:
        source: Returns what is sent; asked only where there are other ranks.
        trainer_ranks: Of the options: ``"node"`` has one of all ranks speak, whatever they hold.

    Example:
        >>> leads(dict)
        True
    """
    channel = open_channel()
    ranks = set() if channel is None else takers(source(), channel.ranks, trainer_ranks)
    return channel is None or not ranks or channel.rank == min(ranks)
