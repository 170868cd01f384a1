"""A model with LoRA adapters is extracted anew after any change, and not without one."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn

from weight_update.weights import extraction_cache
from weight_update.weights.extract import extract_weights
from weight_update.weights.extraction_cache import ExtractionCache

PATH = "model.layers.0.mlp.up_proj"


def adapted(llama: nn.Module, **more: Any) -> Any:
    settings: dict[str, Any] = {"r": 4, "target_modules": ["q_proj", "up_proj"]}
    model = get_peft_model(llama, LoraConfig(**(settings | more)))
    model.add_adapter("second", LoraConfig(r=2, target_modules=["q_proj"]))
    return trained(model)


def trained(model: Any) -> Any:
    torch.manual_seed(3)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.add_(torch.randn_like(parameter) * 0.1)
    return model


def known(model: nn.Module) -> ExtractionCache:
    """A cache that has seen the model come again."""
    cache = ExtractionCache()
    cache.extract(model)
    cache.extract(model)
    return cache


def layer_of(model: Any) -> Any:
    return model.base_model.model.get_submodule(PATH)


def values(weights: Any) -> dict[str, torch.Tensor]:
    return {weight.spec.name: weight.read() for weight in weights}


def assert_same(got: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert list(got) == list(expected)
    assert all(torch.equal(got[name], value) for name, value in expected.items())


def test_an_unchanged_model_is_not_extracted_again(make_llama, monkeypatch) -> None:
    model = adapted(make_llama())
    cache, expected = known(model), values(extract_weights(model))
    monkeypatch.setattr(extraction_cache, "extract_weights", None)

    assert_same(values(cache.extract(model)), expected)


def test_new_values_in_the_same_tensors_are_read_by_the_known_weights(make_llama) -> None:
    model = adapted(make_llama())
    cache = known(model)
    before = values(cache.extract(model))

    trained(model)

    assert_same(values(cache.extract(model)), values(extract_weights(model)))
    assert not torch.equal(before[f"{PATH}.weight"], values(cache.extract(model))[f"{PATH}.weight"])


def activate_both(model: Any) -> None:
    model.base_model.set_adapter(["default", "second"])


def activate_another(model: Any) -> None:
    model.set_adapter("second")


def disable(model: Any) -> None:
    model.base_model.disable_adapter_layers()


def disable_one_layer(model: Any) -> None:
    layer_of(model).enable_adapters(False)


def merge(model: Any) -> None:
    model.merge_adapter()


def scale(model: Any) -> None:
    layer_of(model).set_scale("default", 3.0)


def replace_a_factor(model: Any) -> None:
    factor = layer_of(model).lora_A["default"]
    factor.weight = nn.Parameter(factor.weight.detach() * 2)


def replace_the_base_weight(model: Any) -> None:
    base = layer_of(model).base_layer
    base.weight = nn.Parameter(base.weight.detach() * 2)


def add_a_bias(model: Any) -> None:
    layer_of(model).base_layer.bias = nn.Parameter(torch.ones(64))


def add_a_buffer(model: Any) -> None:
    model.base_model.model.get_submodule("model.norm").register_buffer("extra", torch.ones(2))


def add_dora(model: Any) -> None:
    model.add_adapter("third", LoraConfig(r=2, target_modules=["up_proj"], use_dora=True))
    model.set_adapter("third")


def take_an_adapter_away(model: Any) -> None:
    model.delete_adapter("default")


def replace_a_module(model: Any) -> None:
    parent = model.base_model.model.get_submodule("model.layers.0.mlp")
    parent.up_proj = nn.Linear(32, 64, bias=False)


CHANGES = (
    *(activate_both, activate_another, disable, disable_one_layer, merge, scale),
    *(replace_a_factor, replace_the_base_weight, add_a_bias, add_a_buffer, add_dora),
    *(take_an_adapter_away, replace_a_module),
)


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_a_changed_model_is_extracted_anew(make_llama, change: Callable[[Any], None]) -> None:
    model = adapted(make_llama())
    cache = known(model)
    before = values(cache.extract(model))
    change(model)

    got, expected = values(cache.extract(model)), values(extract_weights(model))

    assert_same(got, expected)
    changed = before.keys() != got.keys() or any(
        not torch.equal(before[name], value) for name, value in got.items()
    )
    assert changed or change is merge  # or the test could not fail


@pytest.mark.parametrize(
    "more",
    [
        {"use_dora": True},
        {"modules_to_save": ["lm_head"]},
        {"trainable_token_indices": [0, 9]},
        {"target_modules": ["embed_tokens", "q_proj"]},
        {"lora_bias": True, "target_modules": ["q_proj"]},
    ],
    ids="+".join,
)
def test_models_with_other_adapters_are_sent_as_they_are_now(make_llama, more) -> None:
    model = adapted(make_llama(attention_bias=True), **more)
    cache = known(model)
    trained(model)
    model.base_model.disable_adapter_layers()

    assert_same(values(cache.extract(model)), values(extract_weights(model)))


def test_nothing_of_a_known_model_is_referred_to(make_llama) -> None:
    model = adapted(make_llama())
    cache = known(model)
    weights = cache.extract(model)
    gone = [weakref.ref(model), weakref.ref(layer_of(model)), weakref.ref(model.base_model)]

    del model
    gc.collect()

    assert [ref() for ref in gone] == [None, None, None]
    with pytest.raises(Exception, match="is gone"):
        weights[0].read()


def test_a_known_model_can_swap_its_tensors(make_llama) -> None:
    model = adapted(make_llama())
    cache = known(model)
    factor = layer_of(model).lora_B["default"].weight

    torch.utils.swap_tensors(factor, nn.Parameter(torch.ones_like(factor)))

    assert_same(values(cache.extract(model)), values(extract_weights(model)))


def doubled(_module: nn.Module, state: dict[str, Any], *_: object) -> None:
    state.update({name: 2 * value for name, value in state.items() if name.endswith("norm.weight")})


class Doubling(nn.Linear):
    """Saves something else than it holds."""

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        state = super().state_dict(*args, **kwargs)
        state[kwargs["prefix"] + "weight"] = 2 * state[kwargs["prefix"] + "weight"]
        return state


def has_a_hook(model: Any) -> None:
    model.base_model.model.register_state_dict_post_hook(doubled)


def has_another_class(model: Any) -> None:
    model.base_model.model.lm_head.__class__ = Doubling


def test_a_buffer_that_is_no_longer_saved_is_not_sent(make_llama) -> None:
    llama = make_llama()
    llama.model.norm.register_buffer("kept", torch.ones(2))
    model = adapted(llama)
    cache = known(model)
    assert "model.norm.kept" in values(cache.extract(model))

    llama.model.norm.register_buffer("kept", llama.model.norm.kept, persistent=False)

    assert "model.norm.kept" not in values(cache.extract(model))


def test_a_hook_that_makes_something_else_each_time_is_asked_each_time(make_llama) -> None:
    model, factor = adapted(make_llama()), torch.tensor(2.0)

    def multiply(_: nn.Module, state: dict[str, Any], *__: object) -> None:
        state["model.norm.weight"] = state["model.norm.weight"] * factor

    model.base_model.model.register_state_dict_post_hook(multiply)
    cache = known(model)
    factor.fill_(3.0)

    assert_same(values(cache.extract(model)), values(extract_weights(model)))


@pytest.mark.parametrize("change", [has_a_hook, has_another_class])
def test_a_module_that_saves_itself_otherwise_now_is_extracted_anew(make_llama, change) -> None:
    model = adapted(make_llama())
    cache = known(model)
    before = values(cache.extract(model))

    change(model)

    expected = values(extract_weights(model))
    assert any(not torch.equal(before[name], value) for name, value in expected.items())
    assert_same(values(cache.extract(model)), expected)
