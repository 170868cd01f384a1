"""LoRA: one adapter by itself, under the names that PEFT saves it by."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from weight_update.errors import ConfigurationError
from weight_update.weights.lora.layers import is_tuner_layer
from weight_update.weights.names import bare_name, unwrap
from weight_update.weights.shards.gather import weight_of
from weight_update.weights.shards.wrapped import is_wrapped
from weight_update.weights.specs import Weight
from weight_update.weights.state import state_of

# What PEFT puts before every name; transformers models with adapters of their own lack it.
_PREFIX = "base_model.model."


@dataclass(frozen=True)
class Adapter:
    """One adapter of a model.

    Attributes:
        config: What PEFT saves as ``adapter_config.json``.
        weights: What it saves as ``adapter_model.safetensors``, values read later.
    """

    config: Mapping[str, Any]
    weights: tuple[Weight, ...]


def adapter_of(model: nn.Module, adapter: str | None = None) -> Adapter:
    """One adapter of a model, as PEFT's ``save_pretrained`` writes it; nothing is copied.

    Embeddings are not saved along with it, so the engine's must be those of the base model.

    Args:
        model: A PEFT model, or a model with PEFT adapters in it; wrapped or not.
        adapter: Its name; None takes the active one.

    Raises:
        ConfigurationError: There is no such adapter, or it is not what the model computes with.
    """
    module = unwrap(model)
    if is_wrapped(module):
        raise _refusal(
            "FSDP1 keeps adapters and base in one flat parameter", "use FSDP2 (fully_shard)"
        )
    name = adapter or _active_adapter(module)
    config = _config_of(module, name)
    _refuse_rescaled(module, name, config)
    return Adapter(_as_json(config), tuple(_weights(module, name)))


def _active_adapter(module: nn.Module) -> str:
    layers = list(_layers(module))
    if not layers:
        raise _refusal(f"{type(module).__name__} has no LoRA adapter", "push with lora='merge'")
    if any(layer.disable_adapters for layer in layers):
        raise _refusal("the adapters are disabled", "enable them before the update")
    active = {name for layer in layers for name in layer.active_adapters}
    if len(active) != 1:
        names = ", ".join(map(repr, sorted(active))) or "none"
        raise _refusal(
            f"one adapter must be active, and {names} are",
            "set_adapter() to one, or push with lora='merge', which sends their sum",
        )
    (name,) = active
    return str(name)


def _config_of(module: nn.Module, name: str) -> Any:
    configs: Mapping[str, Any] = getattr(module, "peft_config", None) or {}
    if name not in configs:
        known = ", ".join(map(repr, configs)) or "none"
        raise _refusal(f"there is no adapter {name!r}; the model has {known}")
    kind = str(getattr(configs[name].peft_type, "value", configs[name].peft_type))
    if kind != "LORA":
        raise _refusal(
            f"adapter {name!r} is {kind}, and engines serve LoRA only", "push with lora='merge'"
        )
    return configs[name]


def _refuse_rescaled(module: nn.Module, name: str, config: Any) -> None:
    """An engine computes the scale from the config, and cannot know of another."""
    for layer in _layers(module):
        if name not in getattr(layer, "scaling", ()):  # trained tokens have none
            continue
        rank, alpha = layer.r[name], layer.lora_alpha[name]
        scale = alpha / (rank**0.5 if config.use_rslora else rank)
        if layer.scaling[name] != scale:
            raise _refusal(
                f"adapter {name!r} was rescaled from {scale:g} to {layer.scaling[name]:g}",
                "push with lora='merge', or put the scale into lora_alpha",
            )


def _weights(module: nn.Module, name: str) -> Iterator[Weight]:
    from peft import get_peft_model_state_dict

    state = get_peft_model_state_dict(
        module,
        state_dict=state_of(module),
        adapter_name=name,
        save_embedding_layers=False,
    )
    prefix = "" if hasattr(module, "get_base_model") else _PREFIX
    for key, tensor in state.items():
        yield weight_of(prefix + bare_name(key), tensor)


def _layers(module: nn.Module) -> Iterator[Any]:
    return filter(is_tuner_layer, module.modules())


def _as_json(config: Any) -> dict[str, Any]:
    fields = {**config.to_dict(), "inference_mode": True}  # as a saved one is
    plain = {key: sorted(v) if isinstance(v, set) else v for key, v in fields.items()}
    loaded: dict[str, Any] = json.loads(json.dumps(plain))
    return loaded


def _refusal(what: str, remedy: str = "") -> ConfigurationError:
    return ConfigurationError(what, phase="plan", remedy=remedy)
