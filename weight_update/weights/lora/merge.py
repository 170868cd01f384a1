"""LoRA: the weights as `merge_and_unload` would give them, one layer at a time."""

from __future__ import annotations

import copy
import logging
import sys
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import nn

from weight_update.errors import ConfigurationError

Changes = frozenset[int]
"""Where the adapters that change a tensor are stored; empty for a tensor sent as it is."""

Entry = tuple[str, Any, Callable[[], torch.Tensor] | None, Changes]


def adapter_model(module: nn.Module) -> nn.Module | None:
    """The base model inside a PEFT model, adapters still in place; None without adapters."""
    if any(_is_tuner_layer(child) for child in module.modules()):
        if not hasattr(module, "get_base_model"):
            return module
        peft_model: Any = module
        base: nn.Module = peft_model.get_base_model()
        return base
    return None


def is_plain(module: nn.Module) -> bool:
    """Whether the module's own tensors are what it computes with: no adapters of any kind."""
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
    """Names, tensors, readers and changes of the merged model, in the base model's order.

    A reader is given where the value must be computed; the tensor then stands for its dtype,
    shape and identity. Nothing of the model is copied before a reader is called.
    """
    wrapped = dict(_replaced_modules(base))
    done: set[str] = set()
    for name, tensor in base.state_dict(keep_vars=True).items():
        path = _owner(name, wrapped)
        if path is None:
            yield name, tensor, None, Changes()
        elif path not in done:
            done.add(path)
            yield from _replacement(path, wrapped[path])


class _MergedLayer:
    """Merges a layer when its first tensor is read, and forgets each tensor once it is given."""

    def __init__(self, path: str, layer: Any) -> None:
        self._path = path
        self._layer = layer
        self._ready: dict[str, torch.Tensor] = {}

    def entries(self) -> Iterator[Entry]:
        _refuse_unmergeable(self._path, self._layer)
        base = {id(parameter) for parameter in self._layer.get_base_layer().parameters()}
        changes = Changes(p.data_ptr() for p in self._layer.parameters() if id(p) not in base)
        for key, tensor in self._layer.get_base_layer().state_dict(keep_vars=True).items():
            if not tensor.is_floating_point():
                raise ConfigurationError(
                    f"{self._path}.{key} is a quantised base ({tensor.dtype}) under an adapter",
                    phase="plan",
                    remedy="dequantise the base model, or push the adapter by itself",
                )
            yield f"{self._path}.{key}", tensor, partial(self.read, key), changes

    def read(self, key: str) -> torch.Tensor:
        if key not in self._ready:
            self._ready = _merge(self._layer)
        return self._ready.pop(key)


def _merge(layer: Any) -> dict[str, torch.Tensor]:
    # In fp32 on a copy of this one layer: merging in place and undoing it is not an inverse
    # in bf16, and erodes the base a little at every update.
    dtypes = {key: tensor.dtype for key, tensor in layer.get_base_layer().state_dict().items()}
    device = next(layer.parameters()).device.type
    with torch.no_grad(), torch.autocast(device, enabled=False):
        scratch = copy.deepcopy(layer).float()
        for adapted in _chain(scratch):
            adapted.merge()
        merged = scratch.get_base_layer().state_dict()
        return {key: tensor.detach().to(dtypes[key]) for key, tensor in merged.items()}


def _chain(layer: Any) -> Iterator[Any]:
    """The layer and the adapters inside it: PEFT nests one for each parameter of a module."""
    while _is_tuner_layer(layer):
        yield layer
        layer = layer.base_layer


def _refuse_unmergeable(path: str, layer: Any) -> None:
    # A merge runs while the engine is paused, so what cannot be merged is found out before.
    base = layer.get_base_layer()
    layers = sys.modules["peft.tuners.tuners_utils"]
    if any(type(adapted).merge is layers.BaseTunerLayer.merge for adapted in _chain(layer)):
        reason = "adapters of this type cannot be merged"
    elif any(_is_tuner_layer(child) for child in base.modules()):
        reason = "its base layer holds adapters of its own"
    elif any(getattr(layer, "lora_bias", {}).values()) and getattr(base, "bias", None) is None:
        reason = "lora_bias=True needs a base layer with a bias"
    else:
        return
    raise ConfigurationError(
        f"the adapter of {path!r} ({type(layer).__name__}) cannot be merged: {reason}",
        phase="plan",
        remedy="use an adapter that merge_and_unload() takes, or pass a mapping of the weights",
    )


def _replaced_modules(base: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    inside: list[str] = []
    for path, module in base.named_modules(remove_duplicate=False):
        if any(path.startswith(f"{outer}.") for outer in inside[-1:]):
            continue
        if _is_tuner_layer(module) or _saved_copy(module) is not None:
            inside.append(path)
            yield path, module


def _replacement(path: str, module: nn.Module) -> Iterator[Entry]:
    saved = _saved_copy(module)
    if saved is None:
        yield from _MergedLayer(path, module).entries()
        return
    for key, tensor in saved.state_dict(keep_vars=True).items():
        yield f"{path}.{key}", tensor, None, Changes()


def _owner(name: str, wrapped: dict[str, nn.Module]) -> str | None:
    path = name
    while "." in path:
        path = path.rpartition(".")[0]
        if path in wrapped:
            return path
    return None


def _saved_copy(module: nn.Module) -> nn.Module | None:
    """The trained copy that PEFT's `modules_to_save` keeps beside the original module."""
    copies = getattr(module, "modules_to_save", None)
    original = getattr(module, "original_module", None)
    if not isinstance(copies, nn.ModuleDict) or not isinstance(original, nn.Module):
        return None
    active = getattr(module, "active_adapter", None) or next(iter(copies), "")
    name = active[0] if isinstance(active, (list, tuple)) else str(active)
    return copies[name] if name in copies else original  # noqa: SIM401 - no get() there


def _is_tuner_layer(module: nn.Module) -> bool:
    # Adapters can only exist once peft was imported.
    layers = sys.modules.get("peft.tuners.tuners_utils")
    return layers is not None and isinstance(module, layers.BaseTunerLayer)
