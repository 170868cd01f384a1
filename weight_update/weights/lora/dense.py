"""A layer's tensors as it computes with them: whole, and not quantised."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from weight_update.weights.shards.gather import full, is_shard, ranks_of, weight_of
from weight_update.weights.specs import TensorSpec, Weight
from weight_update.weights.state import state_of


@dataclass(frozen=True)
class Dense:
    """One tensor.

    Attributes:
        tensor: The layer's own: its place in memory, its device; packed if it is quantised.
        dtype: What it is sent as.
        shape: Of the whole, dense tensor.
        value: Returns the value, in ``dtype`` or a better one; not to be written to.
        packed: Whether ``tensor`` is quantised.
    """

    tensor: torch.Tensor
    dtype: torch.dtype
    shape: tuple[int, ...]
    value: Callable[[], torch.Tensor]
    packed: bool = False

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Dense:
        """A tensor that is dense already."""
        whole = weight_of("", tensor)
        return cls(tensor, whole.spec.dtype, whole.spec.shape, whole.read)

    def weight(self, name: str) -> Weight:
        """It, to be sent."""
        if not self.packed:
            return weight_of(name, self.tensor)
        return computed(TensorSpec(name, self.dtype, self.shape), [self.tensor], self._read)

    def _read(self) -> torch.Tensor:
        with torch.no_grad():
            return self.value().to(self.dtype)


def computed(
    spec: TensorSpec, tensors: Sequence[torch.Tensor], read: Callable[[], torch.Tensor]
) -> Weight:
    """A weight that is made from some tensors; all ranks read it together if one is a shard."""
    shards = [tensor for tensor in tensors if is_shard(tensor)]
    parties = [ranks_of(tensor) for tensor in shards]
    ranks = tuple(sorted(set().union(*parties))) if all(parties) else ()
    return Weight(spec, tensors[0].device, read, collective=bool(shards), ranks=ranks)


def dense_tensors(layer: nn.Module, dtype: torch.dtype | None) -> Mapping[str, Dense]:
    """The tensors of a layer's ``state_dict``; of a quantised one, weight and bias.

    Args:
        layer: The layer, without adapters.
        dtype: What the model computes in, for quantised layers that do not say it.
    """
    weight = dense_weight(layer, dtype)
    if weight is None:
        state = state_of(layer).items()
        return {key: Dense.of(value) for key, value in state if isinstance(value, torch.Tensor)}
    bias = getattr(layer, "bias", None)
    return {"weight": weight} | ({"bias": Dense.of(bias)} if bias is not None else {})


def dense_weight(layer: nn.Module, dtype: torch.dtype | None) -> Dense | None:
    """The weight of a quantised layer; None where the layer is not, or nobody can unpack it.

    Known are bitsandbytes' 4-bit and 8-bit layers, tensors with a ``dequantize`` of their own
    (torchao, quanto), and layers that hold packed integers and have that method (HQQ).
    """
    weight: Any = _own_weight(layer)
    if weight is not None and (state := _state_4bit(layer, weight)) is not None:
        value = partial(_unpacked_4bit, weight, state)
        dtype = getattr(state, "original_dtype", state.dtype)  # before it was laid out anew
        return Dense(weight, dtype, tuple(state.shape), value, packed=True)
    if _is_8bit(weight):
        value = partial(_unpacked_8bit, layer)
        return Dense(weight, dtype or torch.float32, tuple(weight.shape), value, packed=True)
    if _unpacks_itself(weight):
        return Dense(weight, weight.dtype, tuple(weight.shape), weight.dequantize, packed=True)
    return _unpacked(layer) if _is_unpacking_layer(layer) else None


def is_packed(layer: nn.Module) -> bool:
    """Whether the layer is quantised, and `dense_weight` can unpack it."""
    weight = _own_weight(layer)
    if weight is None or type(weight) is nn.Parameter:  # most are, and asking on takes long
        return _is_unpacking_layer(layer)
    four_bits = _state_4bit(layer, weight) is not None
    return four_bits or _is_8bit(weight) or _unpacks_itself(weight) or _is_unpacking_layer(layer)


def _own_weight(layer: nn.Module) -> torch.Tensor | None:
    return dict(layer.named_parameters(recurse=False)).get("weight")


def _state_4bit(layer: nn.Module, weight: torch.Tensor) -> Any:
    # A sharded weight has lost it; the layer keeps another reference.
    state = getattr(weight, "quant_state", None) or getattr(layer, "quant_state", None)
    return state if hasattr(state, "quant_type") else None


def _is_8bit(weight: torch.Tensor | None) -> bool:
    return type(weight).__name__ == "Int8Params" and getattr(weight, "dtype", None) is torch.int8


def _unpacks_itself(weight: torch.Tensor | None) -> bool:
    return weight is not None and type(weight).dequantize is not torch.Tensor.dequantize


def _is_unpacking_layer(layer: nn.Module) -> bool:
    unpacks = callable(getattr(type(layer), "dequantize", None))
    return unpacks and not any(layer.children()) and _packed_tensor(layer) is not None


def _packed_tensor(layer: nn.Module) -> torch.Tensor | None:
    own = (*layer.parameters(recurse=False), *layer.buffers(recurse=False))
    return next((tensor for tensor in own if not tensor.is_floating_point()), None)


def _unpacked(layer: Any) -> Dense:
    with torch.no_grad():
        value = layer.dequantize()  # only the value tells its own dtype and shape
    tensor: Any = _packed_tensor(layer)
    return Dense(tensor, value.dtype, tuple(value.shape), layer.dequantize, packed=True)


def _unpacked_4bit(weight: torch.Tensor, state: Any) -> torch.Tensor:
    import bitsandbytes

    packed = full(weight)
    if getattr(state, "packing_format_for_cpu", False):
        packed, state = _laid_out_plainly(weight, state)
    value: torch.Tensor = bitsandbytes.functional.dequantize_4bit(packed, state)
    return value


def _laid_out_plainly(weight: torch.Tensor, state: Any) -> tuple[torch.Tensor, Any]:
    """A copy as it was before a forward in eval mode laid it out for inference on this CPU.

    `state_dict` brings the bytes in order, of a copy here; it does not so with the scales, which
    are those that the layer computes with: a column for each row of the weight.
    """
    import bitsandbytes

    layer = bitsandbytes.nn.Linear4bit(1, 1, bias=False)
    layer.weight = copy.deepcopy(weight)
    layer.state_dict()
    plain = bitsandbytes.functional.QuantState(
        state.absmax.T.reshape(-1).float(),
        state.shape,
        state.code,
        state.blocksize,
        state.quant_type,
        state.original_dtype,
    )
    return layer.weight.data, plain


def _unpacked_8bit(layer: Any) -> torch.Tensor:
    import bitsandbytes

    # The scales move from the weight to the layer at its first forward.
    scales = layer.state.SCB if layer.weight.SCB is None else layer.weight.SCB
    packed = layer.weight.detach()
    value: torch.Tensor = bitsandbytes.functional.int8_vectorwise_dequant(packed, scales)
    return value
