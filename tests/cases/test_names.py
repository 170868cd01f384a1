"""Section H of the case list: names."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict.nn import TensorDictModule
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torchrl.modules import ActorCriticWrapper, ActorValueOperator, ValueOperator
from torchrl.modules.llm import TransformersWrapper
from transformers import MixtralConfig, MixtralForCausalLM

from tests.integration import kit
from tests.integration.kit import PAUSE
from weight_update import (
    ConfigurationError,
    WeightMismatchError,
    WeightUpdateError,
    get_model_metadata,
)
from weight_update.reference_engine import ReferenceEngine
from weight_update.weights.extract import extract_weights
from weight_update.weights.fitting import with_dtype
from weight_update.weights.name_map import renamed
from weight_update.weights.saved_state_dict import SavedStateDict

from .trial import NEW

HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"

# ---- C14


def test_c14_a_tied_model_sends_the_embedding_and_no_head() -> None:
    names = list(get_model_metadata(kit.qwen2(0, tied=True)))
    assert names.count(EMBEDDING) == 1
    assert HEAD not in names


def test_c14_an_untied_head_of_equal_values_is_sent(engine: ReferenceEngine) -> None:
    model = copy.deepcopy(kit.llama(1))
    model.lm_head.weight = nn.Parameter(model.model.embed_tokens.weight.detach().clone())
    assert {HEAD, EMBEDDING} <= set(get_model_metadata(model))
    with kit.make_sender(engine) as sender:
        sender.update_weights(model)
    assert kit.served(engine) == kit.greedy(model)


class Nested(nn.Module):
    """A vision language model's shape: the text model inside, the flag in its sub-config."""

    def __init__(self, tied: bool) -> None:
        super().__init__()
        self.language_model = kit.qwen2(0, tied)
        self.visual = nn.Linear(4, 4)
        self.mtp = nn.ModuleDict({"lm_head": nn.Linear(32, 64, bias=False)})


@pytest.mark.parametrize("tied", [False, True])
def test_c14_what_is_tied_inside_a_larger_model_travels_once_and_other_heads_are_kept(
    tied: bool,
) -> None:
    names = list(get_model_metadata(Nested(tied)))
    assert (f"language_model.{HEAD}" in names) is not tied
    assert f"language_model.{EMBEDDING}" in names
    assert "mtp.lm_head.weight" in names


def test_c14_a_tied_engine_takes_a_push_with_and_without_the_head() -> None:
    with ReferenceEngine(kit.qwen2(0, tied=True)) as engine:
        for weights in (kit.qwen2(1, tied=True), dict(kit.qwen2(2, tied=True).state_dict())):
            with kit.make_sender(engine) as sender:
                report = sender.update_weights(weights)
            assert report.engines[engine.url].state is NEW
        assert kit.served(engine) == kit.greedy(kit.qwen2(2, tied=True))


# ---- C15


class Policy(nn.Module):
    """A trainer's policy class that holds the language model as an attribute."""

    def __init__(self, actor: nn.Module) -> None:
        super().__init__()
        self.actor = actor


def with_checkpointed_layer(model: Any) -> Any:
    model.model.layers[1] = checkpoint_wrapper(model.model.layers[1])
    model.model.layers[0].mlp = torch.compile(model.model.layers[0].mlp)
    return model


WRAPPINGS: dict[str, Callable[[Any], nn.Module]] = {
    "compile(DataParallel(compile))": lambda m: torch.compile(nn.DataParallel(torch.compile(m))),  # type: ignore[dict-item]
    "DataParallel(policy)": lambda m: nn.DataParallel(Policy(m)),
    "policy(compile)": lambda m: Policy(torch.compile(m)),  # type: ignore[arg-type]
    "compile(policy(DataParallel))": lambda m: torch.compile(Policy(nn.DataParallel(m))),  # type: ignore[dict-item]
    "layers": with_checkpointed_layer,
    "DataParallel(layers)": lambda m: nn.DataParallel(with_checkpointed_layer(m)),
}


@pytest.mark.parametrize("wrap", WRAPPINGS.values(), ids=WRAPPINGS.keys())
def test_c15_a_wrapped_model_is_sent_under_the_bare_models_names(
    wrap: Callable[[Any], nn.Module], engine: ReferenceEngine
) -> None:
    wrapped = wrap(copy.deepcopy(kit.llama(1)))
    assert get_model_metadata(wrapped) == get_model_metadata(kit.llama(1))
    kit.push(engine, kit.llama(0))
    kit.push(engine, wrapped)
    assert kit.served(engine) == kit.tokens_of(1)


def td(module: nn.Module) -> TensorDictModule:
    return TensorDictModule(module, in_keys=["tokens"], out_keys=["logits"])


def transformers_wrapper(model: nn.Module) -> TransformersWrapper:
    return TransformersWrapper(model, input_mode="tokens", generate=False, return_log_probs=True)


class WithValueHead(nn.Module):
    """The shape of TRL's policies."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.pretrained_model = model
        self.v_head = nn.Sequential(nn.Linear(32, 8), nn.Linear(8, 1))


POLICIES: dict[str, Callable[[Any], nn.Module]] = {
    "DataParallel(TransformersWrapper(compile))": lambda m: nn.DataParallel(
        transformers_wrapper(torch.compile(m))  # type: ignore[arg-type]
    ),
    "ActorCriticWrapper": lambda m: ActorCriticWrapper(
        td(transformers_wrapper(m)), ValueOperator(kit.qwen2(0, tied=False), in_keys=["hidden"])
    ),
    "ActorValueOperator": lambda m: ActorValueOperator(
        td(m.model), td(m.lm_head), ValueOperator(nn.Linear(32, 1), in_keys=["hidden"])
    ),
    "v_head": WithValueHead,
}


@pytest.mark.parametrize("hold", POLICIES.values(), ids=POLICIES.keys())
def test_c15_the_policy_inside_an_actor_critic_is_sent_without_its_critic(
    hold: Callable[[Any], nn.Module], engine: ReferenceEngine
) -> None:
    kit.push(engine, kit.llama(0))
    kit.push(engine, hold(copy.deepcopy(kit.llama(1))))
    assert kit.served(engine) == kit.tokens_of(1)


def test_c15_two_policies_in_one_module_are_refused_before_the_pause(
    engine: ReferenceEngine,
) -> None:
    both = nn.ModuleDict({"policy": kit.llama(1), "reference": kit.llama(0)})
    log = kit.Log(engine)
    with kit.make_sender(engine) as sender, pytest.raises(ConfigurationError) as caught:
        sender.update_weights(both)
    assert "policy (LlamaForCausalLM), reference (LlamaForCausalLM)" in str(caught.value)
    assert log.count(engine, PAUSE) == 0


def test_c15_a_state_dict_saved_from_a_wrapped_model_lands_under_the_bare_names(
    engine: ReferenceEngine, tmp_path: Path
) -> None:
    wrapped = nn.DataParallel(torch.compile(copy.deepcopy(kit.llama(1))))  # type: ignore[arg-type]
    torch.save({"model": wrapped.state_dict(), "epoch": 3}, tmp_path / "last.pt")
    kit.push(engine, kit.llama(0))
    kit.push(engine, SavedStateDict(tmp_path / "last.pt"))
    assert kit.served(engine) == kit.tokens_of(1)


def test_c15_a_true_child_called_module_keeps_its_name_inside_wrappers() -> None:
    class Holder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.module = nn.Linear(1, 1)
            self.scale = nn.Parameter(torch.ones(1))

    names = ["scale", "module.weight", "module.bias"]
    assert list(get_model_metadata(Holder())) == names
    assert list(get_model_metadata(nn.DataParallel(Holder()))) == names
    assert list(get_model_metadata(torch.compile(Holder()))) == names  # type: ignore[arg-type]


# ---- C16


@pytest.mark.parametrize("family", ["model.language_model.", "language_model.model."])
def test_c16_names_of_another_family_are_refused_before_the_pause_with_the_names(
    family: str, engine: ReferenceEngine
) -> None:
    renamed = {
        name.replace("model.", family, 1): value.detach()
        for name, value in kit.llama(1).state_dict().items()
    }
    log = kit.Log(engine)
    with kit.make_sender(engine) as sender, pytest.raises(WeightUpdateError) as caught:
        sender.update_weights(renamed)
    assert family in str(caught.value)
    assert log.count(engine, PAUSE) == 0


TO_VISION = {r"^model\.": "model.language_model."}
TO_TEXT = {r"^model\.language_model\.": "model."}


def test_c16_the_map_between_two_families_goes_there_and_back() -> None:
    weights = extract_weights(kit.llama(1))
    there = list(renamed(weights, TO_VISION))
    back = list(renamed(there, TO_TEXT))
    assert len({weight.spec.name for weight in there}) == len(weights)
    assert "model.language_model.layers.1.mlp.up_proj.weight" in {w.spec.name for w in there}
    assert [weight.spec for weight in back] == [weight.spec for weight in weights]


def test_c16_names_of_another_family_land_through_a_map(engine: ReferenceEngine) -> None:
    state = {w.spec.name: w.read() for w in renamed(extract_weights(kit.llama(1)), TO_VISION)}
    kit.push(engine, kit.llama(0))
    with kit.make_sender(engine, name_map=TO_TEXT) as sender:
        sender.update_weights(state)
        assert kit.served(engine) == kit.tokens_of(1)
        sender.update_weights(iter({**state, **renamed_state(0)}.items()))
    assert kit.served(engine) == kit.tokens_of(0)


def renamed_state(seed: int) -> dict[str, torch.Tensor]:
    return {w.spec.name: w.read() for w in renamed(extract_weights(kit.llama(seed)), TO_VISION)}


# ---- C36


def mixture() -> MixtralForCausalLM:
    torch.manual_seed(0)
    return MixtralForCausalLM(MixtralConfig(**kit.SIZES, num_local_experts=3)).eval()


def test_c36_stacked_experts_become_one_tensor_an_expert() -> None:
    model = mixture()
    stacked = dict(model.named_parameters())
    weights = {weight.spec.name: weight.read() for weight in extract_weights(model)}
    assert not [name for name in weights if name.endswith(("gate_up_proj", "down_proj"))]
    for layer in range(2):
        experts = f"model.layers.{layer}.block_sparse_moe.experts"
        own = f"model.layers.{layer}.mlp.experts"
        for expert in range(3):
            gate, up = stacked[f"{own}.gate_up_proj"][expert].detach().chunk(2)
            down = stacked[f"{own}.down_proj"][expert].detach()
            for part, value in (("w1", gate), ("w3", up), ("w2", down)):
                assert torch.equal(weights[f"{experts}.{expert}.{part}.weight"], value)


def test_c36_the_parts_of_stacked_experts_are_no_copies() -> None:
    model = mixture()
    places = {p.untyped_storage().data_ptr() for p in model.parameters()}
    parts = [w.read() for w in extract_weights(model) if ".experts." in w.spec.name]
    assert len(parts) == 2 * 3 * 3
    assert {part.untyped_storage().data_ptr() for part in parts} <= places


def test_c36_experts_under_names_that_the_engine_lacks_are_refused_and_not_guessed(
    engine: ReferenceEngine,
) -> None:
    state = {name: value.detach() for name, value in kit.llama(1).state_dict().items()}
    stacked = {f"model.layers.0.mlp.experts.{n}": torch.zeros(4, 8, 4) for n in ("gate_up", "down")}
    log = kit.Log(engine)
    with kit.make_sender(engine) as sender, pytest.raises(WeightUpdateError, match="experts"):
        sender.update_weights({**state, **stacked})
    assert log.count(engine, PAUSE) == 0


# ---- C61


class Buffered(nn.Module):
    """Every kind of buffer that reports name."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(2, 2, bias=False)
        self.norm = nn.BatchNorm1d(2)
        self.register_buffer("inv_freq", torch.ones(2))
        self.register_buffer("e_score_correction_bias", torch.ones(2))
        self.register_buffer("position_ids", torch.arange(4), persistent=False)


def test_c61_parameters_and_persistent_buffers_are_sent_and_counters_keep_their_dtype() -> None:
    cast = (with_dtype(weight, torch.bfloat16) for weight in extract_weights(Buffered()))
    weights = {weight.spec.name: weight.read() for weight in cast}
    tables = {"inv_freq", "position_ids"}  # persistent or not, engines compute them
    assert set(weights) == Buffered().state_dict().keys() - tables
    assert weights["norm.num_batches_tracked"].dtype is torch.int64
    assert weights["e_score_correction_bias"].dtype is torch.bfloat16


def test_c61_a_rotary_table_that_the_engine_computes_itself_stops_no_update(
    engine: ReferenceEngine,
) -> None:
    state = {name: value.detach() for name, value in kit.llama(1).state_dict().items()}
    tables = {f"model.layers.{i}.self_attn.rotary_emb.inv_freq": torch.ones(4) for i in (0, 1)}
    with kit.make_sender(engine) as sender:
        report = sender.update_weights({**state, **tables})
    assert report.engines[engine.url].state is NEW
    assert kit.served(engine) == kit.tokens_of(1)


# ---- C62


def padded(rows: int) -> Any:
    model = copy.deepcopy(kit.llama(1))
    model.resize_token_embeddings(rows)
    return model


def test_c62_a_padded_vocabulary_is_refused_before_the_pause_with_both_numbers(
    engine: ReferenceEngine,
) -> None:
    """The checkpoint's facts are given at connect."""
    with kit.make_sender(engine) as sender:
        sender.init_all_workers_group(get_model_metadata(kit.llama(1)))
        log = kit.Log(engine)
        with pytest.raises(WeightMismatchError) as caught:
            sender.update_weights(padded(72))
        assert "64" in str(caught.value)
        assert "72" in str(caught.value)
        assert log.count(engine, PAUSE) == 0


def test_c62_a_caller_cuts_the_padding_off_when_he_means_to(engine: ReferenceEngine) -> None:
    state = {name: value.detach() for name, value in padded(72).state_dict().items()}
    cut = {n: v[:64] if n in (HEAD, EMBEDDING) else v for n, v in state.items()}
    kit.push(engine, kit.llama(0))
    with kit.make_sender(engine) as sender:
        sender.update_weights(cut)
    assert kit.served(engine) == kit.tokens_of(1)


def test_c62_a_padded_vocabulary_is_refused_before_the_pause_without_metadata(
    engine: ReferenceEngine,
) -> None:
    log = kit.Log(engine)
    with kit.make_sender(engine) as sender, pytest.raises(WeightMismatchError) as caught:
        sender.update_weights(padded(72))
    assert "72" in str(caught.value)
    assert "64" in str(caught.value)
    assert "trim_vocabulary" in str(caught.value)
    assert log.count(engine, PAUSE) == 0


def test_c62_padding_is_cut_off_when_it_is_asked_for(engine: ReferenceEngine) -> None:
    kit.push(engine, kit.llama(0))
    with kit.make_sender(engine, trim_vocabulary=True) as sender:
        sender.update_weights(padded(72))
    assert kit.served(engine) == kit.tokens_of(1)
