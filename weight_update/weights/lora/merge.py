"""Adapters merged, and quantised layers unpacked: a model's weights as a plain model has them."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn

from weight_update.errors import ConfigurationError
from weight_update.weights.lora.adapters import Steps, steps_of
from weight_update.weights.lora.by_peft import PeftMerge, merged_by_peft
from weight_update.weights.lora.dense import Dense, dense_tensors, is_packed
from weight_update.weights.lora.formula import Merge
from weight_update.weights.lora.layers import (
    base_model,
    is_tuner_layer,
    nested,
    saved_module,
    tuner_layer,
)
from weight_update.weights.names import bare_name
from weight_update.weights.shards.gather import is_shard
from weight_update.weights.specs import TensorSpec, Weight

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


def adapter_model(module: nn.Module) -> nn.Module | None:
    """The model whose weights `merged_tensors` gives, adapters in place; None for a plain one.

    Raises:
        ConfigurationError: Its adapters are no change of its weights.
    """
    base = base_model(module)
    if base is not module or any(_is_replaced(child) for child in module.modules()):
        return base
    return None


def is_plain(module: nn.Module) -> bool:
    """Whether the module's own tensors are what it computes with: no adapters, not quantised."""
    return adapter_model(module) is None and not merges_itself(module)


def merged_copy(module: nn.Module) -> nn.Module:
    """``module``, or a merged copy of one whose adapters are not PEFT's but can be merged.

    Only the foreign model knows how it merges, so here (and only here) the whole model is
    copied for the time of an update.
    """
    if not merges_itself(module):
        return module
    logging.getLogger("weight_update").warning(
        "%s merges adapters of its own: the whole model is copied for each update",
        type(module).__name__,
    )
    foreign: Any = copy.deepcopy(module)
    merged = foreign.merge_and_unload()
    if not isinstance(merged, nn.Module):
        raise ConfigurationError(
            f"{type(module).__name__}.merge_and_unload() returned no module", phase="plan"
        )
    return merged


def merges_itself(module: nn.Module) -> bool:
    """Whether the module has a ``merge_and_unload`` of its own."""
    return callable(getattr(module, "merge_and_unload", None))


def merged_tensors(base: nn.Module) -> Iterator[Entry]:
    """The entries of the merged model's ``state_dict``, in the base model's order.

    Nothing of the model is copied before a value is read, except that one layer of each kind is
    tried whose merge, or whose packing, only another library knows: what fails must fail before
    an engine is paused.

    Raises:
        ConfigurationError: A layer cannot be merged or unpacked.
    """
    replaced = {bare_name(path): module for path, module in _replaced_modules(base)}
    layers = _Layers(getattr(getattr(base, "config", None), "dtype", None))
    done: set[str] = set()
    for name, tensor in base.state_dict(keep_vars=True).items():
        path = _owner(bare_name(name), replaced)
        if path is None:
            yield Entry(bare_name(name), tensor)
        elif path not in done:
            done.add(path)
            yield from layers.entries(path, replaced[path])


class _Layers:
    """Entries of layers that are not sent as they are.

    Args:
        dtype: What the model computes in.
    """

    def __init__(self, dtype: torch.dtype | None) -> None:
        self._dtype = dtype
        self._tried: set[object] = set()

    def entries(self, path: str, module: nn.Module) -> Iterator[Entry]:
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

    def _merged_by_peft(
        self, path: str, layer: Any, tensors: dict[str, Dense]
    ) -> Iterator[Entry]:
        if any(dense.packed for dense in tensors.values()):
            raise _unmergeable(path, layer, "its base is quantised")
        self._try(layer, partial(_refuse_unmergeable, path, layer))
        parameters = list(layer.parameters())
        base = {id(dense.tensor) for dense in tensors.values()}
        changes = _places([tensor for tensor in parameters if id(tensor) not in base])
        merge = PeftMerge(layer)
        collective = any(map(is_shard, parameters))
        for key, dense in tensors.items():
            name = f"{path}.{key}"
            spec = TensorSpec(name, dense.dtype, dense.shape)
            read = partial(merge.read, key)
            weight = Weight(spec, dense.tensor.device, read, None, collective)
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
    if "bias" in steps and "bias" not in tensors:
        raise _unmergeable(path, layer, "lora_bias=True needs a base layer with a bias")
    for key, dense in tensors.items():
        name = f"{path}.{key}"
        if key in steps:
            merge = Merge(dense, steps[key])
            yield Entry(name, dense.tensor, merge.weight(name), _places(merge.tensors))
        else:
            yield Entry(name, dense.tensor, dense.weight(name) if dense.packed else None)


def _saved_entries(path: str, wrapper: Any, saved: nn.Module) -> Iterator[Entry]:
    """The trained copy, in the place of the original: what is tied to that is torn from it."""
    original = wrapper.original_module.state_dict(keep_vars=True)
    for key, tensor in saved.state_dict(keep_vars=True).items():
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


def _is_replaced(module: nn.Module) -> bool:
    return (
        tuner_layer(module) is not None
        or saved_module(module) is not None
        or is_packed(module)
    )


def _replaced_modules(base: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    inside: list[str] = []
    for path, module in base.named_modules(remove_duplicate=False):
        if any(path.startswith(f"{outer}.") for outer in inside[-1:]):
            continue
        if _is_replaced(module):
            inside.append(path)
            yield path, module


def _owner(name: str, replaced: dict[str, nn.Module]) -> str | None:
    path = name
    while "." in path:
        path = path.rpartition(".")[0]
        if path in replaced:
            return path
    return None
