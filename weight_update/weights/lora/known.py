"""What is remembered of a model with adapters, so that it is not walked anew at every update."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from weight_update.torch_private.modules import own_tensors, saves_its_tensors
from weight_update.weights.extract import merged_weights
from weight_update.weights.families.convert import Converter
from weight_update.weights.lora.dense import Dense
from weight_update.weights.lora.formula import LowRank, Merge
from weight_update.weights.lora.layers import (
    base_model,
    is_tuner_layer,
    saved_module,
    tuner_layer,
)
from weight_update.weights.lora.merge import adapter_model
from weight_update.weights.marks import Marks
from weight_update.weights.owned import ORDINARY, Owned
from weight_update.weights.shards.gather import is_shard
from weight_update.weights.shards.wrapped import is_gathered, is_wrapped
from weight_update.weights.specs import Lasting, TensorSpec, Weight

_LAYERS = "peft.tuners.lora.layer"


class _OutOfTheOrdinary(Exception):
    """The model has something that the marks do not show."""


@dataclass(frozen=True)
class KnownAdapted:
    """A model with adapters that was extracted.

    Attributes:
        module: Itself.
        marks: Of the model that it adapts.
        layers: Those with adapters.
        adapters: What each of them does with its adapters.
        weights: What is sent, read from whoever owns it.
    """

    module: Callable[[], nn.Module | None]
    marks: Marks
    layers: tuple[Callable[[], nn.Module | None], ...]
    adapters: list[object]
    weights: tuple[Weight, ...]

    def holds_for(self, module: nn.Module) -> bool:
        """Whether the module is the same, and would be extracted alike."""
        return (
            self.module() is module
            and self.marks.hold_for(base_model(module))
            and _adapters(layer() for layer in self.layers) == self.adapters
        )


def known_adapted(module: nn.Module) -> KnownAdapted | None:
    """What to remember; None of a model whose marks do not tell all, or without adapters.

    Remembered are models with LoRA alone, of one kind or several, on layers that are neither
    quantised nor sharded.
    """
    if is_wrapped(module) or is_gathered(module):
        return None
    base = adapter_model(module)
    if base is None or not all(map(_is_ordinary, base.modules())):
        return None
    owners = {
        id(tensor): Owned(module, key)
        for module, key, tensor in own_tensors(base.modules())
        if _shows_its_place(tensor)
    }
    convert = Converter(base, hold=False)  # no stack of experts is among those that are merged
    try:
        weights = [_by_owner(weight, owners) for weight in merged_weights(base)]
    except _OutOfTheOrdinary:
        return None
    sent = Lasting(part for weight in weights for part in convert(weight))
    layers = [part for part in base.modules() if is_tuner_layer(part)]
    refs = tuple(weakref.ref(layer) for layer in layers)
    return KnownAdapted(weakref.ref(module), Marks.of(base), refs, _adapters(layers), sent)


def _adapters(layers: Iterable[Any]) -> list[object]:
    return [
        (
            layer.disable_adapters,
            tuple(layer.active_adapters),
            tuple(layer.merged_adapters),
            tuple(layer.scaling.items()),
            tuple(getattr(layer, "lora_variant", ())),
        )
        for layer in layers
    ]


def _shows_its_place(tensor: torch.Tensor) -> bool:
    ordinary = type(tensor) in ORDINARY and tensor.layout is torch.strided
    return ordinary and not is_shard(tensor)


def _is_ordinary(module: nn.Module) -> bool:
    """Whether its marks would show all that changes what is sent for it."""
    if not saves_its_tensors(module):
        return False
    if is_tuner_layer(module):
        return type(module).__module__ == _LAYERS
    return saved_module(module) is None and tuner_layer(module) is None


def _by_owner(weight: Weight, owners: Mapping[int, Owned]) -> Weight:
    source = getattr(weight.read, "__self__", None)
    if isinstance(source, torch.Tensor):
        own = _owner(source, owners)
        return replace(weight, read=own.read, rows=own.rows if weight.spec.shape else None)
    if not isinstance(source, Merge) or source.base.packed or len(weight.spec.shape) > 2:
        raise _OutOfTheOrdinary
    later = _Later.of(source, weight.spec, owners)
    return replace(weight, read=later.read, rows=later.rows, into=later.into)


@dataclass(frozen=True)
class _Later:
    """A merge of tensors that are asked of their owners when it is done."""

    base: Owned
    spec: TensorSpec
    steps: tuple[tuple[LowRank, Owned, Owned], ...]

    @classmethod
    def of(cls, merge: Merge, spec: TensorSpec, owners: Mapping[int, Owned]) -> _Later:
        nothing = torch.empty(0)  # no tensor of the model is kept
        steps = []
        for step in merge.steps:
            if not isinstance(step, LowRank):
                raise _OutOfTheOrdinary
            a, b = _owner(step.a, owners), _owner(step.b, owners)
            steps.append((replace(step, a=nothing, b=nothing), a, b))
        return cls(_owner(merge.base.tensor, owners), spec, tuple(steps))

    def read(self) -> torch.Tensor:
        return self._merge().read()

    def rows(self, first: int, end: int) -> torch.Tensor:
        return self._merge().rows(first, end)

    def into(self, place: torch.Tensor) -> torch.Tensor:
        return self._merge().into(place)

    def _merge(self) -> Merge:
        base = self.base.read()
        dense = Dense(base, self.spec.dtype, self.spec.shape, base.detach)
        return Merge(
            dense,
            tuple(
                LowRank(a.read(), b.read(), step.scale, step.transposed, step.experts)
                for step, a, b in self.steps
            ),
        )


def _owner(tensor: torch.Tensor, owners: Mapping[int, Owned]) -> Owned:
    if id(tensor) not in owners:
        raise _OutOfTheOrdinary
    return owners[id(tensor)]
