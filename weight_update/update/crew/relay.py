"""A follower's end of the leader's group: it takes every broadcast, and throws it away."""

from __future__ import annotations

import os
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, wait
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from weight_update.errors import ConfigurationError
from weight_update.update.protocols import Group
from weight_update.waiting import spawn

OpenEnd = Callable[[Mapping[str, Any], int, torch.device], Group]
"""Makes this end of a group: which one, as which rank, on which device."""
Sizes = Sequence[tuple[str, Sequence[int]]]
"""Dtypes, each with the numbers of elements of neighbours that have it."""

_FIRST_PAUSE_SECONDS = 1e-5
_LAST_PAUSE_SECONDS = 1e-3


class Relay:
    """This rank's end of the leader's group, from one update to the next.

    Broadcasts are taken in threads, beside whatever else this rank does, and over NCCL on a
    stream of its own. All go into one buffer, as large as the largest of them, which is kept.

    Args:
        open_end: Makes this end of a group.

    Attributes:
        group: The group that this rank is in, or is joining; empty when it is in none.
    """

    def __init__(self, open_end: OpenEnd) -> None:
        self.group = ""
        self._open_end = open_end
        self._live: list[Group] = []
        self._joining: Future[Group] | None = None
        self._last: Future[Group] | None = None
        self._scratch = Scratch()
        weakref.finalize(self, _let_go, self._live, os.getpid())

    @property
    def joined(self) -> bool:
        """Whether all have come."""
        joining = self._joining
        return joining is not None and joining.done() and joining.exception() is None

    def error(self) -> BaseException | None:
        """Why it did not join or take something; None if all is well, so far."""
        last = self._last
        return last.exception() if last is not None and last.done() else None

    def join(self, told: Mapping[str, Any], rank: int, device: torch.device | None) -> None:
        """Begins to join a group, and leaves the one before.

        Args:
            told: Its name, address, port and size.
            rank: The rank of this process in it.
            device: Where broadcasts are taken to; None where there is no GPU for it.
        """
        self.drop()
        self.group = told["name"]
        self._joining = self._last = spawn(self._join, told, rank, device)

    def take(self, sizes: Sizes, group: str) -> None:
        """Takes the next broadcasts, after those that are being taken.

        Args:
            sizes: How large they are.
            group: Of which group they are; those of another are past.
        """
        if group == self.group and self._last is not None:
            self._last = spawn(_take, self._last, sizes, self._scratch)

    def settle(self, group: str, seconds: float) -> None:
        """An update is over: only a group that may be used again is kept.

        Args:
            group: Which one that is.
            seconds: How long what is under way in it is waited for.
        """
        last = self._last
        if last is not None and group == self.group:
            wait([last], timeout=seconds)
        if last is None or group != self.group or not last.done() or last.exception() is not None:
            self.drop()

    def drop(self) -> None:
        """Leaves the group, whatever is under way, and waits for nobody."""
        self.group = ""
        self._joining = self._last = None
        _give_up(self._live)
        # What was under way may write into it yet, and what is next is passed on from it.
        self._scratch = Scratch()

    def _join(self, told: Mapping[str, Any], rank: int, device: torch.device | None) -> Group:
        if device is None:
            raise ConfigurationError(
                f"the group's backend is {told['backend']}, and torch sees no GPU on this rank",
                phase="connect",
                remedy="use trainer_ranks='one', or backend='gloo'",
            )
        end = self._open_end(told, rank, device)
        self._live.append(end)
        if self.group != end.name:  # it was dropped meanwhile
            end.give_up()
        end.join()
        return end


class Scratch:
    """Where broadcasts are taken to.

    All share one buffer: NCCL's follow each other on a stream; gloo's would overlap, and pass
    on each other's bytes.
    """

    def __init__(self) -> None:
        self._buffer = torch.empty(0, dtype=torch.uint8)
        self._stream: Any = None

    def stream(self, device: torch.device) -> AbstractContextManager[object]:
        """Training goes on on the caller's stream, which must not be waited for."""
        if device.type != "cuda":
            return nullcontext()
        cuda: Any = torch.cuda
        self._stream = self._stream or cuda.Stream(device)
        return cuda.stream(self._stream)  # type: ignore[no-any-return]

    def places(self, sizes: Sizes, device: torch.device) -> list[list[torch.Tensor]]:
        """A tensor for each of some broadcasts; those together that may be begun together."""
        kinds = [(getattr(torch, name), size) for name, many in sizes for size in many]
        self._grow(max((dtype.itemsize * size for dtype, size in kinds), default=0), device)
        places = [self._buffer[: dtype.itemsize * size].view(dtype) for dtype, size in kinds]
        return [[place] for place in places] if device.type == "cpu" else [places]

    def _grow(self, nbytes: int, device: torch.device) -> None:
        if self._buffer.numel() < nbytes or self._buffer.device != device:
            self._buffer = torch.empty(0, dtype=torch.uint8)  # frees before it allocates
            self._buffer = torch.empty(nbytes, dtype=torch.uint8, device=device)


def _take(before: Future[Group], sizes: Sizes, scratch: Scratch) -> Group:
    end = before.result()
    with scratch.stream(end.device):
        for tensors in scratch.places(sizes, end.device):
            end.broadcast(tensors)
            _await(end)
    return end


def _await(end: Group) -> None:
    pause = _FIRST_PAUSE_SECONDS
    while end.moving():
        time.sleep(pause)
        pause = min(2 * pause, _LAST_PAUSE_SECONDS)


def _give_up(live: list[Group]) -> None:
    while live:
        live.pop().give_up()


def _let_go(live: list[Group], process: int) -> None:
    """A sender that was dropped without a shutdown leaves nobody waiting for this rank."""
    if os.getpid() == process:  # a fork's copy: the group is the parent's
        _give_up(live)
