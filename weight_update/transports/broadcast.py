"""The broadcast path: buckets are packed into a buffer and broadcast to all engines at once."""

from __future__ import annotations

import torch

from weight_update.errors import WeightMismatchError
from weight_update.weights.buckets import Bucket
from weight_update.weights.specs import Weight


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
    tensor = weight.read()
    if tensor.dtype != weight.spec.dtype or tuple(tensor.shape) != weight.spec.shape:
        raise WeightMismatchError(
            f"{weight.spec.name!r} was announced as {weight.spec.dtype} {weight.spec.shape} and is "
            f"{tensor.dtype} {tuple(tensor.shape)} now",
            phase="transfer",
            remedy="do not change the model while an update runs",
        )
    return tensor
