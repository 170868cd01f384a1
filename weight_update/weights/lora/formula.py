"""The merge by formula: what adapters do to a weight, in fp32, rounded once."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch

from weight_update.weights.lora.dense import Dense, computed
from weight_update.weights.lora.kernel import add_low_rank
from weight_update.weights.shards.gather import full
from weight_update.weights.specs import TensorSpec, Weight

# Elements that are merged at once: few enough to stay in a cache from the cast to fp32 to the
# cast back, and enough of them to keep all cores busy.
_BLOCK = {"cpu": 1 << 20}
_GPU_BLOCK = 8 << 20

Apply = Callable[[torch.Tensor, int, int], None]
"""Changes an fp32 block that holds some rows (first, last + 1) of the weight."""


class Step(Protocol):
    """What an adapter does to a weight."""

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        """All that it reads."""
        ...

    def load(self) -> Apply:
        """Reads them, and returns what is to be done."""
        ...


@dataclass(frozen=True)
class LowRank:
    """Adds ``scale * b @ a``, or its transpose; of experts, for each of them.

    Attributes:
        a: From the input to the rank.
        b: From the rank to the output.
        scale: As PEFT stores it.
        transposed: Whether the weight's first dimension is the input.
        experts: How many weights a and b are for; None for a weight of two dimensions.
    """

    a: torch.Tensor
    b: torch.Tensor
    scale: float
    transposed: bool = False
    experts: int | None = None

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        """Both factors."""
        return self.a, self.b

    def load(self) -> Product:
        """Left and right factor of the product are views: nothing is computed yet."""
        right, left = full(self.a), full(self.b)
        if self.experts is not None:
            # PEFT has experts outermost in a's rows, and innermost in b's columns.
            right = right.reshape(self.experts, -1, right.shape[-1])
            left = left.reshape(left.shape[0], -1, self.experts).permute(2, 0, 1)
        if self.transposed:
            left, right = right.mT, left.mT
        return Product(left, right, self.scale)


@dataclass(frozen=True)
class Product:
    """What a low rank adds: ``scale * left @ right``, for each expert if there are some."""

    left: torch.Tensor
    right: torch.Tensor
    scale: float

    def __call__(self, block: torch.Tensor, first: int, end: int) -> None:
        """Adds some rows of it to a block."""
        if self.write(block, block, first, end):
            return
        left, right = (factor.to(block) for factor in self._factors(first, end))
        add = block.addmm_ if block.ndim == 2 else block.baddbmm_
        add(left, right, alpha=self.scale)

    def write(self, merged: torch.Tensor, base: torch.Tensor, first: int, end: int) -> bool:
        """Writes some rows of ``base``, changed, to ``merged``; False if it cannot be done so."""
        left, right = (factor.to(merged.device) for factor in self._factors(first, end))
        return add_low_rank(merged, base, left, right, self.scale)

    def _factors(self, first: int, end: int) -> tuple[torch.Tensor, torch.Tensor]:
        right = self.right if self.right.ndim == 2 else self.right[first:end]
        return self.left[first:end], right


@dataclass(frozen=True)
class Magnitude:
    """DoRA: gives every row the length that was trained."""

    magnitude: torch.Tensor

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        """The magnitudes."""
        return (self.magnitude,)

    def load(self) -> Apply:
        """As for every step."""
        magnitude = full(self.magnitude).reshape(-1)

        def stretch(block: torch.Tensor, first: int, end: int) -> None:
            lengths = torch.linalg.vector_norm(block, dim=1)
            block.mul_((magnitude[first:end].to(block) / lengths).unsqueeze(1))

        return stretch


@dataclass(frozen=True)
class Shift:
    """Adds ``scale * shift`` to a bias."""

    shift: torch.Tensor
    scale: float

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        """The shift."""
        return (self.shift,)

    def load(self) -> Apply:
        """As for every step."""
        shift = full(self.shift)

        def add(block: torch.Tensor, first: int, end: int) -> None:
            block.add_(shift[first:end].to(block), alpha=self.scale)

        return add


@dataclass(frozen=True)
class Rows:
    """Replaces some rows: those of tokens that were trained."""

    indices: Sequence[int]
    values: torch.Tensor

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        """The rows."""
        return (self.values,)

    def load(self) -> Apply:
        """As for every step."""
        values = full(self.values)
        indices = torch.tensor(self.indices, device=values.device)

        def replace(block: torch.Tensor, first: int, end: int) -> None:
            inside = (first <= indices) & (indices < end)
            block[indices[inside].to(block.device) - first] = values[inside].to(block)

        return replace


@dataclass(frozen=True)
class Merge:
    """A weight with its adapters merged; nothing is read before it is asked for.

    Attributes:
        base: The weight without them.
        steps: What they do to it, in order.
    """

    base: Dense
    steps: tuple[Step, ...]

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        """What the adapters hold of it."""
        return tuple(tensor for step in self.steps for tensor in step.tensors)

    def weight(self, name: str) -> Weight:
        """It, to be sent."""
        spec = TensorSpec(name, self.base.dtype, self.base.shape)
        weight = computed(spec, (self.base.tensor, *self.tensors), self.read)
        by_rows = not (weight.collective or self.base.packed)
        return replace(weight, rows=self.rows if by_rows else None, into=self.into)

    def read(self) -> torch.Tensor:
        """The merged weight."""
        return self.rows(0, self.base.shape[0])

    def rows(self, first: int, end: int) -> torch.Tensor:
        """Some rows of it."""
        return self._merged(first, end, None)

    def into(self, place: torch.Tensor) -> torch.Tensor:
        """The merged weight, in ``place`` if it fits there."""
        return self._merged(0, self.base.shape[0], place)

    def _merged(self, first: int, end: int, place: torch.Tensor | None) -> torch.Tensor:
        kind = self.base.tensor.device.type
        if torch.is_autocast_enabled(kind):
            with torch.autocast(kind, enabled=False):
                return self._merged(first, end, place)
        with torch.no_grad():
            base = self.base.value()
            changes = [step.load() for step in self.steps]
            merged = place
            if merged is None or not self._fits(merged, base, end - first):
                merged = base.new_empty((end - first, *base.shape[1:]), dtype=self.base.dtype)
            _fill(merged, base, first, changes)
        return merged

    def _fits(self, place: torch.Tensor, base: torch.Tensor, rows: int) -> bool:
        alike = place.dtype == self.base.dtype and place.device == base.device
        return alike and place.shape == (rows, *base.shape[1:])


def _fill(merged: torch.Tensor, base: torch.Tensor, first: int, changes: Sequence[Apply]) -> None:
    """Writes the merged rows from ``first`` on."""
    end = first + len(merged)
    alone = changes[0] if len(changes) == 1 else None
    if not (isinstance(alone, Product) and alone.write(merged, base[first:end], first, end)):
        _fill_in_blocks(merged, base, first, changes)


def _fill_in_blocks(
    merged: torch.Tensor, base: torch.Tensor, first: int, changes: Sequence[Apply]
) -> None:
    """Some rows at a time are cast to fp32, changed, and cast once."""
    exact = torch.promote_types(merged.dtype, torch.float32)
    parts = torch.split(merged, _rows_at_once(merged))
    scratch = parts[0] if merged.dtype == exact else torch.empty_like(parts[0], dtype=exact)
    start = first
    for part in parts:
        block = part if merged.dtype == exact else scratch[: len(part)]
        end = start + len(part)
        block.copy_(base[start:end])
        for change in changes:
            change(block, start, end)
        if block is not part:
            part.copy_(block)
        start = end


def _rows_at_once(weight: torch.Tensor) -> int:
    elements = _BLOCK.get(weight.device.type, _GPU_BLOCK)
    return max(1, elements // max(1, math.prod(weight.shape[1:])))
