"""One adapter travels as PEFT saves it: the same names, the same values, the same config."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import IA3Config, LoraConfig, PeftModel, get_peft_model, inject_adapter_in_model
from safetensors.torch import load_file
from torch import nn

from weight_update.errors import ConfigurationError
from weight_update.weights.lora.export import Adapter, adapter_of

ALL_LINEAR = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def config(**more: Any) -> LoraConfig:
    settings: dict[str, Any] = {"r": 4, "lora_alpha": 8, "target_modules": ALL_LINEAR}
    return LoraConfig(**(settings | {"task_type": "CAUSAL_LM"} | more))


def trained(model: Any) -> Any:
    """Gives every trainable tensor (lora_B starts at zero) a value of its own."""
    torch.manual_seed(7)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn_like(parameter) * 0.1)
    return model


def adapted(llama: nn.Module, **more: Any) -> PeftModel:
    return trained(get_peft_model(llama, config(**more)))


def saved(model: PeftModel, home: Path, adapter: str = "default") -> tuple[Any, Any]:
    """What PEFT writes, embeddings left out."""
    model.save_pretrained(home, save_embedding_layers=False, selected_adapters=[adapter])
    place = home if adapter == "default" else home / adapter
    settings = json.loads((place / "adapter_config.json").read_text())
    return load_file(place / "adapter_model.safetensors"), settings


def values(adapter: Adapter) -> dict[str, torch.Tensor]:
    return {weight.spec.name: weight.read() for weight in adapter.weights}


def assert_equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    assert one.keys() == other.keys()
    for name, tensor in one.items():
        assert tensor.dtype == other[name].dtype
        assert torch.equal(tensor, other[name]), name


KINDS: dict[str, dict[str, Any]] = {
    "all linear layers": {},
    "some layers": {"target_modules": ["q_proj", "v_proj"], "layers_to_transform": [1]},
    "a pattern": {"target_modules": r".*\.mlp\.(up|down)_proj"},
    "embeddings": {"target_modules": ["embed_tokens", "q_proj"]},
    "the output layer": {"target_modules": ["lm_head"]},
    "a copy of the output layer": {"modules_to_save": ["lm_head"]},
    "rsLoRA": {"use_rslora": True},
    "DoRA": {"use_dora": True},
    "ranks by pattern": {"rank_pattern": {"q_proj": 2}, "alpha_pattern": {"v_proj": 3}},
    "biases": {"lora_bias": True, "target_modules": ["q_proj"]},
    "trained tokens": {"trainable_token_indices": [1, 5]},
}


@pytest.mark.parametrize("kind", KINDS)
def test_it_is_what_peft_saves(make_llama: Callable[..., Any], kind: str, tmp_path: Path) -> None:
    bias = kind == "biases"
    model = adapted(make_llama(attention_bias=bias), **KINDS[kind])

    adapter = adapter_of(model)

    tensors, settings = saved(model, tmp_path)
    assert_equal(values(adapter), tensors)
    told = {key: sorted(v) if key == "target_modules" and isinstance(v, list) else v
            for key, v in settings.items()}  # fmt: skip
    assert adapter.config == told


def test_the_active_one_of_several_is_taken(make_llama: Callable[..., Any], tmp_path: Path) -> None:
    model = adapted(make_llama())
    model.add_adapter("second", config(r=2, target_modules=["q_proj"]))
    model.set_adapter("second")
    trained(model)

    assert_equal(values(adapter_of(model)), saved(model, tmp_path, "second")[0])
    assert_equal(values(adapter_of(model, "default")), saved(model, tmp_path)[0])


def test_a_wrapped_model_gives_the_same_names(
    make_llama: Callable[..., Any], tmp_path: Path
) -> None:
    model = adapted(make_llama())
    wrapped = nn.DataParallel(torch.compile(model))

    assert_equal(values(adapter_of(wrapped)), saved(model, tmp_path)[0])


def test_adapters_without_a_peft_model_around_them_get_its_names(
    make_llama: Callable[..., Any], tmp_path: Path
) -> None:
    bare = inject_adapter_in_model(config(), make_llama())

    names = set(values(adapter_of(bare)))

    assert names == set(saved(adapted(make_llama()), tmp_path)[0])


def test_values_are_read_late_and_nothing_is_copied(make_llama: Callable[..., Any]) -> None:
    model = adapted(make_llama())
    weight = adapter_of(model).weights[0]
    parameter = next(p for n, p in model.named_parameters() if "lora_" in n)

    with torch.no_grad():
        parameter.fill_(3.0)

    assert weight.read().data_ptr() == parameter.data_ptr()
    assert float(weight.read().flatten()[0]) == 3.0


def two_active(llama: nn.Module) -> nn.Module:
    model = adapted(llama)
    model.add_adapter("second", config(r=2))
    model.base_model.set_adapter(["default", "second"])
    return model


def disabled(llama: nn.Module) -> nn.Module:
    model = adapted(llama)
    model.base_model.disable_adapter_layers()
    return model


def rescaled(llama: nn.Module, **more: Any) -> nn.Module:
    model = adapted(llama, **more)
    for module in model.modules():
        if hasattr(module, "set_scale"):
            module.set_scale("default", 0.5)
    return model


REFUSED: list[tuple[Callable[[Any], nn.Module], str]] = [
    (lambda llama: llama, "has no LoRA adapter"),
    (two_active, "one adapter must be active, and 'default', 'second' are"),
    (disabled, "the adapters are disabled"),
    (rescaled, "rescaled from 2 to 1"),
    (
        lambda llama: rescaled(llama, rank_pattern={"q_proj": 2, "k_proj": 2}),
        "rescaled from 4 to 2",
    ),
    (lambda llama: get_peft_model(llama, IA3Config(task_type="CAUSAL_LM")), "is IA3"),
]


@pytest.mark.parametrize(("make", "words"), REFUSED, ids=[words for _, words in REFUSED])
def test_what_no_engine_would_compute_is_refused(
    make_llama: Callable[..., Any], make: Callable[[Any], nn.Module], words: str
) -> None:
    with pytest.raises(ConfigurationError, match=words):
        adapter_of(make(make_llama()))


def test_an_adapter_that_is_not_there_is_named(make_llama: Callable[..., Any]) -> None:
    with pytest.raises(ConfigurationError, match=r"no adapter 'other'; the model has 'default'"):
        adapter_of(adapted(make_llama()), "other")
