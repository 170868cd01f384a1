"""Memory of this process that other processes of the host open by themselves.

torch counts who opens what, and expects each handle to be opened once. Here a handle is opened
again at every update, by any number of engines, some of which may die: the counts tell nothing.
So the process that made the memory decides alone how long it lives. The counts are kept where
no opening or closing ever frees anything, and none of them keeps memory alive.

Run on torch 2.13 (CPU) and 2.11 (CUDA).
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from multiprocessing.shared_memory import SharedMemory
from typing import Any

import torch

Opening = tuple[object, ...]

# Every opening takes one off the count of a file, and the last one off it removes the file. They
# are added faster than any number of engines takes them, and slowly enough for 32 bits.
_OPENINGS = 256
_STDERR = 2
# Whoever opened memory of a GPU takes one off a count when it lets go. Where there is no such file
# torch does nothing, as it does when the process that shared the memory has ended.
_NO_COUNTS = b"/weight_update_counts_nothing"


class HostMemory:
    """Memory of the host under a name, which the system frees with the process at the latest.

    Args:
        nbytes: Its size; at least one.

    Attributes:
        opening: The manager, the name and the size: what ``rebuild_storage_filename`` takes.
        bytes: All of it.

    Raises:
        OSError: There is not as much.
    """

    def __init__(self, nbytes: int) -> None:
        make: Any = torch.UntypedStorage
        with _stderr_kept_from_children():
            try:
                self._storage = make._new_using_filename_cpu(nbytes)
            except RuntimeError as error:
                raise OSError(str(error)) from error
            self.opening: Opening = self._storage._share_filename_cpu_()
        self.bytes = torch.empty(0, dtype=torch.uint8).set_(self._storage)
        self.lend()
        _remove_with(self._storage, str(self.opening[1], "ascii"))

    def lend(self) -> None:
        """Lets it be opened some more times."""
        for _ in range(_OPENINGS):
            self._storage._shared_incref()


@contextmanager
def _stderr_kept_from_children() -> Iterator[None]:
    """Torch starts its manager with the first memory, and that ends with the last engine.

    A shell's pipe, or whoever else reads what this process writes, would wait for it.
    """
    try:
        inheritable = os.get_inheritable(_STDERR)
    except OSError:  # there is none
        yield
        return
    os.set_inheritable(_STDERR, False)
    try:
        yield
    finally:
        os.set_inheritable(_STDERR, inheritable)


def _remove_with(storage: torch.UntypedStorage, name: str) -> None:
    """Removes a file with the storage, or with this process, however that ends.

    torch removes it when nobody has it open any more, and its manager when the trainer and all
    engines have ended; an engine that lives would keep the memory of a trainer that was killed.
    """
    # Attaching has the resource tracker, a process of its own, remove it should this one be
    # killed. No mapping is kept.
    file = SharedMemory(name.removeprefix("/"))
    file.close()
    weakref.finalize(storage, _remove, file, os.getpid())


def _remove(file: SharedMemory, process: int) -> None:
    if os.getpid() == process:  # a fork's copy is the parent's file
        with suppress(FileNotFoundError):
            file.unlink()


def share_gpu_memory(storage: torch.UntypedStorage) -> Opening:
    """What opens a storage of a GPU: share it once, and use it as long as the storage lives.

    Every call would wrap the storage in one more count. The event that comes along is not
    waited for: it is recorded now, and what is written later comes after it. Whoever sends the
    opening waits until the memory is written.

    Returns:
        The arguments of ``rebuild_cuda_tensor`` that follow the device: handle, size, offset, the
        file of a count (there is none), the place in it, an event, and that it is not waited for.
    """
    private: Any = storage
    _, handle, nbytes, offset, counts, place, event, _ = private._share_cuda_()
    # It starts at one, for the one who is expected to open it, and memory is kept for ever unless
    # it is freed at exactly zero: one more opening, and the count is below.
    type(private)._release_ipc_counter(counts, place, device=storage.device)
    return handle, nbytes, offset, _NO_COUNTS, 0, event, False


def is_kept_elsewhere(tensor: torch.Tensor) -> bool:
    """Whether a tensor's storage outlives it: a parameter's does, that of a merged value does not.

    Example:
        >>> parameter = torch.nn.Parameter(torch.ones(2))
        >>> is_kept_elsewhere(parameter.detach()), is_kept_elsewhere(parameter.detach() + 1)
        (True, False)
    """
    private: Any = torch._C
    storage: Any = tensor.untyped_storage()
    return bool(private._storage_Use_Count(storage._cdata) > 2)  # the tensor, and the line above
