"""A model is extracted anew after any change of its tensors, and not without one."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable

import pytest
import torch
from torch import nn

from weight_update.errors import ConfigurationError, WeightMismatchError
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


def known(model: nn.Module, dtype: torch.dtype | None = None) -> tuple[ExtractionCache, object]:
    """A cache that has seen the model, and what it gives for it."""
    cache = ExtractionCache()
    cache.extract(model, dtype=dtype)
    return cache, cache.extract(model, dtype=dtype)


def assert_equal(weights: tuple[Weight, ...], expected: tuple[Weight, ...]) -> None:
    assert [w.spec for w in weights] == [w.spec for w in expected]
    for one, other in zip(weights, expected, strict=True):
        assert torch.equal(one.read(), other.read())


def test_an_unchanged_model_is_not_extracted_again():
    model = TwoLinears()
    cache, weights = known(model)
    assert cache.extract(model) is weights


def test_new_values_in_the_same_tensors_are_read_by_the_known_weights():
    model = TwoLinears()
    cache, _ = known(model)
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
)


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_a_changed_model_is_extracted_anew(change: Callable[[TwoLinears], None]):
    model = TwoLinears()
    cache, _ = known(model)
    change(model)
    assert_equal(cache.extract(model), extract_weights(model))


def test_untying_is_noticed():
    model = TwoLinears()
    tie(model)
    cache, _ = known(model)
    model.second.weight = nn.Parameter(torch.zeros(4, 4))
    assert_equal(cache.extract(model), extract_weights(model))


def test_another_model_of_the_same_shape_is_extracted_anew():
    cache, _ = known(TwoLinears())
    other = TwoLinears()
    assert_equal(cache.extract(other), extract_weights(other))


def test_another_dtype_is_extracted_anew():
    model = TwoLinears()
    cache, _ = known(model, torch.bfloat16)
    assert_equal(cache.extract(model), extract_weights(model))
    assert_equal(
        cache.extract(model, dtype=torch.bfloat16), extract_weights(model, dtype=torch.bfloat16)
    )


def test_adapters_that_are_added_later_are_merged():
    peft = pytest.importorskip("peft")
    model = TwoLinears()
    cache, _ = known(model)
    peft.inject_adapter_in_model(peft.LoraConfig(target_modules=["first"]), model)
    with torch.no_grad():
        model.first.lora_B["default"].weight.fill_(1.0)
    assert_equal(cache.extract(model), extract_weights(model))


def test_a_state_dict_of_temporary_tensors_is_read_anew_each_time():
    class Doubling(nn.Linear):
        def _save_to_state_dict(self, destination, prefix, keep_vars):
            destination[f"{prefix}weight"] = self.weight * 2

    model = Doubling(2, 2)
    cache, _ = known(model)
    assert_equal(cache.extract(model), extract_weights(model))


def test_a_known_model_is_not_kept_alive():
    model = TwoLinears()
    cache, _ = known(model)
    parameter = weakref.ref(model.first.weight)
    del model, _
    gc.collect()
    assert parameter() is None
    assert cache is not None


def test_a_tensor_that_was_replaced_after_planning_is_an_error():
    model = TwoLinears()
    cache, _ = known(model)
    (weight,) = (w for w in cache.extract(model) if w.spec.name == "first.weight")
    del _
    replace_a_parameter(model)
    gc.collect()
    with pytest.raises(WeightMismatchError, match="replaced while an update ran"):
        weight.read()


def test_a_model_without_weights_is_refused():
    with pytest.raises(ConfigurationError, match="no weights to send"):
        ExtractionCache().extract(nn.Identity())
