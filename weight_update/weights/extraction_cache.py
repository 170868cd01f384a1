"""Extraction that does its work again only after the model's tensors changed."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from weight_update.errors import WeightMismatchError
from weight_update.weights.extract import extract_weights, from_state_dict, with_dtype
from weight_update.weights.lora import is_plain
from weight_update.weights.names import bare_name, unwrap
from weight_update.weights.specs import Weight


class ExtractionCache:
    """Extracts weights, and remembers those of the last module.

    A module whose ``state_dict`` holds the same tensors as before costs one walk over it. Models
    with adapters and mappings are extracted anew each time.

    Example:
        >>> cache = ExtractionCache()
        >>> model = nn.Linear(1, 1)
        >>> _ = cache.extract(model)
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
        if self._known is not None and self._known.holds_for(module, dtype):
            return self._known.weights
        self._known = None  # what it refers to may be gone
        known = _Known.of(module, dtype) if is_plain(module) else None
        if known is None or not known.weights or not known.alive():
            return extract_weights(module, dtype=dtype)
        self._known = known
        return known.weights


@dataclass(frozen=True, slots=True)
class _Entry:
    """One tensor of a ``state_dict``, and what its spec was made from.

    The reference is weak: a trainer that replaces its parameters must not hold them twice.
    """

    name: str
    tensor: Callable[[], torch.Tensor | None]
    dtype: torch.dtype
    shape: torch.Size
    stride: tuple[int, ...]
    address: int

    @classmethod
    def of(cls, name: str, tensor: torch.Tensor) -> _Entry:
        reference = weakref.ref(tensor)
        address, stride = tensor.data_ptr(), tensor.stride()
        return cls(name, reference, tensor.dtype, tensor.shape, stride, address)

    def describes(self, name: str, tensor: torch.Tensor) -> bool:
        return (
            tensor is self.tensor()
            and tensor.data_ptr() == self.address
            and tensor.dtype is self.dtype
            and tensor.shape == self.shape
            and tensor.stride() == self.stride
            and name == self.name
        )

    def read(self) -> torch.Tensor:
        tensor = self.tensor()
        if tensor is None:
            raise WeightMismatchError(
                f"{self.name!r} was replaced while an update ran",
                phase="transfer",
                remedy="do not change the model while an update runs",
            )
        return tensor.detach()


@dataclass(frozen=True)
class _Known:
    dtype: torch.dtype | None
    entries: tuple[_Entry, ...]
    weights: tuple[Weight, ...]

    @classmethod
    def of(cls, module: nn.Module, dtype: torch.dtype | None) -> _Known | None:
        state: Mapping[str, Any] = module.state_dict(keep_vars=True)
        if not all(isinstance(value, torch.Tensor) for value in state.values()):
            return None  # extra state has no identity to compare
        entries = tuple(_Entry.of(name, tensor) for name, tensor in state.items())
        by_name = {bare_name(entry.name): entry for entry in entries}
        weakly = (
            Weight(weight.spec, weight.device, by_name[weight.spec.name].read)
            for weight in from_state_dict(state)
        )
        return cls(dtype, entries, tuple(with_dtype(weight, dtype) for weight in weakly))

    def alive(self) -> bool:
        """Whether the tensors are the module's own, and not made for one ``state_dict()``."""
        return all(entry.tensor() is not None for entry in self.entries)

    def holds_for(self, module: nn.Module, dtype: torch.dtype | None) -> bool:
        state = module.state_dict(keep_vars=True)
        return (
            dtype == self.dtype
            and len(state) == len(self.entries)
            and all(map(_Entry.describes, self.entries, state.keys(), state.values()))
        )
