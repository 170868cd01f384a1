"""Extraction that does its work again only after the model's tensors changed."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import nn

from weight_update.weights.extract import extract_weights, from_state_dict, with_dtype
from weight_update.weights.lora.merge import is_plain, merges_itself
from weight_update.weights.names import bare_name, unwrap
from weight_update.weights.specs import TensorSpec, Weight


class ExtractionCache:
    """Extracts weights, and remembers what it found out about the last module.

    A module whose ``state_dict`` has the same names, dtypes, shapes and places in memory as
    before costs one walk over it. Nothing of a module is referred to between updates: a trainer
    may replace, swap and free its tensors as if nobody had looked at them. Models with adapters
    and mappings are extracted anew each time.

    Example:
        >>> cache = ExtractionCache()
        >>> [weight.spec.name for weight in cache.extract(nn.Linear(1, 1))]
        ['weight', 'bias']
    """

    def __init__(self) -> None:
        self._known: _Known | None = None

    def extract(self, source: Any, *, dtype: torch.dtype | None = None) -> tuple[Weight, ...]:
        """As :func:`extract_weights`."""
        if not isinstance(source, nn.Module):
            return extract_weights(source, dtype=dtype)
        module = unwrap(source)
        if merges_itself(module):
            return extract_weights(module, dtype=dtype)
        state = module.state_dict(keep_vars=True)
        if self._known is None or not self._known.holds_for(state.items()):
            self._known = _Known.of(module, state)
        if self._known is None:
            return extract_weights(module, dtype=dtype)
        weights = self._known.weights(state.values())
        return weights if dtype is None else tuple(with_dtype(each, dtype) for each in weights)


@dataclass(frozen=True, slots=True)
class _Entry:
    """One entry of a ``state_dict``, and all that its spec and its ties were made from.

    Attributes:
        spec: What is sent for it; None for a tensor that travels under another name.
    """

    spec: TensorSpec | None
    name: str
    kind: type
    dtype: torch.dtype
    device: torch.device
    shape: torch.Size
    stride: tuple[int, ...]
    address: int

    @classmethod
    def of(cls, name: str, tensor: torch.Tensor, spec: TensorSpec | None) -> _Entry:
        place = (tensor.dtype, tensor.device, tensor.shape, tensor.stride(), tensor.data_ptr())
        return cls(spec, name, type(tensor), *place)

    def describes(self, name: str, value: object) -> bool:
        if type(value) is not self.kind:
            return False
        tensor = cast("torch.Tensor", value)
        return (
            tensor.data_ptr() == self.address
            and tensor.dtype is self.dtype
            and tensor.shape == self.shape
            and tensor.stride() == self.stride
            and tensor.device == self.device
            and name == self.name
        )


@dataclass(frozen=True)
class _Known:
    entries: tuple[_Entry, ...]

    @classmethod
    def of(cls, module: nn.Module, state: dict[str, Any]) -> _Known | None:
        """What to remember; None where names and places in memory do not tell all."""
        names = {bare_name(name) for name in state}
        tensors = all(type(value) in _PLAIN for value in state.values())
        if not state or not tensors or len(names) < len(state) or not is_plain(module):
            return None
        sent = {weight.spec.name: weight.spec for weight in from_state_dict(state)}
        return cls(
            tuple(
                _Entry.of(name, value, sent.get(bare_name(name))) for name, value in state.items()
            )
        )

    def holds_for(self, items: Iterable[tuple[str, Any]]) -> bool:
        found = tuple(items)
        return len(found) == len(self.entries) and all(
            entry.describes(name, value)
            for entry, (name, value) in zip(self.entries, found, strict=True)
        )

    def weights(self, values: Iterable[Any]) -> tuple[Weight, ...]:
        return tuple(
            [
                Weight(entry.spec, entry.device, value.detach)
                for entry, value in zip(self.entries, values, strict=True)
                if entry.spec is not None
            ]
        )


# Of these, place in memory and strides tell all; a sub-class may hold what they do not show.
_PLAIN = frozenset({torch.Tensor, nn.Parameter, nn.Buffer})
