"""Section I of the case list: LoRA and quantised bases."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from transformers import Qwen2Config, Qwen2ForCausalLM

from tests.integration import kit
from tests.integration.kit import PAUSE
from weight_update import ConfigurationError
from weight_update.reference_engine import ReferenceEngine
from weight_update.weights.extract import extract_weights

peft = pytest.importorskip("peft")

IDS = torch.tensor([[1, 5, 9, 2, 30, 7, 44, 12]])


def biased(seed: int = 3, dtype: torch.dtype = torch.float32) -> Qwen2ForCausalLM:
    """A model whose attention has biases."""
    torch.manual_seed(seed)
    model = Qwen2ForCausalLM(Qwen2Config(**kit.SIZES, tie_word_embeddings=False))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.normal_(std=0.1)
    return model.to(dtype).eval()


def train(model: nn.Module, seed: int = 7) -> None:
    """Give every trainable tensor a value of its own."""
    torch.manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(0.2 * torch.randn_like(parameter))


def lora(base: nn.Module, name: str = "default", **settings: Any) -> Any:
    """A PEFT model over ``base`` whose adapter was trained a little."""
    settings = {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "down_proj"], **settings}
    model = peft.get_peft_model(base, peft.LoraConfig(**settings), adapter_name=name)
    train(model)
    return model.eval()


def payload(model: nn.Module) -> dict[str, torch.Tensor]:
    return {weight.spec.name: weight.read() for weight in extract_weights(model)}


def bits(tensors: dict[str, torch.Tensor]) -> dict[str, bytes]:
    return {n: v.contiguous().view(torch.uint8).numpy().tobytes() for n, v in tensors.items()}


# ---- C13


@pytest.mark.parametrize("name", ["default", "policy", "module"])
def test_c13_names_are_the_bare_models_once_each_whatever_the_adapter_is_called(
    name: str,
) -> None:
    """The bias of an adapted layer lies inside its base layer."""
    base = biased()
    bare = dict(base.state_dict())
    plain = {key: value.clone() for key, value in bare.items()}
    model = lora(base, name)
    sent = payload(model)
    assert list(sent) == list(plain)
    layer = model.base_model.model.model.layers[0].self_attn.q_proj
    delta = layer.scaling[name] * layer.lora_B[name].weight @ layer.lora_A[name].weight
    key = "model.layers.0.self_attn.q_proj.weight"
    torch.testing.assert_close(sent[key], plain[key] + delta)
    assert torch.equal(sent[key[:-6] + "bias"], plain[key[:-6] + "bias"])


def test_c13_an_engine_with_biases_accepts_all_of_an_adapted_model() -> None:
    with ReferenceEngine(biased(3)) as engine:
        model = lora(biased(4))
        with kit.make_sender(engine) as sender:
            sender.update_weights(model)
        assert kit.served(engine) == kit.greedy(model)


# ---- C27


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_c27_two_hundred_payloads_without_a_step_change_nothing_and_are_the_same(
    dtype: torch.dtype,
) -> None:
    model = lora(biased(dtype=dtype), use_rslora=True, target_modules="all-linear")
    before = bits(dict(model.state_dict()))
    first = bits(payload(model))
    for _ in range(200):
        again = payload(model)
    assert bits(again) == first
    assert bits(dict(model.state_dict())) == before
    layer = model.base_model.model.model.layers[1].mlp.down_proj
    weight, scale = layer.base_layer.weight.float(), layer.scaling["default"]
    delta = layer.lora_B["default"].weight.float() @ layer.lora_A["default"].weight.float()
    exact = (weight + scale * delta).to(dtype)
    torch.testing.assert_close(again["model.layers.1.mlp.down_proj.weight"], exact)


# ---- C42


class Packed(nn.Linear):
    """A linear layer as quantisers keep it: packed bytes under the weight's name."""

    def __init__(self, dense: nn.Linear, dtype: torch.dtype) -> None:
        super().__init__(dense.in_features, dense.out_features, bias=False)
        self.dense = [dense.weight.detach()]
        packed = torch.zeros(dense.weight.numel() // 2, 1, dtype=dtype)
        self.weight = nn.Parameter(packed, requires_grad=False)


class Unpacking(Packed):
    def dequantize(self) -> torch.Tensor:
        return self.dense[0].clone()


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.int32])
def test_c42_packed_bytes_never_travel_under_a_weights_name(
    dtype: torch.dtype, engine: ReferenceEngine
) -> None:
    model = copy.deepcopy(kit.llama(1))
    attention = model.model.layers[0].self_attn
    attention.q_proj = Packed(attention.q_proj, dtype)
    log = kit.Log(engine)
    with kit.make_sender(engine) as sender, pytest.raises(ConfigurationError, match="quantised"):
        sender.update_weights(model)
    assert log.count(engine, PAUSE) == 0


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8])
def test_c42_a_layer_that_can_unpack_its_bytes_reaches_the_engine_dense(
    dtype: torch.dtype, engine: ReferenceEngine
) -> None:
    model = copy.deepcopy(kit.llama(1))
    for layer in model.model.layers:
        layer.self_attn.q_proj = Unpacking(layer.self_attn.q_proj, dtype)
    with kit.make_sender(engine) as sender:
        sender.update_weights(model)
    assert kit.served(engine) == kit.tokens_of(1)


# ---- C70


def two_adapters(base: nn.Module) -> Any:
    model = lora(base, target_modules=["q_proj"])
    model.add_adapter("second", peft.LoraConfig(r=2, target_modules=["q_proj", "up_proj"]))
    model.base_model.set_adapter(["default", "second"])
    train(model, 9)
    return model.eval()


def disabled(base: nn.Module) -> Any:
    model = lora(base)
    model.base_model.model.model.layers[0].self_attn.q_proj.enable_adapters(False)
    return model


VARIANTS = {
    "DoRA, rsLoRA and patterns": lambda base: lora(
        base,
        use_dora=True,
        use_rslora=True,
        rank_pattern={"q_proj": 2},
        alpha_pattern={"down_proj": 5},
    ),
    "two active, one with rsLoRA": two_adapters,
    "OLoRA, a changed base": lambda base: lora(base, init_lora_weights="olora"),
    "a saved head beside adapters": lambda base: lora(base, modules_to_save=["lm_head"]),
    "trained bias": lambda base: lora(base, bias="all"),
    "one layer only": lambda base: lora(base, layers_to_transform=[1]),
    "PiSSA": lambda base: lora(base, init_lora_weights="pissa"),
    "DoRA on the embedding": lambda base: lora(
        base, target_modules=["embed_tokens"], use_dora=True
    ),
    "trained tokens": lambda base: lora(base, trainable_token_indices=[1, 5, 9]),
    "disabled layers": disabled,
}


@pytest.mark.parametrize("adapt", VARIANTS.values(), ids=VARIANTS.keys())
def test_c70_a_plain_model_with_the_payload_computes_what_the_adapted_one_does(
    adapt: Any,
) -> None:
    model = adapt(biased())
    model.train()
    sent = payload(model)  # dropout of the training mode changes nothing
    model.eval()
    plain = biased()
    before = plain(IDS).logits
    plain.load_state_dict(sent)
    torch.testing.assert_close(plain(IDS).logits, model(IDS).logits, atol=1e-5, rtol=1e-4)
    assert not torch.allclose(before, model(IDS).logits, atol=1e-2)


def test_c70_dropout_of_a_training_model_leaves_the_payload_alone() -> None:
    model = lora(biased(), lora_dropout=0.5)
    quiet = bits(payload(model))
    assert bits(payload(model.train())) == quiet


def test_c70_an_adapter_without_a_merge_is_refused_by_name(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config = peft.IA3Config(target_modules=["k_proj"], feedforward_modules=[])
    model = peft.get_peft_model(biased(), config)
    layer = model.base_model.model.model.layers[0].self_attn.k_proj
    monkeypatch.setattr(type(layer), "merge", peft.tuners.tuners_utils.BaseTunerLayer.merge)
    with pytest.raises(ConfigurationError, match=type(layer).__name__):
        payload(model)


# ---- C79


def test_c79_frozen_base_weights_are_sent_with_the_merge() -> None:
    model = lora(biased())
    trainable = {name for name, value in model.named_parameters() if value.requires_grad}
    assert trainable
    assert set(payload(model)) == set(biased().state_dict())


def test_c79_the_push_after_a_restart_is_full(engine: ReferenceEngine) -> None:
    model = lora(copy.deepcopy(kit.llama(0)), layers_to_transform=[1])
    with kit.make_sender(engine) as sender:
        sender.register_model(model)
        sender.update_weights()
        engine.restart()
        report = sender.update_weights()
    assert report.tensors == len(kit.llama(0).state_dict())
    assert kit.served(engine) == kit.greedy(model)
