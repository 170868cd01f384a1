"""Which weights engines fuse into one, and which sets of them are whole (C29)."""

from __future__ import annotations

import pytest

from weight_update.weights.families.fused import group_of, incomplete, set_of

LAYER = "model.layers.3"


def named(*modules: str, leaf: str = "weight") -> list[str]:
    return [f"{LAYER}.{module}.{leaf}" for module in modules]


@pytest.mark.parametrize(
    "modules",
    [
        ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
        ("mlp.gate_proj", "mlp.up_proj"),
        ("self_attn.q_a_proj", "self_attn.kv_a_proj_with_mqa"),
        ("attn.wq_a", "attn.wkv"),
        ("mlp.shared_experts.gate_proj", "mlp.shared_experts.up_proj"),
        ("mlp.experts.7.gate_proj", "mlp.experts.7.up_proj", "mlp.experts.7.down_proj"),
        ("block_sparse_moe.experts.0.w1", "block_sparse_moe.experts.0.w3"),
        ("linear_attn.in_proj_qkv", "linear_attn.in_proj_z"),
        ("linear_attn.in_proj_b", "linear_attn.in_proj_a"),
        ("self_attn.q_conv1d", "self_attn.k_conv1d", "self_attn.v_conv1d"),
        ("self_attn.q_proj", "self_attn.f_a_proj", "self_attn.g_a_proj", "self_attn.b_proj"),
        ("attn.indexer.wk", "attn.indexer.weights_proj"),
        ("vision.attn.q", "vision.attn.k", "vision.attn.v"),
    ],
    ids=lambda modules: modules[0],
)
def test_weights_that_are_fused_are_one_group_with_their_biases_and_scales(
    modules: tuple[str, ...],
) -> None:
    leaves = ("weight", "bias", "weight_scale_inv")
    groups = {group_of(name) for leaf in leaves for name in named(*modules, leaf=leaf)}

    assert len(groups) == 1
    assert None not in groups


def test_layers_and_experts_are_groups_of_their_own() -> None:
    names = [
        f"model.layers.{layer}.{module}.weight"
        for layer in (1, 11)
        for module in ("self_attn.q_proj", "mlp.up_proj", "mlp.experts.1.w1", "mlp.experts.11.w1")
    ]

    assert len({group_of(name) for name in names}) == len(names)


def test_a_weight_and_its_scales_are_a_group_and_a_bias_alone_is_none() -> None:
    weight, scale = named("mlp.down_proj")[0], named("mlp.down_proj", leaf="weight_scale_inv")[0]

    assert group_of(weight) == group_of(scale) is not None
    assert group_of(f"{LAYER}.self_attn.o_proj.bias") is None
    assert group_of("weight") is None


def test_the_experts_of_a_layer_are_one_set_and_fused_expert_tensors_are_none() -> None:
    experts = {set_of(str(group_of(n))) for n in named("mlp.experts.0.w1", "mlp.experts.63.w2")}

    assert experts == {f"{LAYER}.mlp.experts"}
    assert set_of(str(group_of(named("self_attn.q_proj")[0]))) is None
    assert group_of(f"{LAYER}.mlp.experts.gate_up_proj") is None


@pytest.mark.parametrize(
    ("given", "lacking"),
    [
        (("self_attn.q_proj",), ["self_attn.k_proj", "self_attn.v_proj"]),
        (("self_attn.q_proj", "self_attn.v_proj"), ["self_attn.k_proj"]),
        (("mlp.up_proj",), ["mlp.gate_proj"]),
        (("mlp.experts.4.w3", "mlp.experts.4.w2"), ["mlp.experts.4.w1"]),
        (("self_attn.q_a_proj",), ["self_attn.kv_a_proj_with_mqa"]),
        (("self_attn.kv_a_proj_with_mqa",), ["self_attn.q_a_proj"]),
        (("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"), []),
        (("self_attn.q_proj", "self_attn.kv_a_proj_with_mqa"), []),
        (("self_attn.o_proj", "mlp.down_proj", "input_layernorm"), []),
    ],
)
def test_a_part_of_a_set_is_told_from_what_models_always_have(
    given: tuple[str, ...], lacking: list[str]
) -> None:
    torn = incomplete(named(*given))

    assert sorted(name for each in torn for name in each.lacking) == sorted(named(*lacking))


def test_known_names_decide_what_a_set_has() -> None:
    experts = named(*(f"mlp.experts.{i}.{part}" for i in range(3) for part in ("w1", "w2", "w3")))
    biased = [*named("self_attn.q_proj"), *named("self_attn.q_proj", leaf="bias")]

    assert incomplete(named("self_attn.q_proj"), known_names=named("self_attn.q_proj")) == []
    assert incomplete(biased[:1], known_names=biased)[0].lacking == (biased[1],)
    (torn,) = incomplete(experts[:3], known_names=experts)
    assert torn.group == f"{LAYER}.mlp.experts"
    assert set(torn.lacking) == set(experts[3:])


def test_a_layer_is_a_set_where_engines_make_it_anew() -> None:
    weight, bias = named("self_attn.o_proj"), named("self_attn.o_proj", leaf="bias")

    assert incomplete(bias) == incomplete(weight, known_names=weight + bias) == []
    assert incomplete(bias, layers=True)[0].lacking == tuple(weight)
    (torn,) = incomplete(weight, known_names=weight + bias, layers=True)
    assert torn.lacking == tuple(bias)
    assert incomplete(weight + bias, known_names=weight + bias, layers=True) == []
    assert incomplete(weight, known_names=weight, layers=True) == []
    names = named("mixer", leaf="A_log") + named("mixer", leaf="D")
    assert incomplete(names[:1], known_names=names, layers=True)[0].lacking == (names[1],)


def test_names_that_are_not_known_are_judged_by_what_models_have() -> None:
    torn = incomplete(named("self_attn.q_proj"), known_names=["model.norm.weight"])

    assert torn[0].lacking == tuple(named("self_attn.k_proj", "self_attn.v_proj"))


def test_only_halves_of_latent_attention_are_lost_by_every_engine() -> None:
    torn = incomplete(named("self_attn.q_a_proj", "mlp.up_proj"))

    assert {each.given[0]: each.halves_are_lost for each in torn} == {
        f"{LAYER}.self_attn.q_a_proj.weight": True,
        f"{LAYER}.mlp.up_proj.weight": False,
    }
