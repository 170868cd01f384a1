"""Sums that tell tensors apart without moving them: for models too large to digest on a CPU."""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache

import torch

# Elements that are summed at a time: their weights and products take as many int64 each.
_CHUNK = 1 << 22
_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_STEP = 0x9E3779B97F4A7C15
_MODULUS = 1 << 64


def positional_sums(tensors: Iterable[torch.Tensor]) -> list[int]:
    """Return a number for each tensor, made of the bits of all elements and of their places.

    One element that differs always changes it; several do but for one case in 2**64. The
    numbers are computed where the tensors are, and fetched together.

    Example:
        >>> a, b = torch.tensor([1.0, 2.0]), torch.tensor([2.0, 1.0])
        >>> first, second, third = positional_sums([a, b, a.clone()])
        >>> first == third, first == second
        (True, False)
    """
    parts: list[torch.Tensor] = []
    counts: list[int] = []
    for tensor in tensors:
        sums = _parts(tensor)
        parts += sums
        counts.append(len(sums))
    values = iter(torch.stack(parts).tolist() if parts else [])
    return [_joined([next(values) for _ in range(count)]) for count in counts]


def _parts(tensor: torch.Tensor) -> list[torch.Tensor]:
    """Return one sum a chunk, modulo 2**64, each still on the tensor's device."""
    bits = tensor.detach().contiguous().view(-1).view(_BITS[tensor.dtype.itemsize])
    weights = _weights(tensor.device)
    return [(chunk * weights[: chunk.numel()]).sum() for chunk in torch.split(bits, _CHUNK)]


@lru_cache(maxsize=8)
def _weights(device: torch.device) -> torch.Tensor:
    """Return odd numbers without a pattern, one for each place in a chunk."""
    places = torch.arange(1, _CHUNK + 1, device=device)
    step = _STEP - _MODULUS  # the same number as a signed one
    mixed = places * step
    mixed = (mixed ^ (mixed >> 29)) * step
    return (mixed ^ (mixed >> 32)) | 1


def _joined(sums: list[int]) -> int:
    total = 0
    for value in sums:
        total = (total * _STEP + value) % _MODULUS
    return total
