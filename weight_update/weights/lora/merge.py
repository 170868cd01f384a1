"""Adapters merged, and quantised layers unpacked: a model's weights as a plain model has them."""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from weight_update.errors import ConfigurationError
from weight_update.weights.lora.dense import is_packed
from weight_update.weights.lora.entries import Entry, Layers
from weight_update.weights.lora.layers import base_model, saved_module, tuner_layer
from weight_update.weights.names import bare_name
from weight_update.weights.state import state_of


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
    layers = Layers(_dtype_of(base))
    done: set[str] = set()
    for name, tensor in state_of(base).items():
        path = _owner(bare_name(name), replaced)
        if path is None:
            yield Entry(bare_name(name), tensor)
        elif path not in done:
            done.add(path)
            yield from layers.entries(path, replaced[path])


def _dtype_of(model: nn.Module) -> torch.dtype | None:
    dtype = getattr(getattr(model, "config", None), "dtype", None)
    return dtype if isinstance(dtype, torch.dtype) else None


def _is_replaced(module: nn.Module) -> bool:
    return tuner_layer(module) is not None or saved_module(module) is not None or is_packed(module)


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
