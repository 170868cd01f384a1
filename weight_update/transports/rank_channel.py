"""Messages between the ranks of one trainer, beside its collectives.

They travel through the store that made the trainer's process group. A rank that waits for one
looks again and again: a wait inside the store would hold its connection, which other threads
use, and a wait inside a collective would run into the time-out of the training group.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from typing import Any

import torch

from weight_update.errors import WeightUpdateError
from weight_update.torch_private.process_groups import default_store
from weight_update.transports.neighbours import Neighbour, this_host

_PREFIX = "weight_update/"

_opened: RankChannel | None = None


class RankChannel:
    """What one rank posts for others, and looks up.

    Args:
        store: A store that all ranks reach.
        rank: This process among all of them.
        ranks: How many there are.
    """

    def __init__(self, store: Any, rank: int, ranks: int) -> None:
        self.rank = rank
        self.ranks = ranks
        self._store = store

    @property
    def place(self) -> dict[str, Any]:
        """Where this rank runs, as a message can hold it."""
        return {"host": this_host(), "process": os.getpid()}

    def neighbour(self, place: Mapping[str, Any]) -> Neighbour | None:
        """The process at another rank's place; None if it is on another host."""
        return Neighbour(place["process"]) if place["host"] == this_host() else None

    def through(self, store: Any) -> bool:
        """Whether messages travel through this very store."""
        return store is self._store

    def post(self, key: str, message: Mapping[str, Any]) -> None:
        """Leaves a message, in place of one that is there."""
        try:
            self._store.set(_PREFIX + key, json.dumps(message))
        except Exception as error:
            raise _broken(error) from error

    def peek(self, key: str) -> dict[str, Any] | None:
        """The message that is there, which stays; None if there is none."""
        try:
            if not self._store.check([_PREFIX + key]):
                return None
            found: dict[str, Any] = json.loads(self._store.get(_PREFIX + key))
        except Exception as error:
            raise _broken(error) from error
        return found

    def remove(self, key: str) -> bool:
        """Takes a message away; False if there was none (any more)."""
        try:
            return bool(self._store.delete_key(_PREFIX + key))
        except Exception as error:
            raise _broken(error) from error


def open_channel() -> RankChannel | None:
    """The channel between the ranks of the default process group; None where one is alone.

    There is one in a process as long as the group lives.
    """
    global _opened  # noqa: PLW0603 - what belongs to the process group, which is global too
    store = default_store()
    if store is None or torch.distributed.get_world_size() < 2:
        return None
    if _opened is None or not _opened.through(store):
        rank, ranks = torch.distributed.get_rank(), torch.distributed.get_world_size()
        _opened = RankChannel(store, rank, ranks)
    return _opened


def _broken(error: Exception) -> WeightUpdateError:
    return WeightUpdateError(
        f"the store of the trainer's process group does not answer: {error}",
        remedy="the rank that holds it has ended, or its host is gone: restart the trainer",
    )
