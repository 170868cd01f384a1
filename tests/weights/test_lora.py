"""LoRA models travel as the bare model with the adapters merged in (C13, C27, C42, C70)."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model, inject_adapter_in_model
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.utils._python_dispatch import TorchDispatchMode

from weight_update.errors import ConfigurationError
from weight_update.weights.extract import extract_weights, get_model_metadata
from weight_update.weights.fitting import with_dtype
from weight_update.weights.lora import formula

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


def two_dora_adapters(llama: nn.Module) -> PeftModel:
    return both_active(llama, config(use_dora=True), config(use_dora=True, r=2))


def dora_beside_lora(llama: nn.Module) -> PeftModel:
    return both_active(llama, config(use_dora=True), config(r=2))


def both_active(llama: nn.Module, first: LoraConfig, second: LoraConfig) -> PeftModel:
    model = get_peft_model(llama, first)
    model.add_adapter("second", second)
    model.base_model.set_adapter(["default", "second"])
    return train_a_little(model)


def weighted_sum(llama: nn.Module) -> PeftModel:
    model = second_of_two_adapters(llama)
    model.add_weighted_adapter(["default", "second"], [0.7, 0.4], "sum", combination_type="cat")
    model.set_adapter("sum")
    return model


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
    "OLoRA": with_config(init_lora_weights="olora"),
    "MiCA": with_config(init_lora_weights="mica"),
    "trained tokens": with_config(trainable_token_indices=[0, 9, 31]),
    "two DoRA adapters": two_dora_adapters,
    "DoRA beside LoRA": dora_beside_lora,
    "weighted sum of adapters": weighted_sum,
    "injected": injected,
}
PEFT_VARIANTS = {name: adapt for name, adapt in VARIANTS.items() if adapt is not injected}
every_variant = pytest.mark.parametrize("adapt", VARIANTS.values(), ids=VARIANTS.keys())


def payload(source: Any) -> dict[str, torch.Tensor]:
    return {weight.spec.name: weight.read() for weight in extract_weights(source)}


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


def test_layers_inside_wrappers_are_found_under_their_own_names(make_llama) -> None:
    model = plain(make_llama())
    bare = payload(model)
    layers = model.base_model.model.model.layers
    layers[0], layers[1] = checkpoint_wrapper(layers[0]), torch.compile(layers[1])

    wrapped = payload(model)

    assert list(wrapped) == list(bare)
    assert all(same_bits(wrapped[name], bare[name]) for name in bare)


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


def merged(model: Any) -> None:
    model.merge_adapter()


def disabled(model: Any) -> None:
    model.base_model.disable_adapter_layers()


def merged_and_disabled(model: Any) -> None:
    model.merge_adapter()
    model.base_model.disable_adapter_layers()


def one_layer_disabled(model: Any) -> None:
    model.base_model.model.model.layers[0].mlp.up_proj.enable_adapters(False)


def one_layer_scaled(model: Any) -> None:
    model.base_model.model.model.layers[1].mlp.up_proj.set_scale("default", 3.0)


@pytest.mark.parametrize(
    "change", [merged, disabled, merged_and_disabled, one_layer_disabled, one_layer_scaled]
)
@pytest.mark.parametrize("kind", ["plain", "DoRA", "modules_to_save lm_head"])
def test_the_payload_follows_what_the_model_computes_now(make_llama, kind, change) -> None:
    """Read before the forward: PEFT undoes a merge there if the adapters are disabled."""
    model = VARIANTS[kind](make_llama()).eval()
    change(model)
    served = make_llama(seed=99)

    served.load_state_dict(payload(model), strict=True)

    with torch.no_grad():
        expected = model(TOKENS).logits
        torch.testing.assert_close(served(TOKENS).logits, expected, rtol=1e-5, atol=1e-5)


def test_an_adapter_that_was_not_trained_yet_changes_nothing(make_llama) -> None:
    sent = payload(get_peft_model(make_llama(), config()))

    assert all(same_bits(sent[name], value) for name, value in make_llama().state_dict().items())


def test_every_targeted_weight_differs_from_its_base(make_llama) -> None:
    sent, bare = payload(plain(make_llama())), make_llama().state_dict()

    changed = {name for name in bare if not torch.equal(sent[name], bare[name])}
    assert changed == {name for name in bare if name.split(".")[-2] in ALL_LINEAR}


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

    cast = [with_dtype(weight, torch.bfloat16) for weight in extract_weights(model)]

    assert all(same_bits(each.read(), exact[each.spec.name].bfloat16()) for each in cast)


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


@pytest.mark.parametrize("kind", ["plain", "DoRA on embed_tokens"])
def test_a_read_that_fails_in_the_middle_leaves_the_model_as_it_is(
    make_llama, kind, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = VARIANTS[kind](make_llama(dtype=torch.bfloat16))
    before = snapshot(model)
    weights = extract_weights(model)
    for method in ("addmm_", "copy_", "__add__", "__iadd__"):
        monkeypatch.setattr(torch.Tensor, method, broken)

    with pytest.raises(ArithmeticError):
        [weight.read() for weight in weights]

    monkeypatch.undo()
    assert all(same_bits(value, before[name]) for name, value in model.state_dict().items())


def broken(*_: Any, **__: Any) -> None:
    raise ArithmeticError("broken on purpose")


# -- memory (C21) --------------------------------------------------------------------------


class Live(TorchDispatchMode):
    """Counts the bytes of all storages that are made while it is entered, and still exist."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self._known = {parameter.data_ptr() for parameter in model.parameters()}
        self.now = self.peak = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor):
            self._note(result.untyped_storage())
        return result

    def _note(self, storage: torch.UntypedStorage) -> None:
        place, size = storage.data_ptr(), storage.nbytes()
        if place not in self._known:
            self._known.add(place)
            self.now += size
            self.peak = max(self.peak, self.now)
            weakref.finalize(storage, self._freed, place, size)

    def _freed(self, place: int, size: int) -> None:
        self._known.discard(place)
        self.now -= size


def test_reading_a_merged_weight_takes_the_weight_and_one_small_block_in_fp32(
    make_llama, monkeypatch: pytest.MonkeyPatch
) -> None:
    block = 1_024
    monkeypatch.setattr(formula, "_BLOCK", {"cpu": block})
    model = plain(make_llama(dtype=torch.bfloat16, hidden_size=64, intermediate_size=512))
    name = "model.layers.0.mlp.down_proj.weight"
    weight = {w.spec.name: w for w in extract_weights(model)}[name]

    with Live(model) as live:
        value = weight.read()

    assert live.now == value.nbytes == weight.spec.nbytes
    adapters = 4 * (4 * 64 + 4 * 512)
    assert weight.spec.nbytes < live.peak <= weight.spec.nbytes + 4 * block + adapters


@pytest.mark.parametrize("kind", ["plain", "DoRA on embed_tokens"])
def test_all_values_read_one_after_the_other_leave_nothing_behind(make_llama, kind) -> None:
    model = VARIANTS[kind](make_llama(dtype=torch.bfloat16))
    weights = extract_weights(model)
    largest = max(weight.spec.nbytes for weight in weights)

    with Live(model) as live:
        for weight in weights:
            weight.read()

    assert live.now == 0
    assert 0 < live.peak <= 12 * largest  # tiny layers: one block in fp32 is all of one


@pytest.fixture
def copied(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What is handed to ``copy.deepcopy`` from outside of it."""
    calls: list[Any] = []
    real = copy.deepcopy

    def spy(value: Any, memo: Any = None, *rest: Any) -> Any:
        if isinstance(value, nn.Module):
            calls.append(value)
        return real(value, memo, *rest)

    monkeypatch.setattr(copy, "deepcopy", spy)
    return calls


@pytest.mark.parametrize("kind", ["plain", "two active adapters", "DoRA", "embed_tokens"])
def test_common_adapters_are_merged_without_a_copy_of_any_layer(
    make_llama, kind, copied: list[Any]
) -> None:
    model = VARIANTS[kind](make_llama())
    copied.clear()

    payload(model)

    assert copied == []


def test_a_layer_whose_formula_only_peft_knows_is_copied_alone(
    make_llama, copied: list[Any]
) -> None:
    model = VARIANTS["DoRA on embed_tokens"](make_llama())
    layer = model.base_model.model.model.embed_tokens
    copied.clear()

    payload(model)

    assert {id(module) for module in copied if isinstance(module, type(layer))} == {id(layer)}


def test_metadata_reads_no_value(make_llama, monkeypatch: pytest.MonkeyPatch) -> None:
    model = plain(make_llama())

    with Live(model) as live:
        get_model_metadata(model)

    assert live.peak == 0


@pytest.mark.parametrize("block", [1, 40, 10_000])
def test_rows_and_blocks_of_any_size_give_the_same_values(
    make_llama, block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    weights = extract_weights(two_active_adapters(make_llama()))
    whole = [weight.read() for weight in weights]

    monkeypatch.setattr(formula, "_BLOCK", {"cpu": block})

    for weight, value in zip(weights, whole, strict=True):
        torch.testing.assert_close(weight.read(), value, rtol=1e-6, atol=1e-6)
        if weight.rows is not None:
            torch.testing.assert_close(weight.rows(3, 8), value[3:8], rtol=1e-6, atol=1e-6)


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
