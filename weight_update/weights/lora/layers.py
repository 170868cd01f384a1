"""What PEFT puts into a model: adapted layers, trained copies of modules, trained token rows."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

from torch import nn

from weight_update.errors import ConfigurationError

# Adapters can only exist once peft was imported, so nothing here imports it.


def is_tuner_layer(module: object) -> bool:
    """Whether it is a layer that PEFT adapts."""
    tuners = sys.modules.get("peft.tuners.tuners_utils")
    return tuners is not None and isinstance(module, tuners.BaseTunerLayer)


def tuner_layer(module: nn.Module) -> Any:
    """The adapted layer that ``module`` is, or that a wrapper of trained tokens holds; or None."""
    held = getattr(module, "token_adapter", module)
    return held if is_tuner_layer(held) else None


def nested(layer: Any) -> Iterator[Any]:
    """The layer and the adapters inside it: PEFT nests one for each parameter of a module."""
    while is_tuner_layer(layer):
        yield layer
        layer = layer.base_layer


def saved_module(module: nn.Module) -> nn.Module | None:
    """What a `modules_to_save` wrapper computes with; None for every other module."""
    copies = getattr(module, "modules_to_save", None)
    original = getattr(module, "original_module", None)
    if not isinstance(copies, nn.ModuleDict) or not isinstance(original, nn.Module):
        return None
    wrapper: Any = module
    active = [name for name in wrapper.active_adapters if name in copies]
    return original if wrapper.disable_adapters or not active else copies[active[0]]


def in_effect(layer: Any) -> list[tuple[str, int]]:
    """The adapters whose share the base layer lacks (1), or must lose (-1), in order.

    As the layer's own forward has it: merged adapters are in the base already, and what was
    merged and then disabled is taken out again.
    """
    if layer.disable_adapters:
        return [(name, -1) for name in layer.merged_adapters]
    return [] if layer.merged else [(name, 1) for name in layer.active_adapters]


def base_model(module: nn.Module) -> nn.Module:
    """The model that ``module`` adapts: the one inside a PEFT model, itself otherwise.

    Raises:
        ConfigurationError: Its adapters are no change of its weights.
    """
    peft: Any = sys.modules.get("peft")
    if peft is None or not isinstance(module, (peft.PeftModel, peft.PeftMixedModel)):
        return module
    _refuse_input_adapters(module)
    inner: nn.Module = module.base_model.model
    return inner


def _refuse_input_adapters(model: Any) -> None:
    """Prompts, routers and the like change what layers are given, so no weight can hold them."""
    for name in model.active_adapters:
        config = model.peft_config[name]
        kind = str(getattr(config.peft_type, "value", config.peft_type))
        if config.is_prompt_learning or kind in ("ADAPTION_PROMPT", "XLORA", "CARTRIDGE"):
            raise ConfigurationError(
                f"the adapter {name!r} ({kind}) cannot be merged: it is no change of weights",
                phase="plan",
                remedy="use an adapter that merge_and_unload() takes",
            )
