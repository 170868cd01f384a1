"""Extraction that does its work again only after the model's tensors changed."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from weight_update.errors import WeightMismatchError
from weight_update.weights.extract import extract_weights, from_state_dict
from weight_update.weights.families.convert import Converter
from weight_update.weights.fitting import with_dtype
from weight_update.weights.lora.merge import is_plain, merges_itself
from weight_update.weights.names import bare_name, unwrap
from weight_update.weights.shards.gather import is_shard
from weight_update.weights.shards.wrapped import is_wrapped
from weight_update.weights.specs import TensorSpec, Weight


class ExtractionCache:
    """Extracts weights, and remembers what it found out about the last module.

    A module whose ``state_dict`` has the same names, dtypes, shapes and places in memory as
    before costs one walk over it. No tensor of a module is referred to between updates: a trainer
    may replace, swap and free its tensors as if nobody had looked at them. Models with adapters,
    sharded ones and mappings are extracted anew each time.

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
        if merges_itself(module) or is_wrapped(module):
            return extract_weights(module, dtype=dtype)
        state = module.state_dict(keep_vars=True)
        if self._known is None or not self._known.holds_for(state):
            self._known = _known(module, state)
        if self._known is None:
            return extract_weights(module, dtype=dtype)
        weights = self._known.weights(state.values())
        return weights if dtype is None else tuple(with_dtype(each, dtype) for each in weights)


class _Owned:
    """A tensor, by the module that owns it.

    No tensor is referred to, not even weakly: ``torch.utils.swap_tensors`` refuses that.
    """

    def __init__(self, owner: nn.Module, key: str) -> None:
        self._owner = weakref.ref(owner)
        self._key = key

    def is_still(self, tensor: object) -> bool:
        return getattr(self._owner(), self._key, None) is tensor

    def read(self) -> torch.Tensor:
        owner = self._owner()
        if owner is None:
            raise WeightMismatchError(f"the module that owns {self._key!r} is gone", phase="plan")
        tensor: torch.Tensor = getattr(owner, self._key)
        return tensor.detach()

    def rows(self, first: int, end: int) -> torch.Tensor:
        return self.read()[first:end]


@dataclass(frozen=True, slots=True)
class _Sent:
    """What is sent for one entry of a ``state_dict``.

    Attributes:
        spec: The entry's own; None where it travels in another form, or not at all.
        device: Where it lives.
        parts: Weights made from it.
        owned: The tensor that they are made from.
    """

    spec: TensorSpec | None
    device: torch.device
    parts: tuple[Weight, ...] = ()
    owned: _Owned | None = None


@dataclass(frozen=True)
class _Known:
    """A ``state_dict``, and all that its specs and its ties were made from."""

    names: tuple[str, ...]
    places: tuple[object, ...]
    sent: tuple[_Sent, ...]

    def holds_for(self, state: Mapping[str, Any]) -> bool:
        if self.names != tuple(state) or not all(
            isinstance(v, torch.Tensor) for v in state.values()
        ):
            return False
        return self.places == _places(state.values()) and all(
            sent.owned is None or sent.owned.is_still(value)
            for sent, value in zip(self.sent, state.values(), strict=True)
        )

    def weights(self, values: Iterable[torch.Tensor]) -> tuple[Weight, ...]:
        found: list[Weight] = []
        for sent, value in zip(self.sent, values, strict=True):
            if sent.spec is not None:
                found.append(Weight(sent.spec, sent.device, value.detach))
            elif sent.parts:
                found.extend(sent.parts)
        return tuple(found)


def _places(values: Iterable[torch.Tensor]) -> tuple[object, ...]:
    return tuple([(v.data_ptr(), type(v), v.dtype, v.shape, v.stride(), v.device) for v in values])


def _known(module: nn.Module, state: Mapping[str, Any]) -> _Known | None:
    """What to remember; None where names and places in memory do not tell all."""
    names = {bare_name(name) for name in state}
    tensors = all(type(v) in _PLAIN and not is_shard(v) for v in state.values())
    if not state or not tensors or len(names) < len(state) or not is_plain(module):
        return None
    bare = {weight.spec.name: weight for weight in from_state_dict(state)}
    convert = Converter(module, hold=False)  # all values are views
    sent = []
    for name, value in state.items():
        found = _sent(module, name, value, bare.get(bare_name(name)), convert)
        if found is None:
            return None
        sent.append(found)
    return _Known(tuple(state), _places(state.values()), tuple(sent))


def _sent(
    module: nn.Module, name: str, value: torch.Tensor, weight: Weight | None, convert: Converter
) -> _Sent | None:
    """None where the tensor is not where its name says."""
    if weight is None:  # tied to another
        return _Sent(None, value.device)
    path, _, key = name.rpartition(".")
    owned = _Owned(module.get_submodule(path), key)
    parts = tuple(convert(replace(weight, read=owned.read, rows=owned.rows)))
    if not parts:
        return _Sent(None, value.device)
    if len(parts) == 1 and parts[0].read == owned.read:
        return _Sent(parts[0].spec, value.device)
    return _Sent(None, value.device, parts, owned) if owned.is_still(value) else None


# Of these, place in memory and strides tell all; a sub-class may hold what they do not show.
_PLAIN = frozenset({torch.Tensor, nn.Parameter, nn.Buffer})
