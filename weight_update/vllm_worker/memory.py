"""Memory of a trainer that a worker opens: CUDA IPC, or shared memory of the host."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from typing import Any

import torch
from torch.multiprocessing.reductions import rebuild_cuda_tensor, rebuild_storage_filename
from torch.storage import TypedStorage

Message = Mapping[str, Any]


def viewed(
    memory: torch.Tensor, start: int, dtype: torch.dtype, shape: Sequence[int]
) -> torch.Tensor:
    """A weight that lies in memory; a copy where it lies askew.

    Example:
        >>> memory = torch.arange(6, dtype=torch.uint8)
        >>> viewed(memory, 2, torch.int16, [2]), viewed(memory, 5, torch.uint8, [])
        (tensor([ 770, 1284], dtype=torch.int16), tensor(5, dtype=torch.uint8))
    """
    end = start + prod(shape) * dtype.itemsize
    if not 0 <= start <= end <= memory.numel():
        raise ValueError(f"bytes {start} to {end} are not in a memory of {memory.numel()}")
    raw = memory[start:end]
    aligned = raw.clone() if start % dtype.itemsize else raw
    return aligned.view(dtype).view(tuple(shape))


def opened(memory: Message, device: torch.device) -> torch.Tensor:
    """Opens the trainer's memory: of a GPU, known by its UUID, or of the host."""
    opening = [bytes.fromhex(x["hex"]) if isinstance(x, dict) else x for x in memory["opening"]]
    if not memory["device"]:
        open_file: Any = rebuild_storage_filename
        storage = open_file(torch.UntypedStorage, *opening)
        return torch.empty(0, dtype=torch.uint8).set_(storage)
    handle, nbytes, start, *counting = opening
    number = number_of(memory["device"], device)
    view = (torch.Tensor, (nbytes,), (1,), 0)
    storage = (TypedStorage, torch.uint8, number, handle, nbytes, start)
    open_handle: Any = rebuild_cuda_tensor
    whole: torch.Tensor = open_handle(*view, *storage, False, *counting)
    return whole


def number_of(uuid: str, own: torch.device) -> int:
    """The number by which this process knows a GPU: its own, or another one of the host."""
    numbers: list[int] = list(range(torch.cuda.device_count()))
    for number in sorted(numbers, key=lambda number: number != own.index):
        if uuid_of(torch.device("cuda", number)) == uuid:
            return number
    raise ValueError(f"the weights are on GPU {uuid}, which this worker does not see")


def uuid_of(device: torch.device) -> str:
    """The UUID of a GPU, which every process knows it by; empty for the CPU."""
    return str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else ""


def wait_for(device: torch.device) -> None:
    """Waits until a device has done what it was asked."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
