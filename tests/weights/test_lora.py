"""LoRA models travel as the bare model with the adapters merged in (C13, C27, C42, C70)."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model, inject_adapter_in_model
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import nn

from weight_update.errors import ConfigurationError
from weight_update.weights.extract import extract_weights, get_model_metadata

ALL_LINEAR = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
TOKENS = torch.tensor([[1, 5, 9, 2, 30, 7]])


def config(**more: Any) -> LoraConfig:
    settings: dict[str, Any] = {"r": 4, "lora_alpha": 8, "target_modules": ALL_LINEAR}
    return LoraConfig(**(settings | more))


def train_a_little(model: nn.Module) -> nn.Module:
    """Gives every trainable tensor (lora_B starts at zero) a value of its own."""
    torch.manual_seed(7)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn_like(parameter, dtype=torch.float32) * 0.1)
    return model


def plain(llama: nn.Module) -> PeftModel:
    return train_a_little(get_peft_model(llama, config()))


def two_active_adapters(llama: nn.Module) -> PeftModel:
    model = get_peft_model(llama, config())
    model.add_adapter("second", config(r=2, target_modules=["q_proj", "up_proj"]))
    model.base_model.set_adapter(["default", "second"])
    return train_a_little(model)


def second_of_two_adapters(llama: nn.Module) -> PeftModel:
    model = get_peft_model(llama, config())
    model.add_adapter("second", config(r=2, target_modules=["q_proj", "up_proj"]))
    train_a_little(model)
    model.set_adapter("second")
    return train_a_little(model)


def with_config(**more: Any) -> Callable[[nn.Module], PeftModel]:
    return lambda llama: train_a_little(get_peft_model(llama, config(**more)))


def injected(llama: nn.Module) -> nn.Module:
    return train_a_little(inject_adapter_in_model(config(), llama))


VARIANTS = {
    "plain": plain,
    "rsLoRA": with_config(use_rslora=True),
    "DoRA": with_config(use_dora=True),
    "embed_tokens": with_config(target_modules=["embed_tokens", "q_proj"]),
    "DoRA on embed_tokens": with_config(target_modules=["embed_tokens"], use_dora=True),
    "lm_head": with_config(target_modules=["lm_head", "v_proj"]),
    "modules_to_save lm_head": with_config(modules_to_save=["lm_head"]),
    "modules_to_save embed_tokens": with_config(modules_to_save=["embed_tokens"]),
    "two active adapters": two_active_adapters,
    "second of two adapters": second_of_two_adapters,
    "bias lora_only": with_config(bias="lora_only"),
    "bias all": with_config(bias="all"),
    "lora_bias": with_config(lora_bias=True, target_modules=["q_proj", "o_proj"]),
    "rank pattern": with_config(rank_pattern={"q_proj": 2}, alpha_pattern={"up_proj": 3}),
    "PiSSA": with_config(init_lora_weights="pissa"),
    "injected": injected,
}
PEFT_VARIANTS = {name: adapt for name, adapt in VARIANTS.items() if adapt is not injected}
every_variant = pytest.mark.parametrize("adapt", VARIANTS.values(), ids=VARIANTS.keys())


def payload(source: Any, **options: Any) -> dict[str, torch.Tensor]:
    return {w.spec.name: w.read() for w in extract_weights(source, **options)}


def snapshot(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.dtype == b.dtype and torch.equal(
        a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8)
    )


def biased_llama(make_llama) -> nn.Module:
    return make_llama(attention_bias=True)


# -- names ---------------------------------------------------------------------------------


@every_variant
def test_names_dtypes_shapes_and_order_are_those_of_the_bare_model(make_llama, adapt) -> None:
    bare = get_model_metadata(biased_llama(make_llama))

    adapted = get_model_metadata(adapt(biased_llama(make_llama)))

    assert list(adapted.items()) == list(bare.items())


def test_a_wrapped_lora_model_has_the_names_of_the_bare_one(make_llama) -> None:
    model = torch.compile(plain(make_llama()))

    assert get_model_metadata(model) == get_model_metadata(make_llama())


def test_a_policy_that_holds_a_lora_model_has_the_names_of_the_bare_one(make_llama) -> None:
    policy = nn.Module()
    policy.actor = plain(make_llama())

    assert get_model_metadata(policy) == get_model_metadata(make_llama())


# -- values --------------------------------------------------------------------------------


@every_variant
def test_a_plain_model_with_the_payload_computes_what_the_adapted_one_does(
    make_llama, adapt
) -> None:
    model = adapt(biased_llama(make_llama)).eval()
    served = biased_llama(lambda **more: make_llama(seed=99, **more))
    with torch.no_grad():
        expected = model(TOKENS).logits
        assert not torch.allclose(served(TOKENS).logits, expected, atol=1e-2)

        served.load_state_dict(payload(model), strict=True)

        torch.testing.assert_close(served(TOKENS).logits, expected, rtol=1e-5, atol=1e-5)


@every_variant
def test_the_adapters_of_each_variant_change_what_the_model_computes(make_llama, adapt) -> None:
    """Guards the test above: an adapter without effect would let a lost merge pass."""
    model = adapt(biased_llama(make_llama)).eval()
    with torch.no_grad():
        difference = model(TOKENS).logits - biased_llama(make_llama)(TOKENS).logits

    assert difference.abs().max() > 1e-2


@pytest.mark.parametrize("adapt", PEFT_VARIANTS.values(), ids=PEFT_VARIANTS.keys())
def test_the_payload_is_the_state_dict_of_merge_and_unload(make_llama, adapt) -> None:
    model = adapt(biased_llama(make_llama))
    got = payload(model)

    merged = copy.deepcopy(model).merge_and_unload().state_dict()

    for name, tensor in merged.items():
        torch.testing.assert_close(got[name], tensor, rtol=1e-5, atol=1e-6)


def test_the_weight_of_a_plain_layer_is_the_base_plus_scaled_b_times_a(make_llama) -> None:
    model = plain(make_llama())
    layer = model.base_model.model.model.layers[0].mlp.up_proj
    product = layer.lora_B["default"].weight @ layer.lora_A["default"].weight

    got = payload(model)["model.layers.0.mlp.up_proj.weight"]

    torch.testing.assert_close(got, (layer.base_layer.weight + 2.0 * product).detach())


def test_dropout_of_a_training_model_does_not_change_the_payload(make_llama) -> None:
    model = with_config(lora_dropout=0.5)(make_llama())
    quiet = payload(model.eval())

    loud = payload(model.train())

    assert all(same_bits(loud[name], quiet[name]) for name in quiet)
    assert model.training


def test_adapters_that_the_user_merged_already_are_not_merged_twice(make_llama) -> None:
    model = plain(make_llama())
    expected = payload(model)

    model.merge_adapter()

    got = payload(model)
    for name in expected:
        torch.testing.assert_close(got[name], expected[name], rtol=1e-5, atol=1e-6)


def test_frozen_bases_are_sent(make_llama) -> None:
    model = plain(make_llama())
    frozen = [name for name, p in model.named_parameters() if not p.requires_grad]
    assert len(frozen) == 21

    assert len(payload(model)) == 21


def test_a_payload_already_read_does_not_change_with_the_module(make_llama) -> None:
    model = plain(make_llama())
    name = "model.layers.1.self_attn.q_proj.weight"
    read = {w.spec.name: w for w in extract_weights(model)}[name].read()
    before = read.clone()

    train_a_little(model)

    assert same_bits(read, before)
    assert not torch.equal(payload(model)[name], before)


def test_values_carry_no_gradient(make_llama) -> None:
    assert not any(value.requires_grad for value in payload(plain(make_llama())).values())


def test_a_merged_value_is_cast_once_and_after_the_merge(make_llama) -> None:
    model = plain(make_llama())
    exact = payload(model)

    cast = payload(model, dtype=torch.bfloat16)

    assert all(same_bits(cast[name], exact[name].bfloat16()) for name in exact)


# -- the training model stays as it is (C27) -----------------------------------------------


def test_two_hundred_extractions_leave_a_bf16_model_bit_identical(make_llama) -> None:
    model = plain(make_llama(dtype=torch.bfloat16, num_hidden_layers=1))
    before, first = snapshot(model), payload(model)

    for _ in range(200):
        again = payload(model)
        assert all(same_bits(again[name], first[name]) for name in first)

    after = model.state_dict()
    assert after.keys() == before.keys()
    assert all(same_bits(after[name], before[name]) for name in before)


def bf16_adapters(llama: nn.Module) -> PeftModel:
    return train_a_little(get_peft_model(llama, config(), autocast_adapter_dtype=False))


@pytest.mark.parametrize(
    "adapt",
    [plain, two_active_adapters, VARIANTS["DoRA"], bf16_adapters],
    ids=["plain", "two adapters", "DoRA", "bf16 adapters"],
)
def test_a_bf16_merge_is_computed_in_fp32_and_cast_once(make_llama, adapt) -> None:
    model = adapt(make_llama(dtype=torch.bfloat16))
    in_fp32 = copy.deepcopy(model).float().merge_and_unload().state_dict()

    got = payload(model)

    assert all(same_bits(got[name], value.bfloat16()) for name, value in in_fp32.items())


@every_variant
def test_extraction_never_changes_the_adapted_model(make_llama, adapt) -> None:
    model = adapt(biased_llama(make_llama)).train()
    before = snapshot(model)
    trainable = [name for name, p in model.named_parameters() if p.requires_grad]

    payload(model)

    assert all(same_bits(v, before[k]) for k, v in model.state_dict().items())
    assert [name for name, p in model.named_parameters() if p.requires_grad] == trainable
    assert not any(getattr(layer, "merged", False) for layer in model.modules())


# -- memory (C21) --------------------------------------------------------------------------


@pytest.fixture
def copied(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What is handed to ``copy.deepcopy`` from outside of it."""
    calls: list[Any] = []
    real = copy.deepcopy

    def spy(value: Any, memo: Any = None, *rest: Any) -> Any:
        if memo is None:
            calls.append(value)
        return real(value, memo, *rest)

    monkeypatch.setattr(copy, "deepcopy", spy)
    return calls


def test_only_single_layers_are_ever_copied(make_llama, copied: list[Any]) -> None:
    model = plain(make_llama())
    largest = max(p.numel() for p in model.parameters())
    copied.clear()

    payload(model)

    sizes = [sum(p.numel() for p in module.parameters()) for module in copied]
    assert len(copied) == 14, "one copy a layer"
    assert max(sizes) <= 2 * largest


def test_metadata_copies_nothing(make_llama, copied: list[Any]) -> None:
    model = plain(make_llama())
    copied.clear()

    get_model_metadata(model)

    assert copied == []


def test_a_layer_is_copied_only_when_its_weight_is_read(make_llama, copied: list[Any]) -> None:
    weights = {w.spec.name: w for w in extract_weights(plain(make_llama()))}
    copied.clear()

    weights["model.embed_tokens.weight"].read()
    assert copied == []
    weights["model.layers.0.self_attn.q_proj.weight"].read()
    assert len(copied) == 1


# -- tied weights under an adapter ---------------------------------------------------------


@pytest.mark.parametrize(
    "targets", [["lm_head"], ["embed_tokens"], ["embed_tokens", "lm_head"]], ids="+".join
)
def test_adapters_that_tear_two_tied_weights_apart_are_refused(
    make_llama, targets: list[str]
) -> None:
    """One matrix on the wire cannot stand for two: whatever were sent would be quietly wrong."""
    llama = make_llama(tie_word_embeddings=True)
    model = get_peft_model(llama, config(target_modules=[*targets, "q_proj"]))

    with pytest.raises(ConfigurationError, match="tied") as caught:
        extract_weights(model)

    assert "lm_head.weight" in str(caught.value)
    assert "model.embed_tokens.weight" in str(caught.value)
    assert "ensure_weight_tying" in caught.value.remedy


def test_adapters_that_are_tied_like_their_weights_are_merged_and_sent_once(make_llama) -> None:
    tied = config(target_modules=["embed_tokens"], ensure_weight_tying=True)
    model = train_a_little(get_peft_model(make_llama(tie_word_embeddings=True), tied)).eval()
    served = make_llama(tie_word_embeddings=True, seed=99)

    sent = payload(model)
    served.load_state_dict(sent, strict=False)

    assert "lm_head.weight" not in sent
    with torch.no_grad():
        torch.testing.assert_close(
            served(TOKENS).logits, model(TOKENS).logits, rtol=1e-5, atol=1e-5
        )


def test_a_tied_model_with_adapters_elsewhere_sends_the_tied_weight_once(make_llama) -> None:
    names = list(get_model_metadata(plain(make_llama(tie_word_embeddings=True))))

    assert "model.embed_tokens.weight" in names
    assert "lm_head.weight" not in names


# -- what cannot be merged -----------------------------------------------------------------


class PackedLinear(nn.Linear):
    """Stands in for a 4-bit layer: bytes of another shape under the name of the weight."""

    def __init__(self) -> None:
        super().__init__(8, 8, bias=False)
        self.weight = nn.Parameter(torch.zeros(32, 1, dtype=torch.uint8), requires_grad=False)

    def dequantize(self) -> torch.Tensor:
        return torch.zeros(8, 8)


def test_a_quantised_base_under_an_adapter_is_refused_by_name() -> None:
    model = nn.ModuleDict({"mlp": nn.ModuleDict({"up": nn.Linear(8, 8)})})
    model = inject_adapter_in_model(config(target_modules=["up"]), model)
    model["mlp"]["up"].base_layer = PackedLinear()

    with pytest.raises(ConfigurationError, match=r"mlp\.up\.weight.*uint8") as caught:
        extract_weights(model)

    assert "dequantise" in caught.value.remedy


def test_a_bias_of_an_adapter_without_one_in_the_base_is_refused_before_it_is_read() -> None:
    model = nn.ModuleDict({"up": nn.Linear(4, 4, bias=False)})
    model = inject_adapter_in_model(config(target_modules=["up"], lora_bias=True), model)

    with pytest.raises(ConfigurationError, match=r"'up'.*lora_bias"):
        extract_weights(model)


def test_an_adapter_type_without_a_merge_is_refused_by_name() -> None:
    class StrangeLayer(nn.Module, BaseTunerLayer):
        def __init__(self, base_layer: nn.Module) -> None:
            super().__init__()
            self.base_layer = base_layer

    model = nn.ModuleDict({"mlp": StrangeLayer(nn.Linear(2, 2))})

    with pytest.raises(ConfigurationError, match=r"'mlp'.*StrangeLayer"):
        extract_weights(model)


def test_an_attention_block_with_adapters_inside_its_base_is_refused_by_name() -> None:
    model = nn.ModuleDict({"attn": nn.MultiheadAttention(4, 2)})
    model = inject_adapter_in_model(config(target_modules=["attn"]), model)

    with pytest.raises(ConfigurationError, match=r"'attn'.*adapters of its own"):
        extract_weights(model)


# -- adapters on bare parameters (stacked experts) ------------------------------------------


class Experts(nn.Module):
    """Stacked expert matrices, as current mixture-of-experts models keep them."""

    def __init__(self) -> None:
        super().__init__()
        self.gate_up_proj = nn.Parameter(torch.randn(2, 8, 4))
        self.down_proj = nn.Parameter(torch.randn(2, 4, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = (x @ self.gate_up_proj[1].T).chunk(2, dim=-1)
        return (gate.sigmoid() * up) @ self.down_proj[1].T


def test_every_adapter_of_a_module_with_several_adapted_parameters_is_merged() -> None:
    """PEFT nests one wrapper a parameter; merging the outermost loses the others, quietly."""
    torch.manual_seed(3)
    served = nn.Sequential(Experts(), nn.Linear(4, 4))
    parameters = ["0.gate_up_proj", "0.down_proj"]
    adapted = get_peft_model(
        copy.deepcopy(served), config(target_modules=["1"], target_parameters=parameters)
    )
    train_a_little(adapted)
    x = torch.randn(3, 4)
    before = snapshot(adapted)

    served.load_state_dict(payload(adapted), strict=True)

    torch.testing.assert_close(served(x), adapted(x), rtol=1e-5, atol=1e-5)
    assert all(same_bits(v, before[k]) for k, v in adapted.state_dict().items())
