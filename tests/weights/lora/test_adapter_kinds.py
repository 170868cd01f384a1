"""Every kind of adapter that PEFT can merge, on every kind of layer (C70); others are refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import peft
import pytest
import torch
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel, Qwen3MoeConfig, Qwen3MoeForCausalLM

from weight_update.errors import ConfigurationError
from weight_update.weights.extract import extract_weights

TOKENS = torch.tensor([[1, 5, 9, 2, 30, 7]])
LINEAR = ["q_proj", "v_proj", "down_proj"]


def adapted(model: nn.Module, settings: peft.PeftConfig) -> Any:
    """A model whose adapters were trained a little."""
    adapted = peft.get_peft_model(model, settings)
    torch.manual_seed(7)
    with torch.no_grad():
        for parameter in adapted.parameters():
            if parameter.requires_grad:
                parameter.add_(0.1 * torch.randn_like(parameter))
    return adapted.eval()


def payload(model: nn.Module) -> dict[str, torch.Tensor]:
    return {weight.spec.name: weight.read() for weight in extract_weights(model)}


@torch.no_grad()
def computed(model: nn.Module, given: torch.Tensor = TOKENS) -> torch.Tensor:
    result = model(given)
    return getattr(result, "logits", result)


def check(model: nn.Module, make: Callable[[int], nn.Module], given: torch.Tensor = TOKENS) -> None:
    """A plain model with the payload computes what ``model`` does, which is unlike its base."""
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    sent = payload(model)
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    expected, served = computed(model, given), make(99)
    served.load_state_dict(sent, strict=True)
    torch.testing.assert_close(computed(served, given), expected, rtol=1e-5, atol=1e-5)
    assert (computed(make(0), given) - expected).abs().max() > 1e-2


KINDS: dict[str, Callable[[], peft.PeftConfig]] = {
    "AdaLoRA": lambda: peft.AdaLoraConfig(target_modules=LINEAR, total_step=10),
    "FourierFT": lambda: peft.FourierFTConfig(target_modules=LINEAR, n_frequency=10),
    "HRA": lambda: peft.HRAConfig(target_modules=LINEAR, r=4),
    "IA3": lambda: peft.IA3Config(target_modules=LINEAR, feedforward_modules=["down_proj"]),
    "LN tuning": lambda: peft.LNTuningConfig(target_modules=["input_layernorm", "norm"]),
    "LoHa": lambda: peft.LoHaConfig(target_modules=LINEAR),
    "LoKr": lambda: peft.LoKrConfig(target_modules=LINEAR),
    "MiSS": lambda: peft.MissConfig(target_modules=LINEAR, r=4),
    "OFT": lambda: peft.OFTConfig(target_modules=LINEAR, oft_block_size=4, r=0),
    "RandLoRA": lambda: peft.RandLoraConfig(target_modules=LINEAR, r=4),
    "trained tokens": lambda: peft.TrainableTokensConfig(
        target_modules=["embed_tokens"], token_indices=[1, 5, 31]
    ),
    "VeRA": lambda: peft.VeraConfig(target_modules=["q_proj", "o_proj"], r=4),
}


@pytest.mark.parametrize("kind", KINDS)
def test_what_peft_can_merge_reaches_the_engine(make_llama, kind: str) -> None:
    def make(seed: int) -> nn.Module:
        return make_llama(seed=seed, attention_bias=True)

    check(adapted(make(0), KINDS[kind]()), make)


def test_disabled_adapters_of_any_kind_leave_the_base(make_llama) -> None:
    model = adapted(make_llama(), KINDS["LoHa"]())
    model.base_model.disable_adapter_layers()

    sent = payload(model)

    assert all(torch.equal(sent[name], value) for name, value in make_llama().state_dict().items())


def test_two_kinds_of_adapters_in_one_model_are_both_merged(make_llama) -> None:
    settings = peft.LoraConfig(target_modules=["q_proj"], lora_alpha=16)
    model = peft.get_peft_model(make_llama(), settings, mixed=True)
    model.add_adapter("second", peft.LoHaConfig(target_modules=["q_proj", "up_proj"]))
    model.set_adapter(["default", "second"])
    torch.manual_seed(7)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(0.1 * torch.randn_like(parameter))

    check(model.eval(), lambda seed: make_llama(seed=seed))


# -- layers that are no nn.Linear ----------------------------------------------------------


def gpt2(seed: int = 0) -> nn.Module:
    """Its projections are transposed."""
    torch.manual_seed(seed)
    sizes = {"vocab_size": 32, "n_positions": 16, "n_embd": 16, "n_layer": 2, "n_head": 2}
    special = {"bos_token_id": None, "eos_token_id": None}
    config = GPT2Config(**sizes, **special, tie_word_embeddings=False, initializer_range=0.2)
    return GPT2LMHeadModel(config).eval()


@pytest.mark.parametrize("more", [{}, {"use_dora": True}], ids=["LoRA", "DoRA"])
def test_transposed_layers_are_merged_transposed(more: dict[str, Any]) -> None:
    settings = peft.LoraConfig(
        r=4, target_modules=["c_attn", "c_proj"], fan_in_fan_out=True, **more
    )

    check(adapted(gpt2(), settings), gpt2)


class Convolutions(nn.Module):
    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.wide, self.point = nn.Conv2d(3, 4, 3), nn.Conv2d(4, 4, 1)
        self.line = nn.Conv1d(4, 4, 2)

    def forward(self, given: torch.Tensor) -> torch.Tensor:
        return self.line(self.point(self.wide(given)).flatten(2))


@pytest.mark.parametrize("more", [{}, {"use_dora": True}], ids=["LoRA", "DoRA"])
def test_convolutions_are_merged(more: dict[str, Any]) -> None:
    settings = peft.LoraConfig(r=2, lora_alpha=8, target_modules=["wide", "point", "line"], **more)
    torch.manual_seed(1)

    check(adapted(Convolutions(), settings), Convolutions, torch.randn(2, 3, 8, 8))


# -- experts, adapted by the names of their parameters -------------------------------------

EXPERTS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj", "mlp.gate.weight"]


class SquareExperts(nn.Module):
    """Nothing but a flag tells in which order two equal dimensions are."""

    def __init__(self, seed: int = 0, *, is_transposed: bool = False) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.is_transposed = is_transposed
        self.weight = nn.Parameter(torch.randn(3, 8, 8))

    def forward(self, given: torch.Tensor) -> torch.Tensor:
        return given @ self.weight


def mixture(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    config = Qwen3MoeConfig(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=24,
        moe_intermediate_size=8,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        num_experts=4,
        num_experts_per_tok=2,
        initializer_range=0.2,
    )
    return Qwen3MoeForCausalLM(config).eval()


def test_experts_are_merged_one_at_a_time_under_their_own_names() -> None:
    settings = peft.LoraConfig(r=2, target_modules=["q_proj"], target_parameters=EXPERTS)
    model = adapted(mixture(), settings)
    merged = adapted(mixture(), settings).merge_and_unload()

    sent, expected = payload(model), payload(merged)

    assert list(sent) == list(expected)
    assert any(".experts.3.down_proj." in name for name in sent)
    for name, value in expected.items():
        torch.testing.assert_close(sent[name], value, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(computed(merged), computed(model), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("is_transposed", [False, True])
def test_square_experts_are_merged_the_way_round_that_peft_has_them(is_transposed: bool) -> None:
    def make(seed: int) -> nn.Module:
        return nn.Sequential(SquareExperts(seed, is_transposed=is_transposed))

    settings = peft.LoraConfig(r=2, lora_alpha=8, target_modules=[], target_parameters=["0.weight"])
    torch.manual_seed(1)

    check(adapted(make(0), settings), make, torch.randn(3, 5, 8))


def test_some_experts_are_read_without_the_others() -> None:
    settings = peft.LoraConfig(r=2, target_modules=[], target_parameters=["0.weight"])
    (weight,) = extract_weights(adapted(nn.Sequential(SquareExperts()), settings))

    assert weight.rows is not None
    assert torch.equal(weight.rows(1, 3), weight.read()[1:3])


# -- tied embeddings -----------------------------------------------------------------------

TIED = {
    "LoRA on both": {"target_modules": ["embed_tokens"], "ensure_weight_tying": True},
    "both trained whole": {"modules_to_save": ["embed_tokens"], "ensure_weight_tying": True},
    "trained tokens": {"trainable_token_indices": [0, 9, 31]},
}


@pytest.mark.parametrize("kind", TIED)
def test_a_tied_weight_that_changes_alike_is_sent_once(make_llama, kind: str) -> None:
    def make(seed: int) -> nn.Module:
        return make_llama(seed=seed, tie_word_embeddings=True)

    model = adapted(make(0), peft.LoraConfig(**{"target_modules": ["q_proj"], **TIED[kind]}))
    sent, served = payload(model), make(99)
    assert "lm_head.weight" not in sent

    served.load_state_dict(sent, strict=False)

    torch.testing.assert_close(computed(served), computed(model), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("module", ["embed_tokens", "lm_head"])
def test_a_trained_copy_of_one_of_two_tied_weights_is_refused(make_llama, module: str) -> None:
    settings = peft.LoraConfig(target_modules=["q_proj"], modules_to_save=[module])
    model = adapted(make_llama(tie_word_embeddings=True), settings)

    with pytest.raises(ConfigurationError, match=r"embed_tokens.*lm_head.*tied"):
        extract_weights(model)


# -- what cannot be merged -----------------------------------------------------------------

REFUSED: dict[str, Callable[[], peft.PeftConfig]] = {
    "PROMPT_TUNING": lambda: peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3),
    "PREFIX_TUNING": lambda: peft.PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3),
    "ADAPTION_PROMPT": lambda: peft.AdaptionPromptConfig(
        task_type="CAUSAL_LM", adapter_len=3, adapter_layers=1
    ),
    "Linear.*aLoRA": lambda: peft.LoraConfig(
        target_modules=LINEAR, alora_invocation_tokens=[3], task_type="CAUSAL_LM"
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_adapters_that_are_no_change_of_weights_are_refused_by_name(make_llama, name: str) -> None:
    model = peft.get_peft_model(make_llama(), REFUSED[name]())

    with pytest.raises(ConfigurationError, match=name) as caught:
        extract_weights(model)

    assert caught.value.phase == "plan"
    assert "merge_and_unload" in caught.value.remedy


def test_a_convolution_in_groups_is_refused_by_name() -> None:
    model = nn.ModuleDict({"conv": nn.Conv2d(4, 4, 3, groups=2)})
    with pytest.warns(UserWarning, match="groups"):
        model = peft.inject_adapter_in_model(peft.LoraConfig(r=2, target_modules=["conv"]), model)

    with pytest.raises(ConfigurationError, match=r"'conv'.*groups > 1"):
        extract_weights(model)
