"""The broadcast path: buckets are packed into a buffer and broadcast to all engines at once."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing

import torch

from weight_update.options import LoadFormat
from weight_update.transports.packing import SideStream, fill, read_as_announced
from weight_update.transports.sizing import free_bytes, nccl_format
from weight_update.weights.buckets import DEFAULT_BUCKET_BYTES, Bucket, Plan
from weight_update.weights.cargo import Cargo, Format, Terms
from weight_update.weights.growing_plan import GrowingPlan
from weight_update.weights.specs import TensorSpec

# Over gloo, broadcasts of 3 MB each cost less than a copy into a buffer, and those of 50 kB far
# more; the seam between them was not measured. Over NCCL the copy is hidden behind the wire.
_SEPARATE_BYTES = 1 << 20
_GLOO_DTYPES = frozenset(
    {
        *(torch.float32, torch.float64, torch.float16, torch.bfloat16),
        *(torch.uint8, torch.int8, torch.int32, torch.int64, torch.bool),
        *(torch.complex64, torch.complex128),
    }
)


class BucketPacker:
    """Packs buckets for the wire, alternating between two buffers that are kept.

    While one bucket travels, the next is packed into the other buffer. On a GPU the host waits for
    none of it: a bucket is packed behind the one that left from its buffer, since the group has the
    caller's stream wait for that before it sends the one between them.

    Args:
        device: Device of the buffers.
        load_format: ``flattened_bucket`` packs every tensor, ``tensors`` none. ``auto`` packs
            those that are better packed.
    """

    def __init__(self, device: torch.device, load_format: LoadFormat = "auto") -> None:
        self.device = device
        self._load_format = load_format
        self._stream = SideStream(device)
        self._buffers = [torch.empty(0, dtype=torch.uint8, device=device) for _ in range(2)]
        self._turn = 0
        self._nbytes = 0

    def format(self, specs: Sequence[TensorSpec] | None, terms: Terms) -> Format:
        """Over NCCL what costs less; over gloo buckets of the size that pays on a CPU."""
        if self.device.type == "cuda":
            own = sum(buffer.numel() for buffer in self._buffers)  # they are used again
            return nccl_format(specs, terms, self._load_format, free_bytes(self.device, own))
        size = terms.bucket_bytes or DEFAULT_BUCKET_BYTES[self.device.type]
        return Format(size, self._packs)

    def _packs(self, spec: TensorSpec) -> bool:
        if self._load_format != "auto":
            return self._load_format == "flattened_bucket"
        large = spec.nbytes >= _SEPARATE_BYTES and spec.dtype in _GLOO_DTYPES
        return not (large and self.device.type == "cpu")

    def objections(self, plan: Plan | GrowingPlan) -> list[str]:
        """Why some tensors cannot travel one by one; as bytes in a flat bucket, all can."""
        if self.device.type != "cpu":
            return []
        specs = (spec for bucket in plan.buckets if not bucket.flat for spec in bucket.specs)
        return [
            f"{spec.name!r} is {spec.dtype_name}, which gloo cannot broadcast; use "
            "load_format='auto'"
            for spec in specs
            if spec.dtype not in _GLOO_DTYPES
        ]

    def reserve(self, plan: Plan | GrowingPlan) -> None:
        """Learns how large the buffers must be; they are made when they are first used."""
        self._nbytes = max((b.nbytes for b in plan.buckets if b.flat), default=0)

    @torch.no_grad()
    def pack(self, bucket: Bucket) -> Cargo:
        """The tensors to broadcast for ``bucket``, in order; the caller's stream has them.

        Raises:
            WeightMismatchError: A value has another dtype or shape than was announced.
        """
        queued = self.device.type == "cuda"
        with self._stream.running():
            if bucket.flat:
                buffer = self._next_buffer(bucket.nbytes)
                fill(buffer, bucket.pieces)
                return Cargo([buffer], queued=queued)
            with closing(read_as_announced(bucket.weights)) as values:
                tensors = [value.to(self.device).contiguous() for value in values]
                return Cargo(tensors, queued=queued)

    def abandon(self) -> None:
        """Leaves the buffers to a pack that does not end; later ones get others."""
        self._buffers = [buffer.new_empty(0) for buffer in self._buffers]

    def _next_buffer(self, nbytes: int) -> torch.Tensor:
        self._turn = 1 - self._turn
        kept = self._buffers[self._turn]
        if kept.numel() < nbytes:
            self._buffers[self._turn] = kept = kept.new_empty(0)  # frees before it allocates
            self._buffers[self._turn] = kept = kept.new_empty(max(nbytes, self._nbytes))
        return kept[:nbytes]
