"""A plain update: what engines generate, what they are asked, and what is reported."""

from __future__ import annotations

import gc
import json
from itertools import pairwise
from math import ceil
from typing import Any

import pytest
import torch
from tensordict import TensorDict
from torch import nn
from transformers import LlamaForCausalLM

from weight_update import (
    ConfigurationError,
    EngineState,
    WeightMismatchError,
    WeightUpdateError,
    get_model_metadata,
)
from weight_update.reference_engine import ReferenceEngine

from . import kit
from .kit import BEGIN, CONTINUE, END, INIT, LEAVE, PAUSE, STAMP, UPDATE


def flat(model: nn.Module) -> dict[str, torch.Tensor]:
    """The model's state dict."""
    return {name: value.detach() for name, value in model.state_dict().items()}


@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.parametrize("load_format", ["flattened_bucket", "tensors"])
def test_engines_generate_with_the_new_weights_after_an_update(
    size: int, load_format: str, three: list[ReferenceEngine]
) -> None:
    engines = three[:size]
    with kit.make_sender(engines, load_format=load_format) as sender:
        for seed in (0, 1):
            sender.register_model(kit.llama(seed))
            report = sender.update_weights()
            assert [kit.served(e) for e in engines] == [kit.tokens_of(seed)] * size
            assert {o.state for o in report.engines.values()} == {EngineState.NEW}


def test_engines_of_a_fleet_have_ranks_of_their_own_in_one_group(
    three: list[ReferenceEngine],
) -> None:
    """One broadcast reaches all: every engine joins the same group and gets the same requests."""
    log = kit.Log(*three)
    kit.push(three, kit.llama(1))
    joins = [log.bodies(engine, INIT)[0] for engine in three]
    assert [body["rank_offset"] for body in joins] == [1, 2, 3]
    assert {body["world_size"] for body in joins} == {4}
    shared = ("master_address", "master_port", "group_name", "backend")
    assert all(body[key] == joins[0][key] for body in joins for key in shared)
    assert joins[0]["backend"] == "gloo"
    updates = [log.bodies(engine, UPDATE) for engine in three]
    assert updates[0] == updates[1] == updates[2]


def test_the_steps_come_in_order_and_none_is_left_out(engine: ReferenceEngine) -> None:
    """The flush has no step of its own: the last update request carries it."""
    log = kit.Log(engine)
    kit.push(engine, kit.llama(1))
    assert log.steps(engine) == [PAUSE, BEGIN, UPDATE, END, STAMP, CONTINUE]
    answers = [(r["t0"], r["t1"]) for r in log.records(engine) if r["path"] in kit.STEPS]
    assert all(end <= start for (_, end), (start, _) in pairwise(answers))


def test_no_call_aborts_requests_and_the_label_is_written_once(engine: ReferenceEngine) -> None:
    """C31: defaults of the engine's routes abort and flush, so every flag is sent."""
    log = kit.Log(engine)
    with kit.make_sender(engine, bucket_bytes=20_000) as sender:
        report = sender.update_weights(kit.llama(1))
    updates = log.bodies(engine, UPDATE)
    assert len(updates) == report.buckets > 2
    assert {body["abort_all_requests"] for body in updates} == {False}
    assert log.flags(engine) == [False] * (report.buckets - 1) + [True]
    assert not any("weight_version" in body for body in updates)
    stamp = {"new_version": str(report.version), "abort_all_requests": False}
    assert log.bodies(engine, STAMP) == [stamp]
    assert log.bodies(engine, PAUSE) == [{"mode": "retract"}]


def test_many_small_tensors_travel_in_few_requests(engine: ReferenceEngine) -> None:
    """C59: at most ceil(total / cap) + 1 requests, and no tensor twice."""
    tensors = {f"unknown.{i}": torch.zeros(100) for i in range(400)}
    cap = 20 * 400
    log = kit.Log(engine)
    with kit.make_sender(engine, bucket_bytes=cap, verify="off") as sender:
        report = sender.update_weights(tensors)
    assert report.buckets == log.count(engine, UPDATE) <= ceil(report.bytes / cap) + 1
    names = [name for body in log.bodies(engine, UPDATE) for name in body["names"]]
    assert sorted(names) == sorted(tensors)
    assert (report.tensors, report.bytes) == (400, 160_000)


def test_what_is_above_the_cap_travels_alone_and_what_engines_fuse_stays_together(
    engine: ReferenceEngine,
) -> None:
    """C21, C29: nothing is split; q, k, v and gate, up of the two layers share a request each."""
    log = kit.Log(engine)
    with kit.make_sender(engine, bucket_bytes=1) as sender:
        report = sender.update_weights(kit.llama(1))
    assert report.tensors == 21
    assert report.buckets == 21 - 2 * (2 + 1) == log.count(engine, UPDATE)
    assert kit.served(engine) == kit.tokens_of(1)


def mixed_dtypes(model: LlamaForCausalLM) -> dict[str, torch.Tensor]:
    """The model with every other tensor in bf16 or fp64, and an odd-sized byte tensor."""
    kinds = (torch.float32, torch.bfloat16, torch.float64)
    items = enumerate(flat(model).items())
    cast = {name: value.to(kinds[i % 3]) for i, (name, value) in items}
    return {"unknown.flags": torch.ones(3, dtype=torch.uint8), **cast}


@pytest.mark.parametrize("bucket_bytes", [None, 5_000])
def test_dtypes_may_be_mixed_in_a_bucket(bucket_bytes: int | None, engine: ReferenceEngine) -> None:
    """C05: each dtype announced is the one sent, and offsets stay aligned."""
    tensors = mixed_dtypes(kit.llama(1))
    expected = LlamaForCausalLM(kit.llama(1).config)
    expected.load_state_dict({k: v.float() for k, v in tensors.items() if k != "unknown.flags"})
    log = kit.Log(engine)
    with kit.make_sender(engine, bucket_bytes=bucket_bytes, verify="off") as sender:
        sender.update_weights(tensors)
    assert kit.served(engine) == kit.greedy(expected.eval())
    announced = {
        name: dtype
        for body in log.bodies(engine, UPDATE)
        for name, dtype in zip(body["names"], body["dtypes"], strict=True)
    }
    assert announced == {k: str(v.dtype).removeprefix("torch.") for k, v in tensors.items()}


def bf16_copy(model: LlamaForCausalLM) -> LlamaForCausalLM:
    copied = LlamaForCausalLM(model.config)
    copied.load_state_dict(model.state_dict())
    return copied.to(torch.bfloat16).eval()


def test_a_bf16_model_reaches_an_fp32_engine(engine: ReferenceEngine) -> None:
    """C05: the engine casts; half the bytes travel."""
    half = bf16_copy(kit.llama(1))
    with kit.make_sender(engine) as sender:
        report = sender.update_weights(half)
    assert report.bytes == 2 * sum(value.numel() for value in flat(half).values())
    assert kit.served(engine) == kit.greedy(half.float())


def test_floating_tensors_are_cast_on_the_way_and_the_model_is_left_alone(
    engine: ReferenceEngine,
) -> None:
    """C05: fp32 masters, bf16 on the wire; same storage and dtype afterwards."""
    model = kit.llama(1)
    addresses = [value.data_ptr() for value in model.parameters()]
    log = kit.Log(engine)
    with kit.make_sender(engine, dtype=torch.bfloat16, verify="off") as sender:
        sender.update_weights({**flat(model), "unknown.count": torch.tensor([7])})
    dtypes = {d for body in log.bodies(engine, UPDATE) for d in body["dtypes"]}
    assert dtypes == {"bfloat16", "int64"}
    assert [value.data_ptr() for value in model.parameters()] == addresses
    assert {value.dtype for value in model.parameters()} == {torch.float32}
    assert kit.served(engine) == kit.greedy(bf16_copy(model).float())


def test_non_contiguous_tensors_arrive_in_logical_order(engine: ReferenceEngine) -> None:
    """C34: a view is sent by its values, not by its storage."""
    views = {name: value.t().contiguous().t() for name, value in flat(kit.llama(1)).items()}
    assert not all(view.is_contiguous() for view in views.values())
    with kit.make_sender(engine, load_format="tensors") as sender:
        sender.update_weights(views)
        assert kit.served(engine) == kit.tokens_of(1)
    kit.push(engine, kit.llama(0))
    kit.push(engine, views)
    assert kit.served(engine) == kit.tokens_of(1)


def test_tied_embeddings_travel_once_and_both_ends_change() -> None:
    """C14: one tensor on the wire, and the head follows the embedding."""
    with ReferenceEngine(kit.qwen2(0)) as engine, kit.make_sender(engine) as sender:
        log = kit.Log(engine)
        sender.update_weights(kit.qwen2(1))
        names = [name for body in log.bodies(engine, UPDATE) for name in body["names"]]
        assert "model.embed_tokens.weight" in names
        assert "lm_head.weight" not in names
        assert kit.served(engine) == kit.greedy(kit.qwen2(1))


def lora_of(model: LlamaForCausalLM) -> Any:
    """A LoRA model over a copy of ``model``, with both factors far from zero."""
    peft = pytest.importorskip("peft")
    base = LlamaForCausalLM(model.config)
    base.load_state_dict(model.state_dict())
    torch.manual_seed(5)
    config = peft.LoraConfig(r=4, lora_alpha=16, target_modules=["q_proj", "down_proj"])
    adapted = peft.get_peft_model(base, config)
    for name, parameter in adapted.named_parameters():
        if "lora_" in name:
            nn.init.normal_(parameter, std=0.3)
    return adapted.eval()


def test_a_lora_model_pushes_merged_weights_and_keeps_its_adapter(
    engine: ReferenceEngine,
) -> None:
    """C13, C26: bare names, values of the merge; the engine generates what the model would."""
    adapted = lora_of(kit.llama(0))
    before = {name: value.clone() for name, value in adapted.state_dict().items()}
    log = kit.Log(engine)
    with kit.make_sender(engine) as sender:
        sender.register_model(adapted)
        sender.update_weights()
    names = [name for body in log.bodies(engine, UPDATE) for name in body["names"]]
    assert sorted(names) == sorted(kit.llama(0).state_dict())
    expected = kit.greedy(adapted)
    assert kit.served(engine) == expected != kit.tokens_of(0)
    assert all(torch.equal(value, before[name]) for name, value in adapted.state_dict().items())
    assert kit.greedy(adapted.merge_and_unload()) == expected


SOURCES = {
    "module": lambda model: model,
    "dict": flat,
    "tensordict": lambda model: TensorDict(flat(model)),
    "nested": lambda model: TensorDict(flat(model)).unflatten_keys("."),
    "data-parallel": nn.DataParallel,
    "compiled": torch.compile,
}


@pytest.mark.parametrize("kind", SOURCES)
def test_weights_come_from_any_source(kind: str, engine: ReferenceEngine) -> None:
    """C15: wrappers and containers leave no trace in the names."""
    kit.push(engine, kit.llama(0))
    kit.push(engine, SOURCES[kind](kit.llama(1)))
    assert kit.served(engine) == kit.tokens_of(1)


# ---- metadata: everything that does not fit is found before a pause


def without(name: str) -> dict[str, torch.Tensor]:
    tensors = flat(kit.llama(1))
    del tensors[name]
    return tensors


def changed(name: str, value: torch.Tensor) -> dict[str, torch.Tensor]:
    return {**flat(kit.llama(1)), name: value}


HEAD = "lm_head.weight"


@pytest.mark.parametrize(
    ("weights", "words"),
    [
        (without(HEAD), "not found"),
        (changed(HEAD, torch.zeros(64, 32, dtype=torch.bfloat16)), "changed dtype"),
        (changed(HEAD, torch.zeros(60, 32)), "changed shape"),
        (changed(HEAD, torch.zeros(0)), "changed shape"),
    ],
    ids=["missing", "dtype", "shape", "empty"],
)
def test_weights_that_differ_from_the_metadata_are_refused_before_a_pause(
    weights: dict[str, torch.Tensor], words: str, engine: ReferenceEngine
) -> None:
    """C52, C74, C43: never after a pause, and never under another tensor's name."""
    with kit.make_sender(engine) as sender:
        sender.init_all_workers_group(get_model_metadata(kit.llama(1)))
        log = kit.Log(engine)
        with pytest.raises(WeightMismatchError, match=words) as caught:
            sender.update_weights(weights)
        assert caught.value.phase == "plan"
        assert HEAD in str(caught.value)
        assert log.count(engine, PAUSE) == 0
        sender.update_weights(kit.llama(1))
        assert kit.served(engine) == kit.tokens_of(1)


def test_names_that_the_metadata_does_not_have_are_left_out(engine: ReferenceEngine) -> None:
    with kit.make_sender(engine) as sender:
        sender.init_all_workers_group(get_model_metadata(kit.llama(1)))
        log = kit.Log(engine)
        sender.update_weights({"value_head.weight": torch.zeros(3), **flat(kit.llama(1))})
    assert "value_head.weight" not in log.bodies(engine, UPDATE)[0]["names"]


def test_a_model_that_changed_since_the_group_was_made_sends_the_new_facts(
    engine: ReferenceEngine,
) -> None:
    """C74: without metadata, each update announces the model as it is."""
    model = bf16_copy(kit.llama(1)).float()
    with kit.make_sender(engine) as sender:
        sender.register_model(model)
        sender.init_all_workers_group()
        model.bfloat16()
        log = kit.Log(engine)
        sender.update_weights()
    assert set(log.bodies(engine, UPDATE)[0]["dtypes"]) == {"bfloat16"}


def forgotten(sender: Any) -> None:
    sender.register_model(nn.Linear(1, 1))
    gc.collect()


UNUSABLE = {
    "no model": (lambda sender: None, None, WeightUpdateError, "No model registered"),
    "collected": (forgotten, None, WeightUpdateError, "garbage-collected"),
    "empty": (lambda sender: None, nn.Identity(), ConfigurationError, "no weights to send"),
    "not tensors": (lambda sender: None, {"a": 1}, WeightMismatchError, r"not tensors: 'a' \(int"),
    "a training checkpoint": (
        lambda sender: None,
        {"model": {"a": torch.ones(1)}, "step": 3},
        WeightMismatchError,
        "not tensors.*pass the entry 'model'",
    ),
    "an optimizer": (
        lambda sender: None,
        torch.optim.SGD([torch.ones(1)], 0.1).state_dict(),
        WeightMismatchError,
        "state of an optimizer",
    ),
    "text": (
        lambda sender: None,
        "policy",
        ConfigurationError,
        r"cannot be read.*Checkpoint\(path\).*SavedStateDict\(path\)",
    ),
    "a list": (
        lambda sender: None,
        [("a", torch.ones(1))],
        ConfigurationError,
        r"cannot be read.*dict\(pairs\), or Stream\(pairs, whole=True\)",
    ),
    "meta": (
        lambda sender: None,
        {"a": torch.zeros(1, device="meta")},
        ConfigurationError,
        "meta device",
    ),
}


@pytest.mark.parametrize("case", UNUSABLE)
def test_a_source_without_weights_is_refused_before_a_pause(
    case: str, engine: ReferenceEngine
) -> None:
    """C54 and neighbours."""
    prepare, weights, error, words = UNUSABLE[case]
    log = kit.Log(engine)
    with kit.make_sender(engine) as sender:
        prepare(sender)
        with pytest.raises(error, match=words):
            sender.update_weights(weights)
    assert log.count(engine, PAUSE) == 0


def test_a_tensor_changed_by_a_reader_in_mid_update_is_never_sent_as_announced(
    engine: ReferenceEngine,
) -> None:
    """C40, C52: found while packing; the first bucket is packed before the pause."""
    model = bf16_copy(kit.llama(1)).float()
    kit.push(engine, kit.llama(0))
    first = next(iter(model.parameters()))
    with kit.make_sender(engine) as sender:
        sender.init_all_workers_group()
        weights = flat(model)
        weights[HEAD] = Shrinking(weights[HEAD])
        log = kit.Log(engine)
        with pytest.raises(WeightMismatchError, match=HEAD):
            sender.update_weights(weights)
    assert log.count(engine, PAUSE) == 0
    assert kit.served(engine) == kit.tokens_of(0)
    assert first.shape == (64, 32)


class Shrinking(torch.Tensor):
    """A tensor that has fewer rows when its value is read."""

    @staticmethod
    def __new__(cls, data: torch.Tensor) -> Shrinking:
        return torch.Tensor._make_subclass(cls, data)

    def detach(self) -> torch.Tensor:
        return self.as_subclass(torch.Tensor)[:5]


# ---- the report


def test_the_report_says_what_was_done(engine: ReferenceEngine) -> None:
    with kit.make_sender(engine) as sender:
        report = sender.update_weights(kit.llama(1))
    model = flat(kit.llama(1))
    assert report.tensors == len(model)
    assert report.bytes == sum(value.nbytes for value in model.values())
    assert report.buckets == 1
    assert report.pause_mode == "retract"
    assert report.warnings == ()
    assert " ".join(report.seconds) == (
        "plan connect pause drain begin transfer end flush verify stamp count continue paused total"
    )
    assert 0 < report.seconds["transfer"] < report.seconds["paused"] < report.seconds["total"]
    outcome = report.engines[engine.url]
    assert (outcome.state, outcome.paused, outcome.detail) == (EngineState.NEW, False, "")
    assert outcome.version == kit.label(engine) == str(report.version)


def test_the_report_is_json_and_prints_every_engine(three: list[ReferenceEngine]) -> None:
    with kit.make_sender(three) as sender:
        report = sender.update_weights(kit.llama(1))
    plain = json.loads(json.dumps(report.to_dict()))
    assert plain["version"] == report.version
    assert [plain["engines"][e.url]["state"] for e in three] == ["new"] * 3
    assert all(f"{e.url} new" in str(report) for e in three)
    assert f"version {report.version}: {report.tensors} tensors" in str(report)


def test_a_second_update_uses_the_same_group(engine: ReferenceEngine) -> None:
    log = kit.Log(engine)
    with kit.make_sender(engine) as sender:
        sender.update_weights(kit.llama(0))
        report = sender.update_weights(kit.llama(1))
    assert log.count(engine, INIT) == 1
    assert "connect" not in report.seconds


def test_shutdown_leaves_no_group_on_the_engine(engine: ReferenceEngine) -> None:
    log = kit.Log(engine)
    with kit.make_sender(engine) as sender:
        sender.update_weights(kit.llama(1))
    (joined,) = log.bodies(engine, INIT)
    left = log.records(engine, LEAVE)
    assert [r["json"]["group_name"] for r in left] == [joined["group_name"]]
    assert left[0]["status"] == 200
