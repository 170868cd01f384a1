"""Shared memory as SGLang servers open it: their own kind of pickle, written without SGLang.

Servers unpickle what they know by name and nothing else; releases differ in how long their list
is, and all of it stands here. A server that cannot open what it is sent ends.
"""

from __future__ import annotations

import base64
import pickle
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch.multiprocessing.reductions import (
    rebuild_storage_filename,
    rebuild_tensor,
    rebuild_typed_storage,
)
from torch.storage import TypedStorage

from weight_update.weights.buckets import Bucket
from weight_update.weights.cargo import SharedMemory, SharedTensor

# Up to this one, a pickle names classes and functions in plain lines.
_PROTOCOL = 3


def tensor_request(
    bucket: Bucket, shared: Sequence[Sequence[SharedTensor]], *, flush: bool
) -> dict[str, Any]:
    """The body of an update request whose tensors the server opens by itself.

    Args:
        bucket: What it brings.
        shared: What each tensor parallel rank of the server opens, all of the bucket: its buffer,
            if it is flat, or a tensor a weight. Most often it is the same for several.
        flush: Whether the server flushes its cache after loading.

    Example:
        >>> body = tensor_request(Bucket((), flat=False), [(), ()], flush=False)
        >>> len(body["serialized_named_tensors"]), body["load_format"]
        (2, None)
    """
    written = {id(tensors): tensors for tensors in shared}
    payloads = {
        key: flat_payload(bucket, tensors[0]) if bucket.flat else plain_payload(bucket, tensors)
        for key, tensors in written.items()
    }
    return {
        "serialized_named_tensors": [payloads[id(tensors)] for tensors in shared],
        "load_format": "flattened_bucket" if bucket.flat else None,
        "flush_cache": flush,
        "abort_all_requests": False,
    }


def flat_payload(bucket: Bucket, buffer: SharedTensor) -> str:
    """One buffer, and where each weight lies in it, in bytes."""
    ends = [*accumulate((spec.nbytes for spec in bucket.specs), initial=0)]
    metadata = [
        FlattenedTensorMetadata((spec.name, spec.shape, spec.dtype, start, end, spec.nbytes))
        for spec, start, end in zip(bucket.specs, ends, ends[1:], strict=False)
    ]
    return _pickled({"flattened_tensor": _Opener().opened(buffer), "metadata": metadata})


def plain_payload(bucket: Bucket, tensors: Sequence[SharedTensor]) -> str:
    """A tensor a weight, by name."""
    opener = _Opener()
    pairs = zip(bucket.specs, tensors, strict=True)
    return _pickled([(spec.name, opener.opened(tensor)) for spec, tensor in pairs])


class FlattenedTensorMetadata(tuple[Any, ...]):
    """Stands for SGLang's class of this name: one tensor in a flat bucket.

    It is made from its fields in order: name, shape, dtype, first byte, end, number of bytes.
    There may be 20,000 of them, and a request waits for its pickle.
    """

    __slots__ = ()

    def __reduce__(self) -> tuple[Any, ...]:
        return FlattenedTensorMetadata, tuple(self)


def _rebuild_cuda_tensor_modified() -> None:
    """Stands for SGLang's function of this name: torch's, but it knows GPUs by UUID."""


_STANDS_FOR: dict[Any, str] = {
    FlattenedTensorMetadata: "sglang.srt.weight_sync.tensor_bucket",
    _rebuild_cuda_tensor_modified: "sglang.srt.utils.patch_torch",
}


@dataclass(frozen=True)
class _Call:
    """What the server calls to make an object."""

    function: Callable[..., object]
    arguments: tuple[object, ...]

    def __reduce__(self) -> tuple[Any, ...]:
        return self.function, self.arguments


class _Opener:
    """What opens memory, once a payload: host memory is counted by the opening."""

    def __init__(self) -> None:
        self._storages: dict[SharedMemory, _Call] = {}

    def opened(self, tensor: SharedTensor) -> _Call:
        """What makes a tensor."""
        return self._on_gpu(tensor) if tensor.memory.device else self._on_host(tensor)

    def _on_host(self, tensor: SharedTensor) -> _Call:
        memory = tensor.memory
        arguments = (torch.UntypedStorage, *memory.opening)
        untyped = self._storages.setdefault(memory, _Call(rebuild_storage_filename, arguments))
        storage = _Call(rebuild_typed_storage, (untyped, tensor.dtype))
        place = (_items(tensor), tensor.shape, _strides(tensor.shape), False)
        return _Call(rebuild_tensor, (torch.Tensor, storage, place))

    def _on_gpu(self, tensor: SharedTensor) -> _Call:
        handle, nbytes, start, *counting = tensor.memory.opening
        shape = (tensor.shape, _strides(tensor.shape), _items(tensor))
        storage = (TypedStorage, tensor.dtype, tensor.memory.device, handle, nbytes, start)
        arguments = (torch.Tensor, *shape, *storage, False, *counting)
        return _Call(_rebuild_cuda_tensor_modified, arguments)


def _items(tensor: SharedTensor) -> int:
    return tensor.offset // tensor.dtype.itemsize


def _strides(shape: Sequence[int]) -> tuple[int, ...]:
    """Of a contiguous tensor.

    Example:
        >>> _strides((2, 3, 4))
        (12, 4, 1)
    """
    return tuple(accumulate(reversed(shape[1:]), lambda a, b: a * b, initial=1))[::-1][: len(shape)]


def _pickled(payload: object) -> str:
    data = pickle.dumps(payload, _PROTOCOL)
    for stand_in, module in _STANDS_FOR.items():
        name = stand_in.__name__
        data = data.replace(_line(stand_in.__module__, name), _line(module, name))
    return base64.b64encode(data).decode("ascii")


def _line(module: str, name: str) -> bytes:
    """How a pickle names something: no weight's name has such line breaks in it."""
    return pickle.GLOBAL + f"{module}\n{name}\n".encode()
