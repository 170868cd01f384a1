"""Rules of the conversion: experts are views, unknown layouts are refused, tables stay at home."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch
from torch import nn

from weight_update.errors import ConfigurationError
from weight_update.weights.extract import extract_weights, from_state_dict
from weight_update.weights.families.convert import Converter, as_checkpoint
from weight_update.weights.families.layouts import LAYOUTS
from weight_update.weights.specs import TensorSpec, Weight

from .tiny import meta_model, tiny_model

EXPERTS, SHARE, COLUMNS = 4, 3, 5
STACK = "model.layers.0.mlp.experts.gate_up_proj"


def names(model: nn.Module) -> list[str]:
    return [weight.spec.name for weight in extract_weights(model)]


class Parent:
    """A stack of distinct values whose reads are counted, as of a merged or gathered weight."""

    def __init__(self, *, rows: bool) -> None:
        shape = (EXPERTS, 2 * SHARE, COLUMNS)
        self.value = torch.arange(EXPERTS * 2 * SHARE * COLUMNS, dtype=torch.float32).view(shape)
        self.made: list[Any] = []
        self.asked: list[object] = []
        spec = TensorSpec(STACK, torch.float32, shape)
        cheap = self.read_rows if rows else None
        self.weight = Weight(spec, torch.device("cpu"), self.read, cheap)

    def read(self) -> torch.Tensor:
        return self._made("all", self.value.clone())

    def read_rows(self, first: int, end: int) -> torch.Tensor:
        return self._made((first, end), self.value[first:end].clone())

    def _made(self, what: object, value: torch.Tensor) -> torch.Tensor:
        self.asked.append(what)
        self.made.append(weakref.ref(value))
        return value

    def parts(self) -> list[Weight]:
        return list(as_checkpoint([self.weight], meta_model("qwen3-moe")))


def test_each_expert_gets_its_own_rows_under_its_own_names() -> None:
    parent = Parent(rows=False)

    found = {part.spec.name: part.read() for part in parent.parts()}

    assert len(found) == 2 * EXPERTS
    for expert in range(EXPERTS):
        prefix = f"model.layers.0.mlp.experts.{expert}"
        gate, up = found[f"{prefix}.gate_proj.weight"], found[f"{prefix}.up_proj.weight"]
        assert torch.equal(gate, parent.value[expert, :SHARE])
        assert torch.equal(up, parent.value[expert, SHARE:])


def test_parts_of_a_plain_tensor_are_contiguous_views() -> None:
    model = tiny_model("qwen3-moe")
    parent = dict(model.named_parameters())[STACK].untyped_storage()

    parts = [w.read() for w in extract_weights(model) if ".0.mlp.experts.1." in w.spec.name]

    assert [part.untyped_storage().data_ptr() == parent.data_ptr() for part in parts[:2]] == [
        True,
        True,
    ]
    assert all(part.is_contiguous() for part in parts)


def test_where_rows_are_cheaper_an_expert_is_read_once_and_no_other_value_is_held() -> None:
    parent = Parent(rows=True)

    for part in parent.parts():
        part.read()
        assert sum(made() is not None for made in parent.made) <= 1

    assert parent.asked == [(expert, expert + 1) for expert in range(EXPERTS)]
    assert all(made() is None for made in parent.made)


def test_where_they_are_not_the_whole_value_is_read_once_and_let_go_after_its_last_part() -> None:
    parent = Parent(rows=False)

    for part in parent.parts():
        part.read()

    assert parent.asked == ["all"]
    assert parent.made[0]() is None


def test_a_second_round_reads_the_value_anew_though_the_first_was_broken_off() -> None:
    parent = Parent(rows=False)
    parts = parent.parts()
    parts[0].read()
    parent.value += 1.0

    assert torch.equal(parts[0].read(), parent.value[0, :SHARE])


def test_another_parent_takes_the_place_of_a_value_that_was_not_read_to_its_end() -> None:
    first, second = Parent(rows=False), Parent(rows=False)
    parts = list(as_checkpoint([first.weight, second.weight], meta_model("qwen3-moe")))
    parts[0].read()
    parts[2 * EXPERTS].read()

    assert first.made[0]() is None


def test_values_that_cost_nothing_are_not_held() -> None:
    parent = Parent(rows=False)
    convert = Converter(meta_model("qwen3-moe"), hold=False)
    next(convert(parent.weight)).read()

    assert parent.made[0]() is None


def test_parts_are_read_in_the_turn_of_their_parent() -> None:
    spec = TensorSpec(STACK, torch.float32, (EXPERTS, 2 * SHARE, COLUMNS))
    gathered = Weight(spec, torch.device("cpu"), lambda: torch.zeros(spec.shape), collective=True)

    assert all(part.collective for part in as_checkpoint([gathered], meta_model("qwen3-moe")))


@pytest.mark.parametrize("family", ["mixtral", "gpt-oss", "qwen3-vl-moe"])
def test_experts_that_are_stacked_in_an_unknown_way_are_refused(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = meta_model(family)
    monkeypatch.delitem(LAYOUTS, model.config.model_type)

    with pytest.raises(ConfigurationError, match="stacks experts") as refused:
        extract_weights(model)

    assert repr(model.config.model_type) in str(refused.value)
    assert refused.value.phase == "plan"


def test_a_stack_that_a_known_family_does_not_have_is_refused() -> None:
    model = meta_model("qwen3-moe")
    model.model.layers[0].mlp.experts.extra = nn.Parameter(torch.zeros(4, 2, 2))

    with pytest.raises(ConfigurationError, match=r"experts\.extra"):
        extract_weights(model)


def test_a_dense_model_of_an_unknown_family_keeps_its_names(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = meta_model("gpt-neox")
    monkeypatch.delitem(LAYOUTS, "gpt_neox")

    assert names(model) == list(model.state_dict())


def test_stacks_of_a_module_that_is_not_of_transformers_are_its_own_affair() -> None:
    model = nn.Module()
    model.experts = nn.ParameterDict({"gate_up_proj": nn.Parameter(torch.zeros(2, 4, 3))})

    assert names(model) == ["experts.gate_up_proj"]


def test_a_model_beside_a_value_head_is_converted_under_its_prefix() -> None:
    module = nn.Module()
    module.policy = tiny_model("mixtral")
    module.value = nn.Linear(4, 1)

    weights = from_state_dict(module.state_dict(keep_vars=True))
    found = [weight.spec.name for weight in as_checkpoint(weights, module)]

    assert "policy.model.layers.0.block_sparse_moe.experts.0.w1.weight" in found
    assert found[-2:] == ["value.weight", "value.bias"]


def test_names_that_save_pretrained_leaves_out_are_left_out() -> None:
    model = tiny_model("llama")
    model._keys_to_ignore_on_save = {"model.norm.weight"}

    assert "model.norm.weight" not in names(model)


class Odds(nn.Module):
    """Buffers of every kind."""

    def __init__(self) -> None:
        super().__init__()
        self.rotary_emb = nn.Module()
        self.rotary_emb.register_buffer("inv_freq", torch.ones(2))
        self.register_buffer("position_ids", torch.arange(4))
        self.register_buffer("table", torch.ones(2), persistent=False)
        self.gate = nn.Linear(2, 2, bias=False)
        self.gate.register_buffer("e_score_correction_bias", torch.ones(2))
        self.norm = nn.BatchNorm1d(2)
        self.mtp = nn.Module()
        self.mtp.lm_head = nn.Linear(2, 2, bias=False)


def test_buffers_follow_one_rule_computed_tables_stay_and_all_else_is_sent() -> None:
    assert [weight.spec.name for weight in extract_weights(Odds())] == [
        "gate.weight",
        "gate.e_score_correction_bias",
        "norm.weight",
        "norm.bias",
        "norm.running_mean",
        "norm.running_var",
        "norm.num_batches_tracked",
        "mtp.lm_head.weight",
    ]
