"""An update in memory that is opened: ZMQ tells of it, and CUDA IPC or shared memory holds it."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing
from typing import Any, Protocol

import torch

from weight_update.vllm_worker.memory import Message, opened, viewed, wait_for
from weight_update.vllm_worker.trainer_line import TrainerLine

# The trainer binds a REQ socket a worker, and each worker connects a REP socket to its own. Every
# message is a head in JSON, and for a bucket a second part that announces its weights:
#
#   begin     seconds                              the layers wait for their weights
#   bucket    seconds, memories, places | names, dtypes, shapes     loaded, views are dropped
#   complete  seconds, tensors                     weights are as the kernels want them
#
# The answer is {}, or what failure() makes; to begin it says whether the update before it is
# ``unfinished``. Memory is written again once its bucket was answered. ``seconds`` is how long the
# next message may take at most. When an end of the socket is gone, the other gives the update up.

# What a trainer may be late by: it counts from when it sent a message, and may be on busy cores.
_LATE_SECONDS = 10.0
_WORDS = 500

Views = Iterable[tuple[str, torch.Tensor]]


class Target(Protocol):
    """What weights are loaded into."""

    def begin(self) -> bool:
        """Opens an update; returns whether the one before was never completed."""

    def load(self, weights: Views) -> None:
        """Loads some weights; nothing may refer to their memory afterwards."""

    def complete(self) -> None:
        """Closes the update."""

    def undo(self) -> bool:
        """Closes an update that failed; returns whether some weights of it stay."""


def receive_shared_weights(
    address: str, target: Target, device: torch.device, seconds: float
) -> dict[str, Any]:
    """Takes one update from a trainer.

    It never raises: vLLM would leave the answers of the other workers unread, and take them for
    those of the next call.

    Args:
        address: ZMQ address of the socket that the trainer has bound for this worker.
        target: What the weights are loaded into.
        device: Where that is.
        seconds: How long the first message may take at most.

    Returns:
        Nothing, or what :func:`failure` makes.
    """
    try:
        with closing(TrainerLine(address)) as line:
            return SharedUpdate(line, target, device).run(seconds + _LATE_SECONDS)
    except Exception as error:  # noqa: BLE001 - it travels as text
        return failure(described(error), changed=False, restored=True)


class SharedUpdate:
    """One update, as a trainer brings it.

    Args:
        line: To the trainer.
        target: What the weights are loaded into.
        device: Where that is.
    """

    def __init__(self, line: TrainerLine, target: Target, device: torch.device) -> None:
        self._line, self._target, self._device = line, target, device
        self._begun = False
        self._names: set[str] = set()
        self._at = ""
        self._opened: dict[str, torch.Tensor] = {}

    def run(self, seconds: float) -> dict[str, Any]:
        """Takes messages until the update is complete, or fails; then it is undone."""
        kinds: dict[str, Callable[..., dict[str, Any]]]
        kinds = {"begin": self._begin, "bucket": self._load, "complete": self._complete}
        asked, kind = False, ""
        try:
            while kind != "complete":
                head, *parts = map(json.loads, self._line.receive(seconds))
                asked, kind = True, head["kind"]
                answer = kinds[kind](head, *parts)
                self._line.answer(answer)
                asked, seconds = False, head["seconds"] + _LATE_SECONDS
        except Exception as error:  # noqa: BLE001 - it travels as text
            failed = self._undo(error)
            if asked:
                self._line.answer(failed)
            return failed
        return {}

    def _begin(self, _: Message) -> dict[str, Any]:
        self._begun = True
        return {"unfinished": self._target.begin()}

    def _load(self, head: Message, announced: Message) -> dict[str, Any]:
        self._refuse_repeated(announced["names"])
        self._target.load(self._views(head, announced))
        self._at = ""
        wait_for(self._device)  # a GPU may be reading still, and the trainer writes next
        return {}

    def _complete(self, head: Message) -> dict[str, Any]:
        if head["tensors"] != len(self._names):
            raise ValueError(f"{len(self._names)} weights came, and {head['tensors']} were sent")
        self._opened.clear()
        self._target.complete()
        wait_for(self._device)
        return {}

    def _undo(self, error: Exception) -> dict[str, Any]:
        place = f"at {self._at!r}: " if self._at else ""  # loaders do not always say
        words = f"{place}{described(error)}"
        self._opened.clear()
        try:
            changed = self._begun and self._target.undo()
            wait_for(self._device)
        except Exception as second:  # noqa: BLE001 - it travels as text
            return failure(f"{words}; and its layers are not whole: {described(second)}")
        return failure(words, changed=changed, restored=True)

    def _refuse_repeated(self, names: Sequence[str]) -> None:
        """A layer is taken for whole when as many numbers came as it has, whichever they are."""
        for name in names:
            if name in self._names:
                raise ValueError(f"{name!r} was sent twice")
            self._names.add(name)

    def _views(self, head: Message, announced: Message) -> Iterator[tuple[str, torch.Tensor]]:
        """The weights of a bucket, one at a time: nobody here holds one that was loaded."""
        memories = [self._memory(memory) for memory in head["memories"]]
        announcements = zip(*(announced[k] for k in ("names", "dtypes", "shapes")), strict=True)
        for (name, dtype, shape), (index, start) in zip(announcements, head["places"], strict=True):
            self._at = name
            yield name, viewed(memories[index], start, getattr(torch, dtype), shape)

    def _memory(self, memory: Message) -> torch.Tensor:
        """Opens memory, once an update."""
        key = json.dumps(memory)
        if key not in self._opened:
            self._opened[key] = opened(memory, self._device)
        return self._opened[key]


def failure(words: str, *, changed: bool = True, restored: bool = False) -> dict[str, Any]:
    """What a worker says of an update that failed.

    Args:
        words: Why.
        changed: Whether some weights are the update's.
        restored: Whether all others are the old ones.
    """
    return {"error": words, "changed": changed, "restored": restored}


def described(error: BaseException) -> str:
    """An error in a line of words."""
    return " ".join(f"{type(error).__name__}: {error}".split())[:_WORDS]
