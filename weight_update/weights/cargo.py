"""What a packer makes of a bucket: tensors for a group, memory to open, or files to read."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from weight_update.weights.specs import TensorSpec

Packs = Callable[[TensorSpec], bool]


@dataclass(frozen=True)
class SharedMemory:
    """Memory of this process that other processes of the host can open.

    Attributes:
        device: UUID of its GPU, which every process knows it by; empty for memory of the host.
        opening: What torch needs to open it: the arguments of its rebuild function that concern
            the storage, in torch's order.
        nbytes: Its size.
    """

    device: str
    opening: tuple[object, ...]
    nbytes: int


@dataclass(frozen=True)
class SharedTensor:
    """A contiguous tensor in shared memory.

    Attributes:
        memory: Where it lies.
        dtype: Its dtype.
        shape: Its shape.
        offset: Its first byte.
    """

    memory: SharedMemory
    dtype: torch.dtype
    shape: tuple[int, ...]
    offset: int = 0


@dataclass
class Cargo:
    """A packed bucket on its way: whatever the way in use needs, and nothing else.

    Attributes:
        tensors: What the group broadcasts, in order.
        shared: What engines open: one flat buffer, or a tensor a weight, in wire order.
        folder: Where engines read files.
    """

    tensors: list[torch.Tensor] = field(default_factory=list)
    shared: tuple[SharedTensor, ...] = ()
    folder: Path | None = None


@dataclass(frozen=True)
class Terms:
    """Under which terms weights travel.

    Attributes:
        bucket_bytes: The size of a bucket that the user asked for; None lets the packer choose.
        engine_bytes: Memory that every engine has free for an update; None when one does not say.
        request_seconds: What an update request costs whatever its size; None before one was
            measured.
    """

    bucket_bytes: int | None = None
    engine_bytes: int | None = None
    request_seconds: float | None = None


@dataclass(frozen=True)
class Format:
    """How weights are divided among update requests.

    Attributes:
        bucket_bytes: A bucket is closed before it exceeds this.
        packs: Whether a tensor is packed into a buffer with others.
        reason: Why, for the report; empty where nothing was chosen.
    """

    bucket_bytes: int
    packs: Packs
    reason: str = ""


Formats = Callable[[Sequence[TensorSpec] | None], Format]
"""Chooses the format for tensors; of a stream, they are not known (None)."""
