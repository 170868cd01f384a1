"""Writing a safetensors file, one tensor in memory at a time."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Sequence
from pathlib import Path

import torch

from weight_update.weights.checkpoint import DTYPES
from weight_update.weights.specs import TensorSpec

_WORDS = {dtype: word for word, dtype in DTYPES.items()}
# Readers map the file: with this, the first tensor starts where any item may.
_ALIGNED = 8
_METADATA = "__metadata__"


def can_hold(dtype: torch.dtype) -> bool:
    """Whether a file can hold tensors of a dtype."""
    return dtype in _WORDS


def can_name(name: str) -> bool:
    """Whether a file can hold a tensor of a name.

    Example:
        >>> can_name("model.norm.weight"), can_name("__metadata__")
        (True, False)
    """
    return name != _METADATA and name == name.encode(errors="ignore").decode()


def header_of(specs: Sequence[TensorSpec]) -> bytes:
    """What stands before the tensors: its own size, and where each of them lies.

    Example:
        >>> header = header_of([TensorSpec("a", torch.float32, (2,))])
        >>> len(header) % 8, header[8:31]
        (0, b'{"__metadata__":{"forma')
    """
    told: dict[str, object] = {_METADATA: {"format": "pt"}}
    start = 0
    for spec in specs:
        end = start + spec.nbytes
        told[spec.name] = {
            "dtype": _WORDS[spec.dtype],
            "shape": list(spec.shape),
            "data_offsets": [start, end],
        }
        start = end
    text = json.dumps(told, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGNED)
    return len(text).to_bytes(8, "little") + text


def write_tensors(path: Path, specs: Sequence[TensorSpec], values: Iterable[torch.Tensor]) -> None:
    """Writes a file and waits until it is stored.

    Args:
        path: A file that is not there yet.
        specs: Its tensors, those of larger items first.
        values: Their values, in the same order; each is let go once it is written.

    Raises:
        OSError: It cannot be written.
    """
    # No name holds a value while the next is read: merged ones would exist twice.
    turns = iter(values)
    with open(path, "xb") as file:
        file.write(header_of(specs))
        for _ in specs:
            file.write(_bytes_of(next(turns)))
        sync(file.fileno())


def _bytes_of(value: torch.Tensor) -> memoryview:
    raw = value.detach().to("cpu").contiguous().reshape(-1).view(torch.uint8)
    return raw.numpy().data


def write_text(path: Path, text: str) -> None:
    """Writes a small file and waits until it is stored."""
    with open(path, "x", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        sync(file.fileno())


def sync_folder(path: Path) -> None:
    """Waits until the names in a folder are stored."""
    handle = os.open(path, os.O_RDONLY)
    try:
        sync(handle)
    finally:
        os.close(handle)


def sync(handle: int) -> None:
    """Has a file stored, so that another host sees all of it; in memory, it costs nothing."""
    os.fsync(handle)
