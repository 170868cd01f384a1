"""Loading beside receiving: what has arrived is written while the next tensors arrive."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

Write = Callable[[], None]


@dataclass(frozen=True)
class Load:
    """Something that is being written.

    Attributes:
        precede: Makes what is received from now on come after it.
        wait: Returns when it is written.
    """

    precede: Callable[[], object]
    wait: Callable[[], object]


def _nothing() -> None:
    """Nothing is being written."""


class Loader:
    """Writes one thing after the other: on the CPU in a thread, on a GPU on a stream.

    To tell a GPU what to write takes the host milliseconds, and whoever asked need not wait for
    them: :meth:`start` only notes it, and :meth:`go` tells it.

    Args:
        device: Where the model is.
    """

    def __init__(self, device: torch.device) -> None:
        self._last = Load(_nothing, _nothing)
        self._thread = ThreadPoolExecutor(1, "loader")
        cuda: Any = torch.cuda
        self._stream = cuda.Stream(device) if device.type == "cuda" else None
        self._noted: Write = _nothing

    def start(self, write: Write) -> Load:
        """Begin to write, after all that this thread has been told has arrived."""
        self._last = self._in_thread(write) if self._stream is None else self._on_stream(write)
        return self._last

    def go(self) -> None:
        """Tell a GPU what was noted; nothing else is received before that."""
        noted, self._noted = self._noted, _nothing
        noted()

    def finish(self) -> None:
        """Wait until all is written."""
        self._last.wait()
        self._last = Load(_nothing, _nothing)

    def _in_thread(self, write: Write) -> Load:
        written = self._thread.submit(write)
        return Load(written.result, written.result)

    def _on_stream(self, write: Write) -> Load:
        cuda: Any = torch.cuda
        written = cuda.Event()
        self._noted = partial(self._tell, write, written)
        return Load(lambda: cuda.current_stream().wait_event(written), written.synchronize)

    def _tell(self, write: Write, written: Any) -> None:
        stream: Any = self._stream
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            write()
        written.record(stream)


class Buffers:
    """Memory that tensors arrive in: two pieces, so that one is read while the other fills.

    They are kept, so that an update costs no fresh memory; they grow and never shrink.
    """

    def __init__(self, device: torch.device) -> None:
        empty = torch.empty(0, dtype=torch.uint8, device=device)
        self._pieces = [_Piece(empty), _Piece(empty)]

    def take(self, size: int) -> torch.Tensor:
        """Return memory that nothing reads any more, or will not once it is written to."""
        piece = self._pieces[0]
        piece.load.precede()
        if piece.memory.numel() < size:
            piece.memory = piece.memory.new_empty(0)  # frees before it allocates
            piece.memory = piece.memory.new_empty(size)
        return piece.memory

    def read_by(self, load: Load) -> None:
        """Leave the memory that was taken last to ``load``, and take the other one next."""
        self._pieces[0].load = load
        self._pieces.reverse()


@dataclass
class _Piece:
    memory: torch.Tensor
    load: Load = Load(_nothing, _nothing)
