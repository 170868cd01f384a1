"""The merge by PEFT itself, for adapters whose formula only PEFT knows."""

from __future__ import annotations

import copy
from typing import Any

import torch

from weight_update.weights.lora.layers import nested
from weight_update.weights.shards.gather import full
from weight_update.weights.state import state_of


class PeftMerge:
    """Merges a layer when its first tensor is read, and forgets each tensor once it is given."""

    def __init__(self, layer: Any) -> None:
        self._layer = layer
        self._ready: dict[str, torch.Tensor] = {}

    def read(self, key: str) -> torch.Tensor:
        """A tensor of the base layer, merged."""
        if key not in self._ready:
            self._ready = merged_by_peft(self._layer)
        return self._ready.pop(key)


def merged_by_peft(layer: Any) -> dict[str, torch.Tensor]:
    """The tensors of the base layer with the adapters merged.

    In fp32 on a copy of this one layer: merging in place and undoing it is not an inverse in
    bf16, and erodes the base a little at every update.
    """
    dtypes = {key: value.dtype for key, value in state_of(layer.get_base_layer()).items()}
    device = next(layer.parameters()).device.type
    with torch.no_grad(), torch.autocast(device, enabled=False):
        scratch = _scratch(layer)
        for adapted in nested(scratch):
            _merge(adapted)
        merged = scratch.get_base_layer().state_dict()
        return {key: merged[key].to(dtype) for key, dtype in dtypes.items()}


def _merge(adapted: Any) -> None:
    if not adapted.disable_adapters:
        adapted.merge()
    elif adapted.merged:
        adapted.unmerge()


def _scratch(layer: Any) -> Any:
    """A copy whose tensors are whole and in fp32, none of them shared with the layer."""
    copies: dict[int, Any] = {}
    for tensor in (*layer.parameters(), *layer.buffers()):
        exact = torch.promote_types(tensor.dtype, torch.float32)
        value = full(tensor).to(exact if tensor.is_floating_point() else tensor.dtype, copy=True)
        is_parameter = isinstance(tensor, torch.nn.Parameter)
        copies[id(tensor)] = torch.nn.Parameter(value, False) if is_parameter else value
    return copy.deepcopy(layer, copies)
