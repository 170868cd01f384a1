"""Quantised layers travel dense, with adapters and without, or are refused by name (C42)."""

from __future__ import annotations

from typing import Any

import peft
import pytest
import torch
from torch import nn

from weight_update.errors import ConfigurationError
from weight_update.weights.extract import extract_weights, get_model_metadata
from weight_update.weights.extraction_cache import ExtractionCache
from weight_update.weights.lora.export import adapter_of

bitsandbytes = pytest.importorskip("bitsandbytes")

TOKENS = torch.tensor([[1, 5, 9, 2, 30, 7]])
Q_PROJ = "model.layers.0.self_attn.q_proj.weight"


def llama(make_llama, seed: int = 0, dtype: torch.dtype = torch.float32) -> Any:
    """Wide enough for blocks of 64 values, and for two of them in a row of `down_proj`."""
    sizes = {"hidden_size": 64, "intermediate_size": 128, "attention_bias": True}
    return make_llama(seed=seed, dtype=dtype, **sizes)


def packed_4bit(linear: nn.Linear, quant_type: str, *, nested: bool) -> nn.Module:
    dtype = linear.weight.dtype
    settings = {"quant_type": quant_type, "compress_statistics": nested}
    packed = bitsandbytes.nn.Linear4bit(
        linear.in_features, linear.out_features, linear.bias is not None, dtype, **settings
    )
    weight = linear.weight.detach()
    packed.weight = bitsandbytes.nn.Params4bit(weight, requires_grad=False, **settings)
    return packed


def packed_8bit(linear: nn.Linear) -> nn.Module:
    packed = bitsandbytes.nn.Linear8bitLt(
        linear.in_features, linear.out_features, linear.bias is not None, has_fp16_weights=False
    )
    weight = linear.weight.detach()
    packed.weight = bitsandbytes.nn.Int8Params(weight, requires_grad=False, has_fp16_weights=False)
    return packed


PACKERS = {
    "nf4, nested": lambda linear: packed_4bit(linear, "nf4", nested=True),
    "fp4": lambda linear: packed_4bit(linear, "fp4", nested=False),
    "8 bits": packed_8bit,
}
every_packing = pytest.mark.parametrize("packing", PACKERS)


def quantised(model: nn.Module, packing: str) -> Any:
    """All linear layers of the decoder are packed, as `from_pretrained` does it.

    In training mode: a 4-bit layer computes in bf16 on some CPUs otherwise.
    """
    for path, linear in list(model.named_modules()):
        if isinstance(linear, nn.Linear) and path != "lm_head":
            packed = PACKERS[packing](linear)
            packed.bias = linear.bias
            parent, _, name = path.rpartition(".")
            setattr(model.get_submodule(parent), name, packed.to("cpu"))
    setattr(model, f"is_loaded_in_{'8' if packing == '8 bits' else '4'}bit", True)
    return model.requires_grad_(False).train()


def adapted(model: nn.Module, **settings: Any) -> Any:
    settings = {"r": 4, "target_modules": ["q_proj", "down_proj"], **settings}
    model = peft.get_peft_model(model, peft.LoraConfig(**settings))
    torch.manual_seed(7)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(0.1 * torch.randn_like(parameter))
    return model


def payload(model: nn.Module) -> dict[str, torch.Tensor]:
    return {weight.spec.name: weight.read() for weight in extract_weights(model)}


def snapshot(model: nn.Module) -> dict[str, torch.Tensor]:
    return {
        name: value.clone()
        for name, value in model.state_dict().items()
        if isinstance(value, torch.Tensor)
    }


def check(model: nn.Module, served: nn.Module) -> None:
    before, expected = snapshot(model), model(TOKENS).logits
    sent = payload(model)
    served.load_state_dict(sent, strict=True)
    torch.testing.assert_close(served(TOKENS).logits, expected, rtol=1e-5, atol=1e-5)
    assert all(torch.equal(before[name], value) for name, value in snapshot(model).items())
    assert all(torch.equal(sent[name], value) for name, value in payload(model).items())


@every_packing
def test_a_quantised_model_is_sent_dense(make_llama, packing: str) -> None:
    check(quantised(llama(make_llama), packing), llama(make_llama, seed=99))


@every_packing
@pytest.mark.parametrize("dora", [False, True], ids=["LoRA", "DoRA"])
def test_adapters_are_merged_into_the_dense_weight(make_llama, packing: str, dora: bool) -> None:
    model = adapted(quantised(llama(make_llama), packing), use_dora=dora)

    check(model, llama(make_llama, seed=99))


@every_packing
def test_names_and_shapes_are_those_of_the_plain_model(make_llama, packing: str) -> None:
    plain = get_model_metadata(llama(make_llama))

    assert get_model_metadata(quantised(llama(make_llama), packing)) == plain
    assert get_model_metadata(adapted(quantised(llama(make_llama), packing))) == plain


@every_packing
def test_the_merge_is_computed_in_fp32_and_cast_once(make_llama, packing: str) -> None:
    model = quantised(llama(make_llama, dtype=torch.bfloat16), packing)
    model.config.dtype = torch.bfloat16
    base = model.model.layers[0].self_attn.q_proj
    if packing == "8 bits":
        dense = bitsandbytes.functional.int8_vectorwise_dequant(base.weight.data, base.weight.SCB)
    else:
        dense = bitsandbytes.functional.dequantize_4bit(base.weight.data, base.weight.quant_state)
    layer = adapted(model).base_model.model.model.layers[0].self_attn.q_proj
    delta = layer.lora_B["default"].weight.double() @ layer.lora_A["default"].weight.double()
    exact = dense.double() + layer.scaling["default"] * delta

    value = payload(model)[Q_PROJ]

    assert value.dtype == torch.bfloat16
    step = torch.finfo(torch.bfloat16).eps / 2 * 1.001  # half of the last place, and fp32's share
    assert ((value.double() - exact).abs() <= step * exact.abs() + 1e-9).all()


def test_an_8_bit_model_is_sent_in_the_dtype_that_it_computes_in(make_llama) -> None:
    model = quantised(llama(make_llama, dtype=torch.bfloat16), "8 bits")
    model.config.dtype = torch.bfloat16

    sent = payload(model)

    assert get_model_metadata(model)[Q_PROJ][0] == sent[Q_PROJ].dtype == torch.bfloat16


def test_an_8_bit_model_that_says_no_dtype_is_sent_as_it_is_unpacked() -> None:
    model = nn.ModuleDict({"up": packed_8bit(nn.Linear(8, 8)).to("cpu")})

    assert get_model_metadata(model)["up.weight"] == (torch.float32, torch.Size([8, 8]))


def test_other_adapters_on_a_quantised_base_are_refused_by_name(make_llama) -> None:
    model = quantised(llama(make_llama), "nf4, nested")
    settings = peft.IA3Config(target_modules=["q_proj"], feedforward_modules=[])

    with pytest.raises(ConfigurationError, match=r"q_proj'.*Linear4bit.*quantised"):
        extract_weights(peft.get_peft_model(model, settings))


# -- quantisers that nobody here knows -----------------------------------------------------


class Opaque(nn.Module):
    """Keeps its weight as bytes."""

    def __init__(self, dtype: torch.dtype = torch.uint8) -> None:
        super().__init__()
        self.in_features = self.out_features = 8
        self.weight = nn.Parameter(torch.arange(64).to(dtype).view(32, 2), requires_grad=False)
        self.bias = nn.Parameter(torch.ones(8))


class Halves(Opaque):
    """Can unpack it."""

    def dequantize(self) -> torch.Tensor:
        return self.weight.float().view(8, 8) / 2


class Broken(Halves):
    def dequantize(self) -> torch.Tensor:
        raise RuntimeError("no kernel for this device")


class OwnTensor(torch.Tensor):
    """A tensor that looks dense and is not."""

    def dequantize(self) -> torch.Tensor:
        return self.detach().as_subclass(torch.Tensor) * 2


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.int32])
def test_a_layer_that_unpacks_itself_is_sent_dense(dtype: torch.dtype) -> None:
    sent = payload(nn.ModuleDict({"up": Halves(dtype)}))

    assert torch.equal(sent["up.weight"], torch.arange(64).view(8, 8) / 2)
    assert torch.equal(sent["up.bias"], torch.ones(8))
    assert len(sent) == 2


def test_a_tensor_that_unpacks_itself_is_sent_dense() -> None:
    layer = nn.Linear(4, 4)
    value = layer.weight.detach().clone()
    layer.weight = nn.Parameter(value.as_subclass(OwnTensor), requires_grad=False)

    sent = payload(nn.ModuleDict({"up": layer}))["up.weight"]

    assert type(sent) is torch.Tensor
    assert torch.equal(sent, 2 * value)


def under_an_adapter(base: nn.Module) -> Any:
    model = nn.ModuleDict({"mlp": nn.ModuleDict({"up": nn.Linear(8, 8)})})
    settings = peft.LoraConfig(r=2, target_modules=["up"])
    model = peft.inject_adapter_in_model(settings, model)
    nn.init.ones_(model["mlp"]["up"].lora_B["default"].weight)
    model["mlp"]["up"].base_layer = base
    return model


def test_an_adapter_over_a_layer_that_unpacks_itself_is_merged() -> None:
    model = under_an_adapter(Halves())
    layer = model["mlp"]["up"]
    rows = layer.lora_A["default"].weight.sum(0) * layer.scaling["default"]

    sent = payload(model)["mlp.up.weight"]

    torch.testing.assert_close(sent, (Halves().dequantize() + rows).detach())


@pytest.mark.parametrize("base", [Opaque, Broken])
def test_what_cannot_be_unpacked_is_refused_by_name_before_anything_is_read(
    base: type[Opaque],
) -> None:
    with pytest.raises(ConfigurationError, match=r"mlp\.up.*quantised") as caught:
        extract_weights(under_an_adapter(base()))

    assert caught.value.phase == "plan"
    assert "dequantise" in caught.value.remedy


def test_a_layer_whose_unpacking_fails_is_refused_with_its_own_words() -> None:
    with pytest.raises(ConfigurationError, match=r"'?up'? \(Broken\).*no kernel for this device"):
        extract_weights(nn.ModuleDict({"up": Broken()}))


def test_bytes_that_nobody_can_unpack_are_refused_by_name() -> None:
    with pytest.raises(ConfigurationError, match=r"up\.weight.*quantised"):
        extract_weights(nn.ModuleDict({"up": Opaque()}))


def test_an_fp8_base_under_an_adapter_is_refused_since_its_scales_are_elsewhere() -> None:
    base = nn.Linear(8, 8)
    base.weight = nn.Parameter(base.weight.detach().to(torch.float8_e4m3fn), requires_grad=False)

    with pytest.raises(ConfigurationError, match=r"mlp\.up\.weight.*float8"):
        extract_weights(under_an_adapter(base))


def lay_out_for_inference(model: nn.Module) -> nn.Module:
    """As a forward in eval mode does it to 4-bit layers on a CPU that computes in bf16."""
    lay_out = bitsandbytes.functional._convert_weight_packed_for_cpu
    for layer in model.modules():
        if isinstance(layer, bitsandbytes.nn.Linear4bit):
            weight = layer.weight
            weight.data, weight.quant_state = lay_out(weight.data, weight.quant_state)
    return model


def insides(model: nn.Module) -> list[torch.Tensor]:
    """What 4-bit layers compute with; unlike a `state_dict`, this changes nothing."""
    layers = [layer for layer in model.modules() if isinstance(layer, bitsandbytes.nn.Linear4bit)]
    assert all(layer.weight.quant_state.packing_format_for_cpu for layer in layers)
    pairs = [(layer.weight.data, layer.weight.quant_state.absmax) for layer in layers]
    return [tensor.clone() for pair in pairs for tensor in pair]


every_4bit_packing = pytest.mark.parametrize("packing", [name for name in PACKERS if "4" in name])


@every_4bit_packing
@pytest.mark.parametrize("adapt", [nn.Module.eval, adapted], ids=["plain", "LoRA"])
def test_a_model_laid_out_for_inference_is_sent_right_and_stays_so(
    make_llama, packing: str, adapt: Any
) -> None:
    model = adapt(quantised(llama(make_llama), packing))
    expected = payload(model)
    before = insides(lay_out_for_inference(model))
    extract = ExtractionCache().extract

    for _ in range(2):
        sent = {weight.spec.name: weight.read() for weight in extract(model)}
        assert sent.keys() == expected.keys()
        for name, value in sent.items():  # scales are rounded to bf16 by the new layout
            torch.testing.assert_close(value, expected[name], rtol=2**-8, atol=2**-9)
        after = insides(model)
        assert all(map(torch.equal, before, after))


def test_an_adapter_on_a_base_laid_out_for_inference_is_exported_and_changes_nothing(
    make_llama,
) -> None:
    model = adapted(quantised(llama(make_llama), "fp4"))
    expected = {weight.spec.name: weight.read() for weight in adapter_of(model).weights}
    before = insides(lay_out_for_inference(model))

    sent = {weight.spec.name: weight.read() for weight in adapter_of(model).weights}

    assert sent.keys() == expected.keys()
    assert all(torch.equal(sent[name], value) for name, value in expected.items())
    after = insides(model)
    assert all(map(torch.equal, before, after))


def test_a_layer_computes_in_eval_mode_with_what_is_sent(make_llama) -> None:
    model = quantised(llama(make_llama), "fp4").eval()
    layer = model.model.layers[0].self_attn.q_proj
    if not layer.support_avx512bf16_for_cpu:
        pytest.skip("this CPU lays nothing out for inference")
    unit = torch.eye(layer.in_features)

    computed = layer(unit) - layer.bias

    assert layer.weight.quant_state.packing_format_for_cpu
    torch.testing.assert_close(payload(model)[Q_PROJ].T, computed, rtol=2**-7, atol=2**-9)
