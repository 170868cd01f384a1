"""A rank of an NCCL group without torch.distributed, as vLLM's weight transfer joins one.

Usage: nccl_peer.py DEVICE NUMEL..., with the group's id in base64 on standard input. It joins as
rank 1 of 2, takes part in an all-reduce of one number, receives as many bf16 elements as it is told
in one broadcast each, and prints a JSON list of their sums, which are exact.
"""

from __future__ import annotations

import base64
import ctypes
import json
import sys
from typing import Any

import torch

_FLOAT32, _BFLOAT16 = 7, 9  # ncclDataType_t
_SUM = 0  # ncclRedOp_t


class UniqueId(ctypes.Structure):
    """ncclUniqueId."""

    _fields_ = [("internal", ctypes.c_byte * 128)]


def checked(result: int) -> None:
    if result:
        raise RuntimeError(f"NCCL answered {result}")


class Communicator:
    """A communicator on a device."""

    def __init__(self, unique_id: bytes, world_size: int, rank: int) -> None:
        self._nccl = ctypes.CDLL("libnccl.so.2")  # torch has loaded it
        self._communicator = ctypes.c_void_p()
        self._nccl.ncclCommInitRank.argtypes = [
            *(ctypes.POINTER(ctypes.c_void_p), ctypes.c_int, UniqueId, ctypes.c_int)
        ]
        place = ctypes.byref(self._communicator)
        known = UniqueId.from_buffer_copy(unique_id)
        checked(self._nccl.ncclCommInitRank(place, world_size, known, rank))

    def all_reduce(self, tensor: torch.Tensor) -> None:
        checked(self._nccl.ncclAllReduce(*self._buffers(tensor), _FLOAT32, _SUM, *self._where()))

    def receive(self, tensor: torch.Tensor) -> None:
        checked(self._nccl.ncclBroadcast(*self._buffers(tensor), _BFLOAT16, 0, *self._where()))

    def _buffers(self, tensor: torch.Tensor) -> tuple[Any, ...]:
        place = ctypes.c_void_p(tensor.data_ptr())
        return place, place, ctypes.c_size_t(tensor.numel())

    def _where(self) -> tuple[Any, ...]:
        return self._communicator, ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)


def main(device: int, sizes: list[int]) -> None:
    torch.cuda.set_device(device)
    tensors = [torch.zeros(size, dtype=torch.bfloat16, device="cuda") for size in sizes]
    print(json.dumps("here"), flush=True)
    communicator = Communicator(base64.b64decode(sys.stdin.readline()), 2, 1)
    communicator.all_reduce(torch.zeros(1, device="cuda"))
    for tensor in tensors:
        communicator.receive(tensor)
    torch.cuda.synchronize()
    print(json.dumps([bits_of(tensor) for tensor in tensors]), flush=True)


def bits_of(tensor: torch.Tensor) -> int:
    """A sum over the bits of all elements, weighted by their places."""
    places = torch.arange(1, tensor.numel() + 1, device=tensor.device)
    return int((tensor.view(torch.int16).long() * places).sum())


if __name__ == "__main__":
    main(int(sys.argv[1]), [int(size) for size in sys.argv[2:]])
