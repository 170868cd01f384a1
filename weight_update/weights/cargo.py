"""What a packer makes of a bucket: tensors for a group, memory to open, or files to read."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch

from weight_update.facts import Intake
from weight_update.weights.specs import TensorSpec, Weight

Packs = Callable[[TensorSpec], bool]


@dataclass(frozen=True)
class SharedMemory:
    """Memory of this process that other processes of the host can open.

    Attributes:
        device: UUID of its GPU, which every process knows it by; empty for memory of the host.
        opening: What torch needs to open it: the arguments of its rebuild function that concern
            the storage, in torch's order.
        nbytes: Its size.
        keeper: What it lives as long as; a request that tells of it holds this until its answer.
    """

    device: str
    opening: tuple[object, ...]
    nbytes: int
    keeper: object = field(default=None, repr=False, compare=False)

    @property
    def plain_opening(self) -> list[object]:
        """What opens it, as JSON can hold it.

        Example:
            >>> SharedMemory("", (b"a", 1), 8).plain_opening
            [{'hex': '61'}, 1]
        """
        return [{"hex": part.hex()} if isinstance(part, bytes) else part for part in self.opening]


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
        elsewhere: The same, by rank of the trainer, in memory that other ranks share.
        folder: Where engines read files.
        reading: Keeps the folder while the engine at a URL reads it.
        unordered: Engines take it in whatever order it comes in, so the next one is told of before
            this one was taken. The packer has room for two at a time that nobody took.
        queued: The group sends in the order it is asked to, and the packer writes to a buffer only
            behind what is sent from it: the next one may be sent as soon as engines answered,
            though this one's bytes still travel.
    """

    tensors: list[torch.Tensor] = field(default_factory=list)
    shared: tuple[SharedTensor, ...] = ()
    elsewhere: Mapping[int, tuple[SharedTensor, ...]] = field(default_factory=dict)
    folder: Path | None = None
    reading: Callable[[str], AbstractContextManager[object]] = nullcontext
    unordered: bool = False
    queued: bool = False

    def shared_by(self, rank: int) -> tuple[SharedTensor, ...]:
        """What an engine opens that shares its GPU with a rank of the trainer."""
        return self.elsewhere.get(rank, self.shared)


@dataclass(frozen=True)
class Terms:
    """Under which terms weights travel.

    Attributes:
        bucket_bytes: The size of a bucket that the user asked for; None lets the packer choose.
        engine_bytes: Memory that every engine has free for an update; None when one does not say.
        request_seconds: What an update request costs whatever its size; None before one was
            measured.
        in_place: Every value is there already, as it is sent and where it is sent from.
        ranks: Most tensor parallel ranks that one engine has.
        intakes: How each engine, by URL, takes weights.
        bucket_limit: What no bucket of several tensors is larger than, whatever is chosen.
    """

    bucket_bytes: int | None = None
    engine_bytes: int | None = None
    request_seconds: float | None = None
    in_place: bool = False
    ranks: int = 1
    intakes: Mapping[str, Intake] = field(default_factory=dict)
    bucket_limit: int | None = None

    def limited(self, chosen: Format) -> Format:
        """A format whose buckets are no larger than the limit.

        Example:
            >>> Terms(bucket_limit=5).limited(Format(9, lambda _: True)).bucket_bytes
            5
        """
        if self.bucket_limit is None or chosen.bucket_bytes <= self.bucket_limit:
            return chosen
        return replace(chosen, bucket_bytes=self.bucket_limit)


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


Formats = Callable[[Sequence[Weight] | None], Format]
"""Chooses the format for weights; of a stream, they are not known (None)."""
