"""The processes of a tensor parallel engine: rank 0 leads, the others do what it does."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import threading
from collections.abc import Sequence
from datetime import timedelta
from functools import partial
from typing import Any, TypeVar

import torch
import torch.distributed as dist

_log = logging.getLogger("reference_engine.ranks")
_T = TypeVar("_T")

_START = timedelta(minutes=10)
# An idle engine sits in a broadcast until somebody asks something.
_IDLE = timedelta(days=30)


class Ranks:
    """This process's place among the ranks, and the lock-step between them.

    The ranks' own group is torch's default group; the trainer's stay apart from it.
    """

    def __init__(self, rank: int = 0, size: int = 1, store: Any = None) -> None:
        self.rank = rank
        self.size = size
        if size > 1:
            dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=_IDLE)
            # Each rank draws its samples itself, and all must draw the same.
            torch.manual_seed(self.agree(torch.initial_seed()))

    def agree(self, value: _T) -> _T:
        """Return rank 0's value on every rank."""
        if self.size == 1:
            return value
        box = [value]
        try:
            dist.broadcast_object_list(box, src=0)
        except RuntimeError:
            if self.rank:
                os._exit(1)  # rank 0 is gone, and nobody is left to tell
            raise
        return box[0]

    def gather(self, value: _T) -> list[_T]:
        """Return every rank's value, on every rank."""
        if self.size == 1:
            return [value]
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value)
        return values


_store: Any = partial(dist.TCPStore, "127.0.0.1")  # type: ignore[attr-defined]


def start_others(size: int, arguments: Sequence[str]) -> Any:
    """Start ranks 1 and up with this process's arguments; return the store where they meet.

    When one of them ends, this process ends too, as the real server's watchdog sees to; when
    this one ends, they follow.
    """
    store = _store(0, size, True, _START, wait_for_workers=False)
    for rank in range(1, size):
        place = [f"--tp-rank={rank}", f"--tp-port={store.port}", f"--parent-pid={os.getpid()}"]
        command = [sys.executable, "-m", "weight_update.reference_engine", *arguments, *place]
        process = subprocess.Popen(command)
        threading.Thread(target=_end_with, args=(process, rank), daemon=True).start()
    return store


def _end_with(process: subprocess.Popen[bytes], rank: int) -> None:
    status = process.wait()
    _log.error("Rank %d ended with status %d, and the server ends with it", rank, status)
    os._exit(1)


def find_leader(size: int, port: int) -> Any:
    """Return the store at which rank 0 waits."""
    return _store(port, size, False, _START)
