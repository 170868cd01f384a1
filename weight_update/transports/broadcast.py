"""The broadcast path: buckets are packed into a buffer and broadcast to all engines at once."""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from contextlib import closing
from itertools import islice

import torch

from weight_update.errors import WeightMismatchError
from weight_update.options import LoadFormat
from weight_update.weights.buckets import Bucket, Plan
from weight_update.weights.growing_plan import GrowingPlan
from weight_update.weights.reading import read_in_turn
from weight_update.weights.specs import TensorSpec, Weight

# Thousands of small tensors cost a call each, on the CPU as on the GPU, so they are written in
# runs; a run's values exist together, which bounds what merged weights may take.
_RUN_BYTES = 4 << 20
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

    While one bucket travels, the next is packed into the other buffer.

    Args:
        device: Device of the buffers.
        load_format: ``flattened_bucket`` packs every tensor, ``tensors`` none. ``auto`` packs
            those that are better packed.
    """

    def __init__(self, device: torch.device, load_format: LoadFormat = "auto") -> None:
        self.device = device
        self._load_format = load_format
        self._buffers = [torch.empty(0, dtype=torch.uint8, device=device) for _ in range(2)]
        self._turn = 0
        self._nbytes = 0

    def packs(self, spec: TensorSpec) -> bool:
        """Whether a tensor travels in a flat bucket."""
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
    def pack(self, bucket: Bucket) -> list[torch.Tensor]:
        """The tensors to broadcast for ``bucket``, in order.

        Raises:
            WeightMismatchError: A value has another dtype or shape than was announced.
        """
        with closing(_values(bucket.weights)) as values:
            if not bucket.flat:
                return [value.to(self.device).contiguous() for value in values]
            buffer = self._next_buffer(bucket.nbytes)
            offset = 0
            for run in _runs(bucket.weights):
                end = offset + sum(weight.spec.nbytes for weight in run)
                _fill(buffer[offset:end].view(run[0].spec.dtype), run, values)
                offset = end
            return [buffer]

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


def _runs(weights: Sequence[Weight]) -> Iterator[list[Weight]]:
    """Neighbours that are written by one call: of one dtype, and together small."""
    run: list[Weight] = []
    size = 0
    for weight in weights:
        nbytes = weight.spec.nbytes
        if run and (weight.spec.dtype != run[0].spec.dtype or size + nbytes > _RUN_BYTES):
            yield run
            run, size = [], 0
        run.append(weight)
        size += nbytes
    if run:
        yield run


def _fill(place: torch.Tensor, run: list[Weight], values: Generator[torch.Tensor]) -> None:
    if len(run) > 1 and {weight.device for weight in run} == {place.device}:
        torch.cat([value.reshape(-1) for value in islice(values, len(run))], out=place)
        return
    start = 0
    for _ in run:
        start += _write(place[start:], next(values))


def _write(place: torch.Tensor, value: torch.Tensor) -> int:
    place[: value.numel()].view(value.shape).copy_(value)
    return value.numel()


def _values(weights: Sequence[Weight]) -> Generator[torch.Tensor]:
    # No name holds a value while the next is read: merged ones would exist twice.
    with closing(read_in_turn(weights)) as values:
        for weight in weights:
            yield _checked(weight, next(values))


def _checked(weight: Weight, value: torch.Tensor) -> torch.Tensor:
    tensor = value.resolve_conj().resolve_neg()
    if tensor.dtype != weight.spec.dtype or tensor.shape != weight.spec.shape:
        raise WeightMismatchError(
            f"{weight.spec.name!r} was announced as {weight.spec.dtype} {weight.spec.shape} and is "
            f"{tensor.dtype} {tuple(tensor.shape)} now",
            phase="transfer",
            remedy="do not change the model while an update runs",
        )
    return tensor
