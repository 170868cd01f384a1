"""The way inside one host: engines open the trainer's memory, and copy out of it themselves.

On a GPU that is CUDA IPC, on the CPU shared memory. What holds:

1. A buffer is shared once, as long as it lives, and its handle is sent again at every update.
2. An engine is told of a buffer when it is written, and not before.
3. A buffer is written again only when every request that named it was answered, or the engine
   that did not answer was given up. That one may read what comes later; but it obeys in order,
   so it has read it before it begins the full push that alone may call its weights whole again.
"""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from math import ceil
from urllib.parse import urlsplit
from weakref import WeakKeyDictionary

import torch

from weight_update.errors import ConfigurationError
from weight_update.options import LoadFormat
from weight_update.torch_private.shared_memory import (
    HostMemory,
    is_kept_elsewhere,
    share_gpu_memory,
)
from weight_update.transports.address import has_address
from weight_update.transports.in_request import NoGroup
from weight_update.transports.packing import SideStream, fill, read_as_announced
from weight_update.transports.sizing import free_bytes
from weight_update.weights.buckets import Bucket, Plan
from weight_update.weights.cargo import Cargo, Format, SharedMemory, SharedTensor, Terms
from weight_update.weights.growing_plan import GrowingPlan
from weight_update.weights.specs import TensorSpec

# What all buffers together may take unless the user says how large a bucket is. A GPU's engine
# spends about 7 ms on a request whatever its size, and packing is hidden behind the request
# before; on a CPU a request is cheap beside the copies, and only what is divided overlaps.
_MOST_BYTES = {"cuda": 4 << 30, "cpu": 256 << 20}
# Left free for whoever else allocates, the engine on the same GPU above all.
_RESERVE_BYTES = {"cuda": 1 << 30, "cpu": 64 << 20}
# Tensors that are not shared where they are get room by the piece.
_PIECE_BYTES = 64 << 20
_ALIGNMENT = 16
_SHARED_FILES = "/dev/shm"


class SharedMemoryWay:
    """What the way needs: a group that carries nothing, and a packer that outlives it.

    A group is given up when an update fails, while engines may not even have opened what they
    were told of; those that find it gone end. So the buffers stay for the next update.

    Args:
        load_format: ``tensors`` shares every parameter where it lies, without a buffer.
        all_ranks_answer: Every rank of an engine says when it has taken a bucket.
    """

    def __init__(self, load_format: LoadFormat = "auto", *, all_ranks_answer: bool = False) -> None:
        self._load_format, self._all_ranks_answer = load_format, all_ranks_answer
        self._packer: SharedMemoryPacker | None = None

    def open_packer(self, device: torch.device) -> SharedMemoryPacker:
        """The packer for a device."""
        if self._packer is None or self._packer.device != _numbered(device):
            self._packer = SharedMemoryPacker(
                device, self._load_format, all_ranks_answer=self._all_ranks_answer
            )
        return self._packer

    def open_group(self, urls: Sequence[str], device: torch.device) -> NoGroup:
        """Stands where a group would.

        Raises:
            ConfigurationError: A URL leads to another host.
        """
        check_on_this_host(urls)
        return NoGroup("cuda ipc" if device.type == "cuda" else "shared memory", device)

    def close(self) -> None:
        """Lets go of the buffers; one that an engine was just told of goes with its answer."""
        packer, self._packer = self._packer, None
        if packer is not None:
            packer.abandon()


@dataclass(frozen=True)
class _Buffer:
    """Memory that was shared, and how engines open it."""

    memory: SharedMemory
    bytes: torch.Tensor
    lend: Callable[[], None]

    @classmethod
    def on(cls, device: torch.device, nbytes: int) -> _Buffer:
        """A new one.

        Raises:
            ConfigurationError: There is no room for it.
        """
        try:
            return cls._on_gpu(device, nbytes) if device.type == "cuda" else cls._on_host(nbytes)
        except (OSError, torch.OutOfMemoryError) as error:
            raise ConfigurationError(
                f"no room for a buffer of {shown(nbytes)} on {device}: {error}",
                phase="plan",
                remedy=_REMEDY,
            ) from error

    @classmethod
    def _on_host(cls, nbytes: int) -> _Buffer:
        host = HostMemory(nbytes)
        return cls(SharedMemory("", host.opening, nbytes, host), host.bytes, host.lend)

    @classmethod
    def _on_gpu(cls, device: torch.device, nbytes: int) -> _Buffer:
        room = torch.empty(nbytes, dtype=torch.uint8, device=device)
        return cls(_shared(room.untyped_storage(), device, room), room, lambda: None)


def _shared(
    storage: torch.UntypedStorage, device: torch.device, keeper: object = None
) -> SharedMemory:
    uuid = str(torch.cuda.get_device_properties(device).uuid)
    return SharedMemory(uuid, share_gpu_memory(storage), storage.nbytes(), keeper)


@dataclass
class _Shelf:
    """The buffers of one turn, kept for the next."""

    buffers: list[_Buffer] = field(default_factory=list)
    _index: int = 0
    _used: int = 0

    def clear(self) -> None:
        """Nothing on it is needed any more."""
        self._index = self._used = 0

    def place(self, nbytes: int, make: Callable[[], _Buffer]) -> tuple[_Buffer, int]:
        """Room for some bytes: a buffer and an offset in it."""
        start = ceil(self._used / _ALIGNMENT) * _ALIGNMENT
        while self._index < len(self.buffers):
            buffer = self.buffers[self._index]
            if start + nbytes <= buffer.memory.nbytes:
                self._used = start + nbytes
                return buffer, start
            self._index, start = self._index + 1, 0
        if self._used == 0:
            self.buffers.clear()  # all are too small: frees before it allocates
        self.buffers.append(make())
        self._index, self._used = len(self.buffers) - 1, nbytes
        return self.buffers[-1], 0


class SharedMemoryPacker:
    """Packs buckets into buffers that engines open, by turns; all are made once and kept.

    While engines load one bucket, the next is packed into another buffer, and announced before
    the first was taken: the engine reads that request beside its own copies.

    Args:
        device: Where the weights are; buffers are there too.
        load_format: ``tensors`` shares what lasts where it lies, and copies only what does not:
            merged or cast weights, and on the CPU, where ordinary memory cannot be opened, all.
        all_ranks_answer: Every rank of an engine says when it has taken a bucket; without, rank 0
            answers for all.
    """

    def __init__(
        self,
        device: torch.device,
        load_format: LoadFormat = "auto",
        *,
        all_ranks_answer: bool = False,
    ) -> None:
        self.device = _numbered(device)
        self._all_ranks_answer = all_ranks_answer
        self._apart = load_format == "tensors"
        self._side = SideStream(device)
        self._shelves: list[_Shelf] = []
        self._most_turns = self._turns = 2
        self._turn = 0
        self._nbytes = 0
        self._memories: WeakKeyDictionary[torch.UntypedStorage, tuple[int, SharedMemory]] = (
            WeakKeyDictionary()
        )

    # -- how weights are divided --------------------------------------------------------

    def format(self, specs: Sequence[TensorSpec] | None, terms: Terms) -> Format:
        """Buckets as large as was asked for, or as memory allows: few requests cost least."""
        # Where rank 0 answers for all ranks, others may be reading still. They have read what
        # came before when the next request is answered.
        self._most_turns = 2 if terms.ranks == 1 or self._all_ranks_answer else 3
        if self._apart and self.device.type == "cuda":
            whole = sys.maxsize if specs is None else sum(spec.nbytes for spec in specs)
            return Format(terms.bucket_bytes or max(whole, 1), _packs_none, _IN_PLACE)
        packs, remark = (_packs_none, _COPIED) if self._apart else (_packs_all, "")
        if terms.bucket_bytes is not None:
            return Format(terms.bucket_bytes, packs, remark)
        size, reason = self._size(specs)
        return Format(size, packs, "; ".join(filter(None, (reason, remark))))

    def _size(self, specs: Sequence[TensorSpec] | None) -> tuple[int, str]:
        room = max(self._held + _free(self.device) - _RESERVE_BYTES[self.device.type], 0)
        most = min(_MOST_BYTES[self.device.type], room)
        needed = None if specs is None else sum(_padded(spec.nbytes) for spec in specs)
        if needed is not None and needed <= most:
            return max(needed, 1), f"one buffer of {shown(needed)} holds everything"
        size = max(most // self._most_turns, 1)
        return size, f"{self._most_turns} buffers of {shown(size)}, with {shown(room)} to spare"

    @property
    def _held(self) -> int:
        return sum(b.memory.nbytes for shelf in self._shelves for b in shelf.buffers)

    def objections(self, plan: Plan | GrowingPlan) -> list[str]:
        """Buffers that do not fit into what is free."""
        flat = sorted((bucket.nbytes for bucket in plan.buckets if bucket.flat), reverse=True)
        needed = sum(flat[: self._most_turns])
        free = self._held + _free(self.device)
        if needed <= free:
            return []
        text = f"{shown(needed)} of buffers do not fit on {self.device}, where {shown(free)} are"
        return [f"{text} free; {_REMEDY}"]

    def reserve(self, plan: Plan | GrowingPlan) -> None:
        """Learns how many buffers there must be, and how large; first use makes them."""
        self._nbytes = max(map(self._size_of, plan.buckets), default=1)
        self._turns = min(self._most_turns, len(plan.buckets) or self._most_turns)

    # -- packing ------------------------------------------------------------------------

    @torch.no_grad()
    def pack(self, bucket: Bucket) -> Cargo:
        """The shared tensors of a bucket, written.

        Raises:
            WeightMismatchError: A value has another dtype or shape than was announced.
            ConfigurationError: There is no room for them.
        """
        shelf = self._next_shelf()
        with self._side.running():
            shared = (self._flat(bucket, shelf),) if bucket.flat else self._each(bucket, shelf)
            if self.device.type == "cuda":
                torch.cuda.current_stream(self.device).synchronize()
        for buffer in shelf.buffers:
            buffer.lend()
        return Cargo(shared=shared, unordered=True)

    def abandon(self) -> None:
        """Leaves the buffers to whoever may still use them; later packs get others."""
        self._shelves = []

    def _next_shelf(self) -> _Shelf:
        shelves = self._shelves
        self._turn = (self._turn + 1) % self._turns
        while len(shelves) <= self._turn:
            shelves.append(_Shelf())
        shelves[self._turn].clear()
        return shelves[self._turn]

    def _flat(self, bucket: Bucket, shelf: _Shelf) -> SharedTensor:
        nbytes = max(bucket.nbytes, 1)  # a bucket without weights is opened all the same
        buffer, start = shelf.place(nbytes, lambda: self._buffer(bucket))
        fill(buffer.bytes[start : start + bucket.nbytes], bucket.pieces)
        return SharedTensor(buffer.memory, torch.uint8, (nbytes,), start)

    def _each(self, bucket: Bucket, shelf: _Shelf) -> tuple[SharedTensor, ...]:
        with closing(read_as_announced(bucket.weights)) as values:
            return tuple(
                self._in_place(value) or self._copied(value, bucket, shelf) for value in values
            )

    def _buffer(self, bucket: Bucket, least: int = 1) -> _Buffer:
        return _Buffer.on(self.device, max(least, self._nbytes, self._size_of(bucket)))

    def _size_of(self, bucket: Bucket) -> int:
        """How large the buffers of a bucket are, at least."""
        if bucket.flat:
            return max(bucket.nbytes, 1)
        if self.device.type == "cuda":
            return _PIECE_BYTES
        return sum(_padded(spec.nbytes) for spec in bucket.specs)

    def _in_place(self, value: torch.Tensor) -> SharedTensor | None:
        """A value that lasts, where it lies; None of one that does not, or cannot be opened."""
        here = value.device == self.device and self.device.type == "cuda" and value.numel()
        if not (here and value.is_contiguous() and is_kept_elsewhere(value)):
            return None
        storage = value.untyped_storage()
        address, memory = self._memories.get(storage, (0, None))
        if memory is None or address != storage.data_ptr():  # new, or filled with other memory
            memory = _shared(storage, self.device)
            self._memories[storage] = storage.data_ptr(), memory
        offset = int(value.storage_offset()) * value.itemsize
        return SharedTensor(memory, value.dtype, tuple(value.shape), offset)

    def _copied(self, value: torch.Tensor, bucket: Bucket, shelf: _Shelf) -> SharedTensor:
        buffer, start = shelf.place(value.nbytes, lambda: self._buffer(bucket, value.nbytes))
        place = buffer.bytes[start : start + value.nbytes].view(value.dtype)
        place.view(value.shape).copy_(value)
        return SharedTensor(buffer.memory, value.dtype, tuple(value.shape), start)


_IN_PLACE = "one handle a tensor: parameters are read where they lie"
_COPIED = "every tensor is copied: ordinary memory of the CPU cannot be opened by others"
_REMEDY = "set a smaller bucket_bytes=, free memory, or use transport='broadcast'"


def _packs_all(_: TensorSpec) -> bool:
    return True


def _packs_none(_: TensorSpec) -> bool:
    return False


def _padded(nbytes: int) -> int:
    return ceil(max(nbytes, 1) / _ALIGNMENT) * _ALIGNMENT


def _numbered(device: torch.device) -> torch.device:
    if device.type != "cuda" or device.index is not None:
        return device
    return torch.device("cuda", torch.cuda.current_device())


def _free(device: torch.device) -> int:
    """Bytes that buffers can still be made of."""
    free = free_bytes(device)
    if free is not None:
        return free
    try:
        files = os.statvfs(_SHARED_FILES)
    except OSError:  # they are elsewhere, or are no files
        return sys.maxsize
    return files.f_bavail * files.f_frsize


def shown(nbytes: int) -> str:
    """A size for people.

    Example:
        >>> shown(3 << 29), shown(5 << 20), shown(1000)
        ('1.5 GiB', '5.0 MiB', '1000 bytes')
    """
    for unit, size in (("GiB", 1 << 30), ("MiB", 1 << 20)):
        if nbytes >= size:
            return f"{nbytes / size:.1f} {unit}"
    return f"{nbytes} bytes"


def check_on_this_host(urls: Sequence[str]) -> None:
    """Raises ConfigurationError for engines whose address is not one of this host's.

    Example:
        >>> check_on_this_host(["http://127.0.0.1:30000"])
    """
    away = [url for url in urls if not _is_here(url)]
    if away:
        raise ConfigurationError(
            f"transport='ipc' needs every engine on this host, and {', '.join(away)} is not",
            engine=away[0],
            engines=away,
            phase="connect",
            remedy="use transport='auto' or 'broadcast'",
        )


def _is_here(url: str) -> bool:
    """Whether a URL leads to an address of this host: those alone can be bound.

    What is no URL of a server has no address; whether it can open memory is tried.
    """
    parts = urlsplit(url)
    if not has_address(url):
        return True
    try:
        found = socket.getaddrinfo(parts.hostname, 0, type=socket.SOCK_DGRAM)
    except OSError as error:
        raise ConfigurationError(
            f"{parts.hostname!r} does not resolve: {error}",
            engine=url,
            phase="connect",
            remedy="check the URL",
        ) from error
    return any(_can_bind(family, address) for family, _, _, _, address in found)


def _can_bind(family: int, address: tuple[object, ...]) -> bool:
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.bind(address)
    except OSError:
        return False
    return True
