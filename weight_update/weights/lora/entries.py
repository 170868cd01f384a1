"""What stands for one layer in the merged model: names, and how each value is made."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn

from weight_update.errors import ConfigurationError
from weight_update.weights.lora.adapters import Steps, steps_of
from weight_update.weights.lora.by_peft import PeftMerge, merged_by_peft
from weight_update.weights.lora.dense import Dense, computed, dense_tensors
from weight_update.weights.lora.formula import Merge
from weight_update.weights.lora.layers import is_tuner_layer, saved_module, tuner_layer
from weight_update.weights.shards.gather import is_shard
from weight_update.weights.specs import TensorSpec, Weight
from weight_update.weights.state import state_of

Changes = frozenset[int]
"""Which adapters' tensors change a tensor, by their place; empty for one sent as it is."""

_REMEDY = "use an adapter that merge_and_unload() takes, or pass a mapping of the weights"
_UNPACK = "dequantise the base model, or push the adapter by itself"


class Entry(NamedTuple):
    """A name of the merged model, and what is sent under it.

    Attributes:
        name: As the bare model has it.
        tensor: The trainer's own tensor: what lies in the same place is tied.
        weight: How the value is made; None for a tensor that is sent as it is.
        changes: What changes it. Tied tensors that do not change alike are torn apart.
    """

    name: str
    tensor: Any
    weight: Weight | None = None
    changes: Changes = Changes()


class Layers:
    """Entries of the layers that are not sent as they are: adapted, trained apart, quantised.

    Args:
        dtype: What the model computes in.
    """

    def __init__(self, dtype: torch.dtype | None) -> None:
        self._dtype = dtype
        self._tried: set[object] = set()

    def entries(self, path: str, module: nn.Module) -> Iterator[Entry]:
        """What stands for a layer in the merged model.

        Args:
            path: Its name there.
            module: The layer, or what PEFT put in its place.

        Raises:
            ConfigurationError: It cannot be merged or unpacked.
        """
        saved, layer = saved_module(module), tuner_layer(module)
        if saved is not None:
            return _saved_entries(path, module, saved)
        return self._unpacked(path, module) if layer is None else self._merged(path, layer)

    def _unpacked(self, path: str, layer: nn.Module) -> Iterator[Entry]:
        for key, dense in self._dense(path, layer).items():
            weight = dense.weight(f"{path}.{key}") if dense.packed else None
            yield Entry(f"{path}.{key}", dense.tensor, weight)

    def _merged(self, path: str, layer: Any) -> Iterator[Entry]:
        base = layer.get_base_layer()
        if any(is_tuner_layer(child) for child in base.modules()):
            raise _unmergeable(path, layer, "its base layer holds adapters of its own")
        tensors = self._dense(path, base)
        for key, dense in tensors.items():
            _refuse_packed(f"{path}.{key}", dense)
        steps = steps_of(layer)
        if steps is None:
            return self._merged_by_peft(path, layer, tensors)
        return _merged_by_formula(path, layer, tensors, steps)

    def _merged_by_peft(self, path: str, layer: Any, tensors: dict[str, Dense]) -> Iterator[Entry]:
        if any(dense.packed for dense in tensors.values()):
            raise _unmergeable(path, layer, "its base is quantised")
        self._try(layer, partial(_refuse_unmergeable, path, layer))
        parameters = list(layer.parameters())
        base = {id(dense.tensor) for dense in tensors.values()}
        changes = _places([tensor for tensor in parameters if id(tensor) not in base])
        merge = PeftMerge(layer)
        for key, dense in tensors.items():
            name = f"{path}.{key}"
            spec = TensorSpec(name, dense.dtype, dense.shape)
            weight = computed(spec, [dense.tensor, *parameters], partial(merge.read, key))
            yield Entry(name, dense.tensor, weight, changes)

    def _dense(self, path: str, layer: nn.Module) -> dict[str, Dense]:
        try:
            tensors = dict(dense_tensors(layer, self._dtype))
            for dense in tensors.values():
                if dense.packed:
                    self._try(layer, dense.value)
        except Exception as error:
            raise ConfigurationError(
                f"{path} ({type(layer).__name__}) is quantised, and cannot be dequantised here: "
                f"{type(error).__name__}: {error}",
                phase="plan",
                remedy=_UNPACK,
            ) from error
        return tensors

    def _try(self, layer: nn.Module, call: Callable[[], object]) -> None:
        """Once for each kind of layer; not where values are elsewhere."""
        tensors = [*layer.parameters(), *layer.buffers()]
        variants = getattr(layer, "lora_variant", {}).values()
        kind = (type(layer), *map(type, variants), *(t.device.type for t in tensors[:1]))
        if kind not in self._tried and not any(t.is_meta or is_shard(t) for t in tensors):
            self._tried.add(kind)
            call()


def _merged_by_formula(
    path: str, layer: Any, tensors: dict[str, Dense], steps: Steps
) -> Iterator[Entry]:
    if missing := steps.keys() - tensors.keys():
        needs = "lora_bias=True needs a bias" if missing == {"bias"} else "of this type needs them"
        reason = f"its base layer has no {', '.join(sorted(missing))}; an adapter with {needs}"
        raise _unmergeable(path, layer, reason)
    for key, dense in tensors.items():
        name = f"{path}.{key}"
        if key in steps:
            merge = Merge(dense, steps[key])
            yield Entry(name, dense.tensor, merge.weight(name), _places(merge.tensors))
        else:
            yield Entry(name, dense.tensor, dense.weight(name) if dense.packed else None)


def _saved_entries(path: str, wrapper: Any, saved: nn.Module) -> Iterator[Entry]:
    """The trained copy, in the place of the original: what is tied to that is torn from it."""
    original = state_of(wrapper.original_module)
    for key, tensor in state_of(saved).items():
        name, place = f"{path}.{key}", original.get(key, tensor)
        if tensor is place or not isinstance(tensor, torch.Tensor):
            yield Entry(name, tensor)
        else:
            yield Entry(name, place, Dense.of(tensor).weight(name), _places([tensor]))


def _refuse_packed(name: str, dense: Dense) -> None:
    tensor = dense.tensor
    if not dense.packed and (not tensor.is_floating_point() or tensor.dtype.itemsize == 1):
        raise ConfigurationError(
            f"{name} is a quantised base ({tensor.dtype}) under an adapter",
            phase="plan",
            remedy=_UNPACK,
        )


def _refuse_unmergeable(path: str, layer: Any) -> None:
    try:
        merged_by_peft(layer)
    except NotImplementedError as error:
        reason = str(error) or "adapters of this type have no merge"
        raise _unmergeable(path, layer, reason) from error
    except Exception as error:
        raise _unmergeable(path, layer, f"{type(error).__name__}: {error}") from error


def _unmergeable(path: str, layer: Any, reason: str) -> ConfigurationError:
    return ConfigurationError(
        f"the adapter of {path!r} ({type(layer).__name__}) cannot be merged: {reason}",
        phase="plan",
        remedy=_REMEDY,
    )


def _places(tensors: Any) -> Changes:
    return Changes(tensor.data_ptr() or id(tensor) for tensor in tensors)
