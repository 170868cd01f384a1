"""Names of a push against a server's: what it would ignore, what would stay old, and no alarm else.

The runtime names are those that SGLang 0.5.23 showed for a Llama and for a tied Qwen2.
"""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weight_update.engines.names import Loader, compare_names
from weight_update.engines.sglang.names import (
    RuntimeNames,
    are_names_known,
    check_names,
    runtime_names,
    sign_of_quantisation,
)
from weight_update.facts import Digests

LAYER = "model.layers.0"
CHECKPOINT = [
    "model.embed_tokens.weight",
    *(f"{LAYER}.self_attn.{letter}_proj.weight" for letter in "qkvo"),
    *(f"{LAYER}.mlp.{kind}_proj.weight" for kind in ("gate", "up", "down")),
    f"{LAYER}.input_layernorm.weight",
    f"{LAYER}.post_attention_layernorm.weight",
    "model.norm.weight",
]
FUSED = [
    "model.embed_tokens.weight",
    f"{LAYER}.self_attn.qkv_proj.weight",
    f"{LAYER}.self_attn.o_proj.weight",
    f"{LAYER}.mlp.gate_up_proj.weight",
    f"{LAYER}.mlp.down_proj.weight",
    f"{LAYER}.input_layernorm.weight",
    f"{LAYER}.post_attention_layernorm.weight",
    "model.norm.weight",
]
HEAD = "lm_head.weight"
TIED = RuntimeNames(frozenset(FUSED), tied=True)
UNTIED = RuntimeNames(frozenset([*FUSED, HEAD]), tied=False)
LLAMA, QWEN2, QWEN3 = ["LlamaForCausalLM"], ["Qwen2ForCausalLM"], ["Qwen3ForCausalLM"]
BARE = [name.removeprefix("model.") for name in CHECKPOINT]


def without(names: list[str], *dropped: str) -> list[str]:
    return [name for name in names if name not in dropped]


@pytest.mark.parametrize(
    ("names", "runtime", "architectures"),
    [
        ([*CHECKPOINT, HEAD], UNTIED, LLAMA),
        (CHECKPOINT, TIED, LLAMA),
        ([*CHECKPOINT, HEAD], TIED, LLAMA),
        (CHECKPOINT, RuntimeNames(UNTIED.names, tied=True), QWEN2),
        ([*CHECKPOINT, f"{LAYER}.self_attn.rotary_emb.inv_freq"], TIED, QWEN2),
        ([*CHECKPOINT, f"{LAYER}.self_attn.attn.k_scale"], TIED, LLAMA),
        (BARE, TIED, QWEN3),
        (FUSED, TIED, LLAMA),
    ],
    ids=[
        *("untied", "tied", "tied, head sent", "a copy of the embedding", "rotary tables"),
        *("KV scales", "Qwen3 adds model.", "fused names"),
    ],
)
def test_names_that_load_raise_no_alarm(
    names: list[str], runtime: RuntimeNames, architectures: list[str]
) -> None:
    found = check_names(names, runtime, architectures)

    assert (found.known, found.unknown, found.lacking) == (True, (), ())


@pytest.mark.parametrize(
    ("names", "architectures", "unknown", "lacking"),
    [
        ([*CHECKPOINT, HEAD, "v_head.weight"], LLAMA, ["v_head.weight"], []),
        (CHECKPOINT, LLAMA, [], [HEAD]),
        (
            without([*CHECKPOINT, HEAD], "model.norm.weight"),
            LLAMA,
            [],
            ["model.norm.weight"],
        ),
        (
            [*without(CHECKPOINT, "model.norm.weight"), HEAD, "model.nrom.weight"],
            QWEN2,
            ["model.nrom.weight"],
            ["model.norm.weight"],
        ),
        (
            [*CHECKPOINT, HEAD, "model.layers.1.mlp.up_proj.weight"],
            LLAMA,
            ["model.layers.1.mlp.up_proj.weight"],
            [],
        ),
        ([*BARE, HEAD], LLAMA, sorted(BARE), sorted(FUSED)),
        (
            [f"policy.{name}" for name in CHECKPOINT] + [HEAD],
            QWEN3,
            sorted(f"policy.{name}" for name in CHECKPOINT),
            sorted(FUSED),
        ),
    ],
    ids=[
        *("a value head", "the head of an untied model", "a norm left out", "a slip"),
        *("a layer more", "model. is missing", "a wrapper's prefix"),
    ],
)
def test_names_that_do_not_load_are_told(
    names: list[str], architectures: list[str], unknown: list[str], lacking: list[str]
) -> None:
    found = check_names(names, UNTIED, architectures)

    assert found.known
    assert list(found.unknown) == unknown
    assert list(found.lacking) == lacking


@pytest.mark.parametrize(
    ("ranks", "tied"),
    [
        (({HEAD: "a", "model.embed_tokens.weight": "b"},), False),
        (({HEAD: "a", "model.embed_tokens.weight": "a"},), True),
        (({"model.embed_tokens.weight": "a"},), True),
        (({HEAD: "a"},), False),
        (({HEAD: "a", "model.embed_tokens.weight": "a"}, {HEAD: "a"}), False),
        ((), True),
    ],
)
def test_a_server_is_tied_when_it_shows_no_head_of_its_own(
    ranks: tuple[dict[str, str], ...], tied: bool
) -> None:
    assert runtime_names(Digests(ranks)).tied is tied


def test_the_names_of_all_ranks_are_the_servers() -> None:
    found = runtime_names(Digests(({"a": "1", "b": "2"}, {"b": "3", "c": "4"})))

    assert found.names == {"a", "b", "c"}


@pytest.mark.parametrize(
    ("info", "architectures", "known"),
    [
        ({}, LLAMA, True),
        ({}, ["MistralForCausalLM"], True),
        ({}, QWEN3, True),
        ({}, ["Qwen3MoeForCausalLM"], True),
        ({}, ["FalconForCausalLM"], False),
        ({}, [], False),
        ({"quantization": "fp8"}, LLAMA, False),
        ({"enable_lora": True}, LLAMA, False),
        ({"speculative_algorithm": "EAGLE"}, LLAMA, False),
        ({"quantization": None, "enable_lora": False, "speculative_algorithm": None}, QWEN2, True),
    ],
)
def test_names_are_known_of_plain_models_of_architectures_that_were_read(
    info: dict[str, Any], architectures: list[str], known: bool
) -> None:
    assert are_names_known(info, architectures) is known


@given(st.sets(st.sampled_from([*CHECKPOINT, *FUSED, HEAD, "x"])), st.booleans(), st.booleans())
def test_a_name_is_unknown_or_its_home_is_not_lacking(
    names: set[str], tied: bool, prefixes: bool
) -> None:
    unknown, lacking = compare_names(
        names, UNTIED.names, tied=tied, loader=Loader(prefixes=prefixes)
    )

    assert set(unknown) <= names
    assert set(lacking) <= UNTIED.names
    assert not set(lacking) & names


def test_a_text_only_push_to_a_vision_language_server_names_both_architectures() -> None:
    kind = "Gemma3ForConditionalGeneration"
    runtime = RuntimeNames(
        frozenset(
            [f"language_model.{name}" for name in FUSED]
            + ["vision_tower.vision_model.post_layernorm.weight"]
        ),
        tied=True,
    )

    found = check_names(CHECKPOINT, runtime, [kind])

    assert set(found.unknown) == set(CHECKPOINT)
    for part in (kind, "'language_model.', 'vision_tower.'", "under 'model.'", "ForCausalLM"):
        assert part in found.remark


def test_experts_of_a_mixture_find_the_stacks_of_the_server() -> None:
    experts = [
        f"{LAYER}.mlp.experts.{expert}.{name}_proj.weight"
        for expert in range(2)
        for name in ("gate", "up", "down")
    ]
    stacks = [f"{LAYER}.mlp.experts.w13_weight", f"{LAYER}.mlp.experts.w2_weight"]
    runtime = RuntimeNames(frozenset(stacks), tied=False)

    found = check_names(experts, runtime, ["Qwen3MoeForCausalLM"])
    assert (found.unknown, found.lacking) == ((), ())
    assert check_names(experts, runtime, LLAMA).unknown == tuple(sorted(experts))


def test_layers_of_a_draft_model_are_no_slip() -> None:
    runtime = RuntimeNames(frozenset([f"{LAYER}.input_layernorm.weight"]), tied=False)
    names = [f"model.layers.{index}.input_layernorm.weight" for index in range(2)]

    assert check_names(names, runtime, ["DeepseekV3ForCausalLM"]).unknown == ()
    assert check_names(names, runtime, LLAMA).unknown == (names[1],)


@pytest.mark.parametrize("fused", [True, False])
def test_a_shared_expert_is_one_of_the_others_where_the_server_fuses_it(fused: bool) -> None:
    place = f"{LAYER}.mlp.shared_experts"
    own = [f"{place}.gate_up_proj.weight", f"{place}.down_proj.weight"]
    stacks = [f"{LAYER}.mlp.experts.w13_weight", f"{LAYER}.mlp.experts.w2_weight"]
    runtime = RuntimeNames(frozenset(stacks if fused else [*stacks, *own]), tied=False)
    names = [
        f"{LAYER}.mlp.{expert}.{kind}_proj.weight"
        for expert in ("experts.0", "shared_experts")
        for kind in ("gate", "up", "down")
    ]

    found = check_names(names, runtime, ["DeepseekV3ForCausalLM"])

    assert (found.unknown, found.lacking) == ((), ())


@pytest.mark.parametrize(
    "buffer",
    [
        "model.normalizer",
        f"{LAYER}.input_layernorm.gemma_weight",
        "vision_tower.vision_model.embeddings.position_ids",
    ],
)
def test_buffers_that_a_server_makes_itself_are_not_lacking(buffer: str) -> None:
    runtime = RuntimeNames(frozenset([*FUSED, buffer]), tied=True)

    assert check_names(CHECKPOINT, runtime, ["Gemma2ForCausalLM"]).lacking == ()


@pytest.mark.parametrize("name", ["o_proj.weight_scale", "experts.w13_weight_scale"])
def test_scales_are_a_sign_of_quantisation(name: str) -> None:
    assert sign_of_quantisation([f"{LAYER}.{name}"]) == f"{LAYER}.{name}"
