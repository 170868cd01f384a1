"""What the adapters of a layer do to the tensors of its base, where a formula is known."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torch import nn

from weight_update.weights.lora.formula import LowRank, Magnitude, Rows, Shift, Step
from weight_update.weights.lora.layers import in_effect, nested
from weight_update.weights.shards.gather import shape_of

Steps = Mapping[str, tuple[Step, ...]]
"""Name of a tensor in the base layer to the steps that change it."""


class _OnlyPeftKnows(Exception):
    """The adapter is of a kind that has no formula here."""


def steps_of(layer: Any) -> Steps | None:
    """The steps for each tensor that changes; None when only PEFT knows how to merge."""
    found: dict[str, tuple[Step, ...]] = {}
    try:
        for adapted in nested(layer):
            for name, sign in in_effect(adapted):
                for key, step in _steps(adapted, name, sign):
                    found[key] = (*found.get(key, ()), step)
    except _OnlyPeftKnows:
        return None
    return found


def _steps(layer: Any, name: str, sign: int) -> Iterator[tuple[str, Step]]:
    home = type(layer).__module__
    if home.startswith("peft.tuners.trainable_tokens."):
        yield from _token_steps(layer, name, sign)
    elif home.startswith("peft.tuners.lora."):
        yield from _lora_steps(layer, name, sign)
    else:
        raise _OnlyPeftKnows


def _token_steps(layer: Any, name: str, sign: int) -> Iterator[tuple[str, Step]]:
    rows = layer.trainable_tokens_delta if sign > 0 else layer.trainable_tokens_original
    yield "weight", Rows(layer.token_indices[name], rows[name])


def _lora_steps(layer: Any, name: str, sign: int) -> Iterator[tuple[str, Step]]:
    if name in layer.lora_embedding_A:
        a, b = layer.lora_embedding_A[name], layer.lora_embedding_B[name]
        _refuse_variants(layer, name)
        yield "weight", LowRank(a, b, sign * layer.scaling[name], transposed=True)
    elif name in layer.lora_A:
        yield from _linear_steps(layer, name, sign)


def _linear_steps(layer: Any, name: str, sign: int) -> Iterator[tuple[str, Step]]:
    a, b = layer.lora_A[name], layer.lora_B[name]
    if not (isinstance(a, nn.Linear) and isinstance(b, nn.Linear)):
        raise _OnlyPeftKnows
    scale = sign * float(layer.scaling[name])
    transposed = getattr(layer, "fan_in_fan_out", False)
    parameter = getattr(layer, "parameter_name", None)
    if parameter is not None:
        yield parameter, _parameter_step(layer, a.weight, b.weight, scale)
        return
    yield "weight", LowRank(a.weight, b.weight, scale, transposed)
    if name in layer.lora_magnitude_vector and len(in_effect(layer)) == 1 and sign > 0:
        yield "weight", _magnitude(layer, name, transposed)
    else:
        _refuse_variants(layer, name)
    if b.bias is not None:
        yield "bias", Shift(b.bias, scale)


def _parameter_step(layer: Any, a: Any, b: Any, scale: float) -> Step:
    """Of a parameter that is adapted by its name: a matrix, or one for each expert."""
    if len(shape_of(layer.get_param())) == 2:
        return LowRank(a, b, scale)
    # Nothing public tells which of its two layouts a square parameter has.
    output_first = getattr(layer, "_did_swap_in_out_features", False)
    return LowRank(a, b, scale, transposed=not output_first, experts=layer.num_experts)


def _magnitude(layer: Any, name: str, transposed: bool) -> Step:
    variant = type(getattr(layer, "lora_variant", {}).get(name)).__name__
    if transposed or variant not in ("NoneType", "DoraLinearVariant"):
        raise _OnlyPeftKnows
    return Magnitude(layer.lora_magnitude_vector[name].weight)


def _refuse_variants(layer: Any, name: str) -> None:
    if name in layer.lora_magnitude_vector or name in getattr(layer, "lora_variant", {}):
        raise _OnlyPeftKnows
