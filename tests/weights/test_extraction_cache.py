"""A model is extracted anew after any change of its tensors, and not without one."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from weight_update.errors import ConfigurationError, WeightMismatchError
from weight_update.weights import extraction_cache
from weight_update.weights.extract import extract_weights
from weight_update.weights.extraction_cache import ExtractionCache
from weight_update.weights.specs import Weight


class TwoLinears(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.second = nn.Linear(4, 4)
        self.register_buffer("steps", torch.zeros(1))
        self.register_module("absent", None)


def known(model: nn.Module) -> ExtractionCache:
    """A cache that has seen the model come again."""
    cache = ExtractionCache()
    cache.extract(model)
    cache.extract(model)
    return cache


def assert_equal(weights: tuple[Weight, ...], expected: tuple[Weight, ...]) -> None:
    assert [w.spec for w in weights] == [w.spec for w in expected]
    for one, other in zip(weights, expected, strict=True):
        assert torch.equal(one.read(), other.read())


def test_an_unchanged_model_is_walked_once_and_not_extracted_again(monkeypatch):
    model = TwoLinears()
    cache = known(model)
    for name in ("from_state_dict", "extract_weights", "Converter"):
        monkeypatch.setattr(extraction_cache, name, None)
    assert [weight.spec.name for weight in cache.extract(model)] == list(model.state_dict())


def test_a_model_that_came_once_is_not_remembered():
    """What is sent and what is remembered would otherwise exist beside each other."""
    cache = ExtractionCache()
    cache.extract(TwoLinears())
    assert cache._known is None


def test_new_values_in_the_same_tensors_are_read_by_the_known_weights():
    model = TwoLinears()
    cache = known(model)
    with torch.no_grad():
        model.first.weight.add_(1.0)
    assert_equal(cache.extract(model), extract_weights(model))


def replace_a_parameter(model: TwoLinears) -> None:
    model.first.weight = nn.Parameter(torch.ones(4, 4))


def swap_the_data(model: TwoLinears) -> None:
    model.first.weight.data = torch.ones(4, 4)


def swap_for_another_shape(model: TwoLinears) -> None:
    model.first.weight.data = model.first.weight.data[:2]


def reinterpret(model: TwoLinears) -> None:
    model.first.weight.data = model.first.weight.data.T


def tie(model: TwoLinears) -> None:
    model.second.weight = model.first.weight


def add_a_module(model: TwoLinears) -> None:
    model.third = nn.Linear(1, 1)


def remove_a_module(model: TwoLinears) -> None:
    del model.second


def rename(model: TwoLinears) -> None:
    model.other = model.second
    del model.second


def cast(model: TwoLinears) -> None:
    model.to(torch.bfloat16)


def replace_a_buffer(model: TwoLinears) -> None:
    model.steps = torch.ones(1)


def turn_a_parameter_into_a_buffer(model: TwoLinears) -> None:
    weight = model.first.weight.detach()
    del model.first.weight
    model.first.register_buffer("weight", weight)


def make_a_buffer_temporary(model: TwoLinears) -> None:
    model.register_buffer("steps", model.steps, persistent=False)


def move_a_parameter_to_its_neighbour(model: TwoLinears) -> None:
    model.second.extra, bias = model.first.bias, None
    model.first.bias = bias


def swap_two_children(model: TwoLinears) -> None:
    model.first, model.second = model.second, model.first


def swap_two_tensors(model: TwoLinears) -> None:
    model.first.weight, model.second.weight = model.second.weight, model.first.weight


def move_a_child_to_an_absent_neighbour(model: TwoLinears) -> None:
    model.absent, model.second = model.second, None


def hook_the_state_dict(model: TwoLinears) -> None:
    def rename(module, state, prefix, metadata):
        state[f"{prefix}renamed"] = state.pop(f"{prefix}weight")

    model.first.register_state_dict_post_hook(rename)


def script_a_child(model: TwoLinears) -> None:
    model.second = torch.jit.script(model.second)


class Doubling(nn.Linear):
    """Saves something else than it holds."""

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool):
        destination[f"{prefix}weight"] = self.weight * 2


def give_another_class(model: TwoLinears) -> None:
    model.second.__class__ = Doubling


def put_a_method_in_front(model: TwoLinears) -> None:
    """As recipes do that have ``save_pretrained`` write the adapters alone."""
    saved = model.state_dict
    model.state_dict = lambda *args, **kwargs: {"first.bias": saved(*args, **kwargs)["first.bias"]}


def put_a_method_of_a_part_in_front(model: TwoLinears) -> None:
    def save(destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        destination[f"{prefix}weight"] = model.first.weight * 2

    model.first._save_to_state_dict = save


def move_a_module_to_its_child(model: TwoLinears) -> None:
    """All modules stay in their order, under the same last names."""
    model.first.second = model.second
    del model.second


CHANGES: tuple[Callable[[TwoLinears], None], ...] = (
    replace_a_parameter,
    swap_the_data,
    swap_for_another_shape,
    reinterpret,
    tie,
    add_a_module,
    remove_a_module,
    rename,
    cast,
    replace_a_buffer,
    turn_a_parameter_into_a_buffer,
    make_a_buffer_temporary,
    move_a_parameter_to_its_neighbour,
    swap_two_children,
    swap_two_tensors,
    move_a_child_to_an_absent_neighbour,
    hook_the_state_dict,
    script_a_child,
    give_another_class,
    put_a_method_in_front,
    put_a_method_of_a_part_in_front,
    move_a_module_to_its_child,
)


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_a_changed_model_is_extracted_anew(change: Callable[[TwoLinears], None]):
    model = TwoLinears()
    cache = known(model)
    change(model)
    assert_equal(cache.extract(model), extract_weights(model))


def test_a_model_that_came_to_hold_itself_is_refused_and_not_walked_for_ever():
    model = TwoLinears()
    cache = known(model)
    model.first.parent = model
    with pytest.raises(RecursionError):
        cache.extract(model)


def test_a_parameter_that_moves_to_the_next_module_is_noticed():
    """All tensors stay in their order, under the same last names."""
    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    cache = known(model)
    bias = model[0].bias
    del model[0].bias
    model[1].bias = bias
    assert_equal(cache.extract(model), extract_weights(model))


def test_untying_is_noticed():
    model = TwoLinears()
    tie(model)
    cache = known(model)
    model.second.weight = nn.Parameter(torch.zeros(4, 4))
    assert_equal(cache.extract(model), extract_weights(model))


def test_another_model_of_the_same_shape_is_extracted_anew():
    cache = known(TwoLinears())
    other = TwoLinears()
    assert_equal(cache.extract(other), extract_weights(other))


class Experts(nn.Module):
    """A layer's experts, stacked."""

    def __init__(self) -> None:
        super().__init__()
        self.gate_up_proj = nn.Parameter(torch.randn(3, 4, 5))
        self.down_proj = nn.Parameter(torch.randn(3, 5, 2))


def mixture() -> Qwen3MoeForCausalLM:
    sizes = {"vocab_size": 16, "hidden_size": 5, "num_attention_heads": 1, "head_dim": 2}
    experts = {"num_experts": 3, "moe_intermediate_size": 2, "num_key_value_heads": 1}
    return Qwen3MoeForCausalLM(Qwen3MoeConfig(**sizes, **experts, num_hidden_layers=1))


def experts_of(model: Qwen3MoeForCausalLM) -> nn.Module:
    return model.model.layers[0].mlp.experts


def test_the_parts_of_stacked_experts_are_made_once():
    model = mixture()
    cache = known(model)

    weights = cache.extract(model)

    assert cache.extract(model) is weights
    assert sum(".experts." in weight.spec.name for weight in weights) == 9
    assert_equal(weights, extract_weights(model))


def test_a_model_that_nobody_keeps_can_be_sent():
    weights = ExtractionCache().extract(mixture())
    gc.collect()
    assert all(weight.read().shape == weight.spec.shape for weight in weights)


def change_a_value(model: Qwen3MoeForCausalLM) -> None:
    with torch.no_grad():
        experts_of(model).gate_up_proj.add_(1.0)


def replace_a_stack(model: Qwen3MoeForCausalLM) -> None:
    experts_of(model).gate_up_proj = nn.Parameter(torch.randn(3, 4, 5))


def swap_the_data_of_a_stack(model: Qwen3MoeForCausalLM) -> None:
    experts_of(model).gate_up_proj.data = torch.randn(3, 4, 5)


def move_the_stack_to_another_module(model: Qwen3MoeForCausalLM) -> None:
    other = Experts()
    other.gate_up_proj = experts_of(model).gate_up_proj
    other.down_proj = experts_of(model).down_proj
    former = experts_of(model)
    model.model.layers[0].mlp.experts = other
    former.gate_up_proj = nn.Parameter(torch.zeros(3, 4, 5))
    model.former = [former]


@pytest.mark.parametrize(
    "change",
    [
        change_a_value,
        replace_a_stack,
        swap_the_data_of_a_stack,
        move_the_stack_to_another_module,
    ],
    ids=lambda change: change.__name__,
)
def test_parts_of_changed_experts_have_the_new_values(change: Callable[[nn.Module], None]):
    model = mixture()
    cache = known(model)
    change(model)
    assert_equal(cache.extract(model), extract_weights(model))


def test_no_stack_of_a_known_model_is_referred_to():
    model = mixture()
    cache = known(model)
    for weight in cache.extract(model):
        weight.read()
    stack = weakref.ref(experts_of(model).gate_up_proj)
    replace_a_stack(model)
    assert stack() is None
    torch.utils.swap_tensors(experts_of(model).down_proj, nn.Parameter(torch.ones(3, 5, 2)))
    assert_equal(cache.extract(model), extract_weights(model))


def test_parts_of_a_model_that_is_gone_say_so():
    model = mixture()
    weights = known(model).extract(model)
    part = next(weight for weight in weights if ".experts." in weight.spec.name)
    del weights
    del model
    gc.collect()
    with pytest.raises(WeightMismatchError, match="is gone"):
        part.read()


def test_adapters_that_are_added_later_are_merged():
    peft = pytest.importorskip("peft")
    model = TwoLinears()
    cache = known(model)
    peft.inject_adapter_in_model(peft.LoraConfig(target_modules=["first"]), model)
    with torch.no_grad():
        model.first.lora_B["default"].weight.fill_(1.0)
    assert_equal(cache.extract(model), extract_weights(model))


def test_a_state_dict_of_temporary_tensors_is_read_anew_each_time():
    model = Doubling(2, 2)
    cache = known(model)
    assert_equal(cache.extract(model), extract_weights(model))


def test_nothing_of_a_known_model_is_referred_to():
    model = TwoLinears()
    cache = known(model)
    parameter = weakref.ref(model.first.weight)
    del model
    gc.collect()
    assert parameter() is None
    assert cache is not None


def test_a_known_model_can_swap_its_tensors():
    model = TwoLinears()
    cache = known(model)
    torch.utils.swap_tensors(model.first.weight, nn.Parameter(torch.ones(4, 4)))
    assert_equal(cache.extract(model), extract_weights(model))


def hooked(model: TwoLinears) -> None:
    factor = torch.tensor(2.0)

    def multiply(module, state, prefix, metadata):
        state[f"{prefix}bias"] = state[f"{prefix}bias"] * factor

    model.first.register_state_dict_post_hook(multiply)
    model.factor = factor


def with_a_method_in_front(model: TwoLinears) -> None:
    model.factor = torch.tensor(2.0)
    saved = model.state_dict
    model.state_dict = lambda *args, **kwargs: {
        name: value * model.factor for name, value in saved(*args, **kwargs).items()
    }


@pytest.mark.parametrize("makes", [hooked, with_a_method_in_front])
def test_what_else_than_its_tensors_makes_a_state_dict_is_asked_each_time(makes):
    model = TwoLinears()
    makes(model)
    cache = known(model)
    model.factor.fill_(3.0)
    assert_equal(cache.extract(model), extract_weights(model))


def test_names_that_wrappers_make_equal_are_not_remembered():
    model = nn.ModuleDict({"x": nn.Linear(1, 1)})
    model["x"].add_module("_orig_mod", nn.Linear(1, 1))
    cache = known(model)
    assert_equal(cache.extract(model), extract_weights(model))


def test_values_that_only_a_tensordict_knows_are_read_anew():
    tensordict = pytest.importorskip("tensordict")
    model = nn.Module()
    model.held = tensordict.TensorDictParams(tensordict.TensorDict({"a": torch.zeros(2)}))
    cache = known(model)
    with model.held.unlock_():
        model.held["a"] = torch.ones(2)
    assert_equal(cache.extract(model), extract_weights(model))


def test_a_scripted_model_is_extracted():
    model = torch.jit.script(nn.Linear(2, 2))
    cache = known(model)
    assert_equal(cache.extract(model), extract_weights(model))


def test_a_sparse_buffer_that_is_not_sent_does_no_harm():
    model = TwoLinears()
    model.register_buffer("mask", torch.eye(2).to_sparse(), persistent=False)
    cache = known(model)
    assert_equal(cache.extract(model), extract_weights(model))


def test_another_thread_that_extracts_another_model_meanwhile_does_not_change_whose_weights_come(
    monkeypatch,
):
    one, other = nn.Linear(2, 2), nn.Linear(2, 2)
    cache = known(one)
    holds_for = extraction_cache._Known.holds_for

    def and_then_comes_another(self, module):
        found = holds_for(self, module)
        if module is one:
            cache.extract(other)
        return found

    monkeypatch.setattr(extraction_cache._Known, "holds_for", and_then_comes_another)
    assert_equal(cache.extract(one), extract_weights(one))


def test_an_attribute_in_front_of_a_parameter_is_not_its_value():
    model = TwoLinears()
    cache = known(model)
    model.first.__dict__["weight"] = torch.ones(4, 4)
    assert_equal(cache.extract(model), extract_weights(model))


def test_a_model_without_weights_is_refused():
    with pytest.raises(ConfigurationError, match="no weights to send"):
        ExtractionCache().extract(nn.Identity())
