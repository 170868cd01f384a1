"""Section B of the case list: wrong weights without an error."""

from __future__ import annotations

import copy
import gc
from collections.abc import Iterator, Mapping
from typing import Any

import pytest
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from tests.integration import kit
from tests.integration.kit import PAUSE, UPDATE
from weight_update import (
    EngineState,
    Stream,
    WeightMismatchError,
    WeightUpdateError,
    get_model_metadata,
)
from weight_update.reference_engine import ReferenceEngine
from weight_update.transports.process_group import UpdateGroup
from weight_update.weights.extract import extract_weights
from weight_update.weights.fitting import with_dtype

from .trial import NEW, Trial, once

HEAD = "lm_head.weight"
FORMATS = pytest.mark.parametrize("load_format", ["tensors", "flattened_bucket"])


def flat(model: nn.Module) -> dict[str, torch.Tensor]:
    """The model's tensors by name."""
    return {name: value.detach() for name, value in model.state_dict().items()}


def own_copy(seed: int) -> LlamaForCausalLM:
    """A model that a test may change."""
    return copy.deepcopy(kit.llama(seed))


def announced(log: kit.Log, engine: ReferenceEngine) -> list[tuple[str, str, list[int]]]:
    """Name, dtype and shape of every tensor that was announced, in order."""
    return [
        told
        for body in log.bodies(engine, UPDATE)
        for told in zip(body["names"], body["dtypes"], body["shapes"], strict=True)
    ]


# ---- C05


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> list[torch.Tensor]:
    """What was handed to the group, in order."""
    seen: list[torch.Tensor] = []
    broadcast = UpdateGroup.broadcast

    def watched(self: UpdateGroup, tensors: list[torch.Tensor]) -> None:
        seen.extend(tensors)
        broadcast(self, tensors)

    monkeypatch.setattr(UpdateGroup, "broadcast", watched)
    return seen


@pytest.mark.parametrize("target", [torch.float16, torch.bfloat16, torch.float64, None])
def test_c05_every_tensor_travels_in_the_dtype_that_was_announced(
    target: torch.dtype | None, engine: ReferenceEngine, sent: list[torch.Tensor]
) -> None:
    model = own_copy(1)
    model.model.norm.bfloat16()  # one layer was cast by hand
    before = {name: (v.data_ptr(), v.dtype) for name, v in model.named_parameters()}
    log = kit.Log(engine)
    with kit.make_sender(engine, dtype=target, load_format="tensors", verify="off") as sender:
        sender.update_weights(model)
    told = announced(log, engine)
    assert [(d, s) for _, d, s in told] == [
        (str(t.dtype).removeprefix("torch."), list(t.shape)) for t in sent
    ]
    if target is not None:
        assert {t.dtype for t in sent} == {target}
    assert {name: (v.data_ptr(), v.dtype) for name, v in model.named_parameters()} == before


def test_c05_the_engines_own_dtype_can_be_asked_for(sent: list[torch.Tensor]) -> None:
    with (
        ReferenceEngine(kit.llama(0), dtype="bfloat16") as served,
        kit.make_sender(served, dtype="engine", load_format="tensors", verify="off") as sender,
    ):
        sender.update_weights(own_copy(1))
    assert {tensor.dtype for tensor in sent} == {torch.bfloat16}


def test_c05_only_floating_tensors_are_cast() -> None:
    tensors = {
        "w": torch.ones(2),
        "steps": torch.ones(2, dtype=torch.int64),
        "mask": torch.ones(2, dtype=torch.bool),
        "half": torch.ones(2, dtype=torch.float16),
    }
    weights = extract_weights(tensors)
    dtypes = [with_dtype(weight, torch.bfloat16).spec.dtype for weight in weights]
    assert dtypes == [torch.bfloat16, torch.int64, torch.bool, torch.bfloat16]


# ---- C26


def adapted(seed: int, **settings: Any) -> Any:
    """A LoRA model over a copy of a seed's model, as PEFT makes it: B is zero."""
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(
        **{"r": 4, "lora_alpha": 8, "target_modules": "all-linear", **settings}
    )
    return peft.get_peft_model(own_copy(seed), config)


def train(model: nn.Module) -> None:
    """Give every trainable tensor a value of its own."""
    torch.manual_seed(11)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(0.2 * torch.randn_like(parameter))


@pytest.mark.parametrize("rslora", [False, True])
def test_c26_every_targeted_tensor_differs_from_the_base_once_b_is_not_zero(rslora: bool) -> None:
    base = flat(kit.llama(0))
    model = adapted(0, use_rslora=rslora)
    untrained = {w.spec.name: w.read() for w in extract_weights(model)}
    assert all(torch.equal(untrained[name], base[name]) for name in base)
    train(model)
    payload = {w.spec.name: w.read().clone() for w in extract_weights(model)}
    targeted = {name for name in base if "_proj" in name}
    assert {n for n in base if not torch.equal(payload[n], base[n])} == targeted


def test_c26_the_delta_reaches_the_engine_at_every_step(engine: ReferenceEngine) -> None:
    model = adapted(0)
    with kit.make_sender(engine) as sender:
        sender.register_model(model)
        sender.update_weights()
        assert kit.served(engine) == kit.tokens_of(0)
        for _ in range(2):
            train(model)
            sender.update_weights()
            assert kit.served(engine) == kit.greedy(model.eval())


# ---- C30


def renamed(old: str, new: str) -> dict[str, torch.Tensor]:
    """Model B with some names changed."""
    return {name.replace(old, new): value for name, value in flat(kit.llama(1)).items()}


UNKNOWN_NAMES = {
    "all of them": renamed("model.", "transformer."),
    "one layer": renamed("model.layers.1.mlp.up_proj", "model.layers.1.mlp.up"),
    "the last": renamed(HEAD, "head.weight"),
    "an extra one": {**flat(kit.llama(1)), "value_head.weight": torch.zeros(1, 32)},
}


@pytest.mark.parametrize("weights", UNKNOWN_NAMES.values(), ids=UNKNOWN_NAMES.keys())
def test_c30_names_that_the_engine_does_not_know_are_named_before_the_first_pause(
    weights: dict[str, torch.Tensor], engine: ReferenceEngine
) -> None:
    kit.push(engine, kit.llama(0))
    unknown = next(name for name in weights if name not in flat(kit.llama(1)))
    log = kit.Log(engine)
    with kit.make_sender(engine) as sender, pytest.raises(WeightUpdateError) as caught:
        sender.update_weights(weights)
    assert unknown in str(caught.value)
    assert caught.value.engine == engine.url
    assert caught.value.report.engines[engine.url].state is EngineState.OLD
    assert log.count(engine, PAUSE) == 0
    assert kit.served(engine) == kit.tokens_of(0)


def test_c30_a_whole_model_that_lacks_a_weight_of_the_engine_is_refused(
    engine: ReferenceEngine,
) -> None:
    """A tied trainer before an untied engine: the head would stay old."""
    model = own_copy(1)
    model.lm_head.weight = model.model.embed_tokens.weight
    log = kit.Log(engine)
    with kit.make_sender(engine) as sender, pytest.raises(WeightUpdateError, match=HEAD):
        sender.update_weights(model)
    assert log.count(engine, PAUSE) == 0


@pytest.mark.parametrize("size", [1, 3])
def test_c30_an_engine_that_says_yes_and_loads_nothing_is_not_called_new(
    size: int, three: list[ReferenceEngine]
) -> None:
    """Small tensors leave the trainer whether or not anybody takes them."""
    trial = Trial(three[:size])
    three[0].inject(once(UPDATE, "lie"))
    error = trial.fail(10.0)
    assert error.report.engines[three[0].url].state is not NEW
    assert trial.sender.version == trial.version
    trial.heal()


def test_c30_an_engine_that_takes_too_few_tensors_is_not_called_new(
    engine: ReferenceEngine,
) -> None:
    trial = Trial([engine], load_format="tensors")
    engine.inject(once(UPDATE, "wrong_count", when="after_receive", tensors=5))
    error = trial.fail(10.0)
    assert error.report.engines[engine.url].state is not NEW
    trial.heal()


def test_c30_without_verification_nothing_is_claimed(engine: ReferenceEngine) -> None:
    """The engine's yes is believed, and the report says so."""
    kit.push(engine, kit.llama(0))
    with kit.make_sender(engine, verify="off") as sender:
        report = sender.update_weights({"unknown.weight": torch.zeros(2)})
    assert report.verification == "off"
    assert kit.served(engine) == kit.tokens_of(0)


@pytest.mark.parametrize("verify", ["auto", "checksum", "sample"])
def test_c30_a_proof_that_was_given_is_named_in_the_report(
    verify: str, engine: ReferenceEngine
) -> None:
    with kit.make_sender(engine, verify=verify) as sender:
        report = sender.update_weights(kit.llama(1))
    assert report.verification == ("sample" if verify == "sample" else "checksum")
    assert kit.served(engine) == kit.tokens_of(1)


def test_c30_a_sample_has_the_first_the_last_a_tied_a_bias_and_a_norm() -> None:
    from weight_update.update.verify import sample_of

    names = ["visual.patch.weight", "model.embed_tokens.weight"]
    for layer in range(40):
        prefix = f"model.layers.{layer}"
        names += [f"{prefix}.self_attn.q_proj.weight", f"{prefix}.self_attn.q_proj.bias"]
        names += [f"{prefix}.post_attention_layernorm.weight", f"{prefix}.mlp.up_proj.weight"]
    names.append(HEAD)
    sample = sample_of(names)
    assert {names[0], names[-1], "model.embed_tokens.weight"} <= set(sample)
    assert any(name.endswith(".bias") for name in sample)
    assert any(name.endswith("norm.weight") for name in sample)
    assert len(sample) < len(names) / 4


# ---- C29


@pytest.fixture(scope="module")
def fusing() -> Iterator[ReferenceEngine]:
    """An engine that loses what it fuses and gets in parts; it serves model A."""
    with ReferenceEngine(kit.llama(0), fuses=True) as engine:
        yield engine


QUERY = "model.layers.0.self_attn.q_proj.weight"


def test_c29_the_engine_of_these_tests_loses_parts_and_says_yes(fusing: ReferenceEngine) -> None:
    kit.push(fusing, kit.llama(0))
    with kit.make_sender(fusing, verify="off") as sender:
        sender.update_weights({QUERY: flat(kit.llama(1))[QUERY]})
    assert kit.served(fusing) == kit.tokens_of(0)
    kit.wait_for(lambda: f"lost {QUERY}" in fusing.log())


@pytest.mark.parametrize("bucket_bytes", [1, 3_000, 5_000])
@FORMATS
def test_c29_tensors_that_the_engine_fuses_share_a_bucket(
    load_format: str, bucket_bytes: int, fusing: ReferenceEngine
) -> None:
    """The bucket's edge falls between them: q, k and v have 4, 2 and 2 kB, gate and up 8 each."""
    kit.push(fusing, kit.llama(0))
    with kit.make_sender(fusing, load_format=load_format, bucket_bytes=bucket_bytes) as sender:
        report = sender.update_weights(kit.llama(1))
    assert report.buckets > 8
    assert report.verification == "checksum"
    assert kit.served(fusing) == kit.tokens_of(1)


def test_c29_a_group_that_cannot_fit_is_told_in_one_line(
    fusing: ReferenceEngine, caplog: pytest.LogCaptureFixture
) -> None:
    with (
        caplog.at_level("INFO", logger="weight_update"),
        kit.make_sender(fusing, bucket_bytes=1) as sender,
    ):
        sender.update_weights(kit.llama(1))
    lines = [r.getMessage() for r in caplog.records if "fuse" in r.getMessage()]
    assert lines
    assert all("bucket_bytes=1 " in line or "bucket_bytes=1," in line for line in lines)
    assert "self_attn.qkv" in lines[0]


# ---- C34


def as_views(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The same values as transposed, strided, sliced and expanded views, in turns."""

    def strided(value: torch.Tensor) -> torch.Tensor:
        return torch.stack([value, -value], dim=1).flatten(0, 1)[::2]

    def sliced(value: torch.Tensor) -> torch.Tensor:
        return torch.cat([torch.full_like(value, 9.0), value, value], dim=-1)[
            ..., value.shape[-1] : 2 * value.shape[-1]
        ]

    def transposed(value: torch.Tensor) -> torch.Tensor:
        return value.transpose(0, -1).contiguous().transpose(0, -1)

    def expanded(value: torch.Tensor) -> torch.Tensor:
        same = bool((value == value.flatten()[0]).all())
        return value.flatten()[:1].clone().expand(value.shape) if same else sliced(value)

    makers = (strided, sliced, transposed, expanded)
    return {
        n: makers[i % 4](v) if v.dim() > 1 else expanded(v)
        for i, (n, v) in enumerate(tensors.items())
    }


@FORMATS
def test_c34_views_of_every_kind_arrive_by_their_values(
    load_format: str, engine: ReferenceEngine
) -> None:
    views = as_views(flat(kit.llama(1)))
    assert all(torch.equal(views[n], v) for n, v in flat(kit.llama(1)).items())
    assert sum(not view.is_contiguous() for view in views.values()) > len(views) / 2
    kit.push(engine, kit.llama(0))
    with kit.make_sender(engine, load_format=load_format, bucket_bytes=9_000) as sender:
        sender.update_weights(views)
    assert kit.served(engine) == kit.tokens_of(1)


# ---- C52


class Restless(Mapping[str, torch.Tensor]):
    """A mapping that gives its items in another order each time it is walked."""

    def __init__(self, tensors: dict[str, torch.Tensor]) -> None:
        self._tensors = tensors
        self._walks = 0

    def __iter__(self) -> Iterator[str]:
        self._walks += 1
        names = sorted(self._tensors, key=lambda name: hash((name, self._walks)))
        return iter(names)

    def __getitem__(self, name: str) -> torch.Tensor:
        return self._tensors[name]

    def __len__(self) -> int:
        return len(self._tensors)


@FORMATS
def test_c52_an_order_that_changes_between_passes_swaps_no_tensors(
    load_format: str, engine: ReferenceEngine
) -> None:
    weights = Restless(flat(kit.llama(1)))
    assert list(weights) != list(weights)
    kit.push(engine, kit.llama(0))
    with kit.make_sender(engine, load_format=load_format, bucket_bytes=5_000) as sender:
        sender.init_all_workers_group(get_model_metadata(kit.llama(1)))
        sender.update_weights(weights)
    assert kit.served(engine) == kit.tokens_of(1)


def grow(weights: dict[str, torch.Tensor]) -> None:
    weights["model.norm.weight"] = torch.ones(33)


def recast(weights: dict[str, torch.Tensor]) -> None:
    weights["model.norm.weight"] = torch.ones(32, dtype=torch.float16)


def swap_shapes(weights: dict[str, torch.Tensor]) -> None:
    name = "model.layers.0.mlp.down_proj.weight"
    weights[name] = weights[name].t()


@pytest.mark.parametrize("change", [grow, recast, swap_shapes])
def test_c52_what_changed_since_the_metadata_was_taken_is_refused_before_the_pause(
    change: Any, engine: ReferenceEngine
) -> None:
    with kit.make_sender(engine) as sender:
        sender.init_all_workers_group(get_model_metadata(kit.llama(1)))
        weights = flat(kit.llama(1))
        change(weights)
        log = kit.Log(engine)
        with pytest.raises(WeightMismatchError):
            sender.update_weights(weights)
        assert log.count(engine, PAUSE) == 0


# ---- C54


def test_c54_a_trainer_that_goes_on_with_a_copy_registers_the_copy(
    engine: ReferenceEngine,
) -> None:
    model = own_copy(0)
    with kit.make_sender(engine) as sender:
        sender.register_model(model)
        sender.update_weights()
        model = copy.deepcopy(model)
        model.load_state_dict(kit.llama(1).state_dict())
        sender.register_model(model)
        sender.update_weights()
    assert kit.served(engine) == kit.tokens_of(1)


def test_c54_the_original_is_not_kept_alive_for_a_trainer_that_went_on_with_a_copy(
    engine: ReferenceEngine,
) -> None:
    model = own_copy(0)
    with kit.make_sender(engine) as sender:
        sender.register_model(model)
        sender.update_weights()
        model = copy.deepcopy(model)
        gc.collect()
        log = kit.Log(engine)
        with pytest.raises(WeightUpdateError, match="garbage-collected"):
            sender.update_weights()
        assert log.count(engine, PAUSE) == 0


def test_c54_a_function_that_gives_the_model_is_asked_at_every_update(
    engine: ReferenceEngine,
) -> None:
    held = {"model": own_copy(0)}
    with kit.make_sender(engine) as sender:
        sender.register_model(lambda: held["model"])
        sender.update_weights()
        held["model"] = copy.deepcopy(held["model"])
        held["model"].load_state_dict(kit.llama(1).state_dict())
        sender.update_weights()
    assert kit.served(engine) == kit.tokens_of(1)


def test_c54_a_model_that_moved_to_another_dtype_in_place_is_followed(
    engine: ReferenceEngine,
) -> None:
    model = own_copy(1).double()
    with kit.make_sender(engine) as sender:
        sender.register_model(model)
        sender.update_weights()
        model.float()
        report = sender.update_weights()
    assert report.bytes == sum(value.nbytes for value in flat(model).values())
    assert kit.served(engine) == kit.tokens_of(1)


# ---- C74


def test_c74_an_adapter_added_after_the_first_update_is_merged_into_the_next(
    engine: ReferenceEngine,
) -> None:
    peft = pytest.importorskip("peft")
    model = own_copy(0)
    with kit.make_sender(engine) as sender:
        sender.register_model(model)
        sender.init_all_workers_group()
        sender.update_weights()
        config = peft.LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False)
        grown = peft.inject_adapter_in_model(config, model)
        sender.update_weights()
    assert kit.served(engine) == kit.greedy(grown.eval())


def test_c74_a_resized_embedding_is_refused_before_the_pause_where_metadata_was_given(
    engine: ReferenceEngine,
) -> None:
    model = own_copy(1)
    with kit.make_sender(engine) as sender:
        sender.register_model(model)
        sender.init_all_workers_group(get_model_metadata(model))
        model.resize_token_embeddings(80)
        log = kit.Log(engine)
        with pytest.raises(WeightMismatchError, match="changed shape"):
            sender.update_weights()
        assert log.count(engine, PAUSE) == 0


def test_c74_a_resized_embedding_is_never_reported_new(engine: ReferenceEngine) -> None:
    """Without metadata the engine's own refusal is what there is."""
    trial = Trial([engine])
    model = own_copy(1)
    model.resize_token_embeddings(80)
    with pytest.raises(WeightUpdateError) as caught:
        trial.sender.update_weights(model)
    assert caught.value.report.engines[engine.url].state is not NEW
    trial.heal()


@pytest.mark.parametrize(
    ("mark", "way_out"),
    [("policy.", r"name_map=.r.\^policy"), ("base_model.model.", "PEFT model, the module itself")],
)
def test_what_a_wrapper_put_before_all_names_is_told_with_the_way_out(
    engine: ReferenceEngine, mark: str, way_out: str
) -> None:
    marked = {f"{mark}{name}": value for name, value in flat(kit.llama(1)).items()}
    with kit.make_sender(engine) as sender, pytest.raises(WeightMismatchError, match=way_out):
        sender.update_weights(marked)


def wide(source: str) -> Any:
    """Weights of another hidden size, whole."""
    model = LlamaForCausalLM(LlamaConfig(**{**kit.llama(1).config.to_dict(), "hidden_size": 48}))
    if source == "a module":
        return model
    pairs = model.state_dict().items()
    return Stream(pairs, whole=True) if source == "a stream" else dict(pairs)


@pytest.mark.parametrize("source", ["a module", "a mapping", "a stream"])
def test_c74_another_hidden_size_is_refused_before_the_pause(
    engine: ReferenceEngine, source: str
) -> None:
    """The folder that the engine loaded from is readable here."""
    before, log = kit.served(engine), kit.Log(engine)
    with (
        kit.make_sender(engine) as sender,
        pytest.raises(WeightMismatchError, match="have another shape") as caught,
    ):
        sender.update_weights(wide(source))
    assert caught.value.phase == "plan"
    assert log.count(engine, PAUSE) == 0
    assert kit.served(engine) == before


# ---- C82


def test_c82_a_nan_is_refused_before_any_call_where_that_is_asked_for(
    engine: ReferenceEngine,
) -> None:
    model = own_copy(1)
    with torch.no_grad():
        model.model.norm.weight[3] = float("nan")
    with kit.make_sender(engine, check_finite=True) as sender:
        sender.update_weights(kit.llama(0))
        log = kit.Log(engine)
        with pytest.raises(WeightMismatchError, match=r"'model\.norm\.weight'"):
            sender.update_weights(model)
        assert log.count(engine, PAUSE) == 0
        assert log.count(engine, UPDATE) == 0
    assert kit.served(engine) == kit.tokens_of(0)


def test_c82_without_a_check_a_nan_is_sent_bit_for_bit(engine: ReferenceEngine) -> None:
    model = own_copy(1)
    with torch.no_grad():
        model.model.norm.weight[3] = float("nan")
        model.model.norm.weight[4] = float("-inf")
    with kit.make_sender(engine) as sender:
        report = sender.update_weights(model)
    assert report.engines[engine.url].state is NEW
    assert report.verification == "checksum"
