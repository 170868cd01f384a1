"""Extraction that does its work again only after the model's tensors changed."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from weight_update.errors import WeightMismatchError
from weight_update.weights.extract import extract_weights, from_state_dict, with_dtype
from weight_update.weights.lora import is_plain
from weight_update.weights.module_tree import Signature, flatten, has_plain_state_dict
from weight_update.weights.names import bare_name, unwrap
from weight_update.weights.specs import Weight


class ExtractionCache:
    """Extracts weights, and remembers those of the last module.

    A module that has the same tensors under the same names as before costs one walk over it.
    Models with adapters, or with a ``state_dict`` of their own making, and mappings are extracted
    anew each time.

    Example:
        >>> cache = ExtractionCache()
        >>> model = nn.Linear(1, 1)
        >>> cache.extract(model) is cache.extract(model)
        True
    """

    def __init__(self) -> None:
        self._known: _Known | None = None

    def extract(self, source: Any, *, dtype: torch.dtype | None = None) -> tuple[Weight, ...]:
        """As :func:`extract_weights`."""
        if not isinstance(source, nn.Module):
            return extract_weights(source, dtype=dtype)
        module = unwrap(source)
        if self._known is None or not self._known.holds_for(module, dtype):
            plain = is_plain(module) and has_plain_state_dict(module)
            self._known = _Known.of(module, dtype) if plain else None
        return extract_weights(module, dtype=dtype) if self._known is None else self._known.weights


@dataclass(frozen=True, slots=True)
class _Entry:
    """One tensor of a module, and what its spec was made from.

    The reference is weak: a trainer that replaces its parameters must not hold them twice.
    """

    tensor: Callable[[], torch.Tensor | None]
    dtype: torch.dtype
    shape: torch.Size
    stride: tuple[int, ...]
    address: int

    @classmethod
    def of(cls, tensor: torch.Tensor) -> _Entry:
        address, stride = tensor.data_ptr(), tensor.stride()
        return cls(weakref.ref(tensor), tensor.dtype, tensor.shape, stride, address)

    def read(self) -> torch.Tensor:
        tensor = self.tensor()
        if tensor is None:
            raise WeightMismatchError(
                f"a weight of shape {tuple(self.shape)} was replaced while an update ran",
                phase="transfer",
                remedy="do not change the model while an update runs",
            )
        return tensor.detach()


def _is_as_before(entry: _Entry | None, tensor: torch.Tensor | None) -> bool:
    if entry is None or tensor is None:
        return entry is None and tensor is None
    return (
        tensor is entry.tensor()
        and tensor.data_ptr() == entry.address
        and tensor.dtype is entry.dtype
        and tensor.shape == entry.shape
        and tensor.stride() == entry.stride
    )


@dataclass(frozen=True)
class _Known:
    dtype: torch.dtype | None
    signature: Signature
    entries: tuple[_Entry | None, ...]
    weights: tuple[Weight, ...]

    @classmethod
    def of(cls, module: nn.Module, dtype: torch.dtype | None) -> _Known | None:
        """What to remember of a module; None if it has no weights, or not all are tensors."""
        state = module.state_dict(keep_vars=True)
        signature, tensors = flatten(module)
        entries = tuple(None if tensor is None else _Entry.of(tensor) for tensor in tensors)
        own = {id(tensor): entry for tensor, entry in zip(tensors, entries, strict=True)}
        by_name = {bare_name(name): own.get(id(tensor)) for name, tensor in state.items()}
        if not by_name or None in by_name.values():
            return None
        weakly = tuple(
            with_dtype(Weight(weight.spec, weight.device, entry.read), dtype)
            for weight in from_state_dict(state)
            if (entry := by_name[weight.spec.name]) is not None
        )
        return cls(dtype, signature, entries, weakly)

    def holds_for(self, module: nn.Module, dtype: torch.dtype | None) -> bool:
        signature, tensors = flatten(module)
        return (
            dtype == self.dtype
            and signature == self.signature
            and all(map(_is_as_before, self.entries, tensors))
        )
