"""The broadcast path: buckets are packed into a buffer and broadcast to all engines at once."""

from __future__ import annotations

import torch

from weight_update.errors import WeightMismatchError
from weight_update.weights.buckets import Bucket, Plan
from weight_update.weights.specs import Weight

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
        flat: One byte buffer a bucket, or one tensor a weight for engines that take no
            flattened buckets.
    """

    def __init__(self, device: torch.device, *, flat: bool) -> None:
        self.device = device
        self.flat = flat
        self._buffers = [torch.empty(0, dtype=torch.uint8, device=device) for _ in range(2)]
        self._turn = 0

    def objections(self, plan: Plan) -> list[str]:
        """Why some tensors cannot travel one by one; as bytes in a flat bucket, all can."""
        if self.flat or self.device.type != "cpu":
            return []
        specs = (spec for bucket in plan.buckets for spec in bucket.specs)
        return [
            f"{spec.name!r} is {spec.dtype_name}, which gloo cannot broadcast; use "
            "load_format='flattened_bucket'"
            for spec in specs
            if spec.dtype not in _GLOO_DTYPES
        ]

    @torch.no_grad()
    def pack(self, bucket: Bucket) -> list[torch.Tensor]:
        """The tensors to broadcast for ``bucket``, in order.

        Raises:
            WeightMismatchError: A value has another dtype or shape than was announced.
        """
        if not self.flat:
            return [_read(weight).to(self.device).contiguous() for weight in bucket.weights]
        buffer = self._next_buffer(bucket.nbytes)
        offset = 0
        for weight in bucket.weights:
            end = offset + weight.spec.nbytes
            place = buffer[offset:end].view(weight.spec.dtype).view(weight.spec.shape)
            place.copy_(_read(weight))
            offset = end
        return [buffer]

    def release(self) -> None:
        """Frees the buffers."""
        self._buffers = [buffer.new_empty(0) for buffer in self._buffers]

    def _next_buffer(self, nbytes: int) -> torch.Tensor:
        self._turn = 1 - self._turn
        if self._buffers[self._turn].numel() < nbytes:
            self._buffers[self._turn] = torch.empty(nbytes, dtype=torch.uint8, device=self.device)
        return self._buffers[self._turn][:nbytes]


def _read(weight: Weight) -> torch.Tensor:
    tensor = weight.read().resolve_conj().resolve_neg()
    if tensor.dtype != weight.spec.dtype or tuple(tensor.shape) != weight.spec.shape:
        raise WeightMismatchError(
            f"{weight.spec.name!r} was announced as {weight.spec.dtype} {weight.spec.shape} and is "
            f"{tensor.dtype} {tuple(tensor.shape)} now",
            phase="transfer",
            remedy="do not change the model while an update runs",
        )
    return tensor
