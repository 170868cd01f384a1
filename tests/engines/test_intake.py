"""What a real server says of how it takes weights, and that it takes them so (C05, C29, C62)."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import requests
import torch

from weight_update import SGLangWeightSyncScheme, WeightMismatchError
from weight_update.engines.sglang.engine import SGLangEngine
from weight_update.options import HttpOptions
from weight_update.waiting import Deadline

from .models import SEED_A, SEED_B, VOCAB_SIZE, TinyModels, greedy, tiny_llama
from .served import PROMPT, Served, sender_of
from .sglang_server import SGLangServer

COUNT = 24


def inspected(server: SGLangServer) -> SGLangEngine:
    engine = SGLangEngine(server.url, HttpOptions())
    engine.inspect(Deadline(60))
    return engine


def push(server: SGLangServer, weights: Any, **options: Any) -> Any:
    with SGLangWeightSyncScheme(server.url, timeout=60, **options).create_sender() as sender:
        return sender.update_weights(weights)


def state_of(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: value.detach() for name, value in model.state_dict().items()}


def padded(seed: int, rows: int) -> dict[str, torch.Tensor]:
    """A model's weights with rows of nonsense behind the vocabulary."""
    state = state_of(tiny_llama(seed))
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        rest = torch.full((rows - VOCAB_SIZE, state[name].shape[1]), 9.0)
        state[name] = torch.cat([state[name], rest])
    return state


def test_a_server_says_how_it_takes_weights(served: Served) -> None:
    intake = inspected(served.server).intake

    assert intake.dtype == str(served.dtype).removeprefix("torch.")
    assert intake.vocabulary == VOCAB_SIZE
    assert intake.architectures in (("LlamaForCausalLM",), ("Qwen2ForCausalLM",))
    assert (intake.quantization, intake.block, intake.drafts) == (None, None, False)
    assert intake.requantises
    assert intake.partial_modules


def test_a_trainer_in_fp32_sends_what_the_server_runs(at_a: Served) -> None:
    model = at_a.model(SEED_B).float()
    with sender_of(at_a, dtype="engine") as sender:
        report = sender.update_weights(model)

    # Of tied weights, the parameters are counted once, and they are what travels.
    parameters = sum(value.numel() for value in model.parameters())
    assert report.bytes == at_a.dtype.itemsize * parameters
    assert at_a.serves(SEED_B)


def test_weights_that_are_fused_arrive_whatever_the_size_of_a_bucket(at_a: Served) -> None:
    with sender_of(at_a, bucket_bytes=1) as sender:
        report = sender.update_weights(at_a.model(SEED_B))

    assert report.buckets < report.tensors
    assert at_a.serves(SEED_B)


def test_one_part_of_a_fused_module_is_taken_and_the_others_stay(
    sglang_at_a: SGLangServer,
) -> None:
    name = "model.layers.0.self_attn.q_proj.weight"
    mixed = tiny_llama(SEED_A)
    value = state_of(tiny_llama(SEED_B))[name]
    mixed.get_parameter(name).data.copy_(value)
    mixed.eval()

    push(sglang_at_a, {name: value})

    assert sglang_at_a.generate(PROMPT, COUNT) == greedy(mixed, PROMPT, COUNT)
    assert greedy(mixed, PROMPT, COUNT) != greedy(tiny_llama(SEED_A).eval(), PROMPT, COUNT)


def test_padding_is_refused_before_the_pause_and_cut_on_request(sglang_at_a: SGLangServer) -> None:
    before = sglang_at_a.generate(PROMPT, COUNT)

    with pytest.raises(WeightMismatchError, match=rf"264 rows.*has {VOCAB_SIZE}"):
        push(sglang_at_a, padded(SEED_B, 264))
    assert sglang_at_a.is_ready()
    assert sglang_at_a.generate(PROMPT, COUNT) == before

    push(sglang_at_a, padded(SEED_B, 264), trim_vocabulary=True)
    assert sglang_at_a.generate(PROMPT, COUNT) == greedy(tiny_llama(SEED_B).eval(), PROMPT, COUNT)


def test_a_nan_is_refused_before_the_pause(sglang_at_a: SGLangServer) -> None:
    model = copy.deepcopy(tiny_llama(SEED_B))
    with torch.no_grad():
        model.model.norm.weight[3] = float("nan")

    with pytest.raises(WeightMismatchError, match=r"model\.norm\.weight"):
        push(sglang_at_a, model, check_finite=True)
    assert sglang_at_a.is_ready()


def test_an_update_may_name_the_model_that_is_served(sglang_at_a: SGLangServer) -> None:
    """There is no draft model here: what is shown is that the field is known and kept to."""

    def post(route: str, body: dict[str, Any]) -> requests.Response:
        return requests.post(f"{sglang_at_a.url}/{route}", json=body, timeout=60)

    try:
        assert post("begin_weight_update", {"selector": "target"}).ok
        assert post("end_weight_update", {}).ok
        assert post("begin_weight_update", {"selector": "another"}).status_code in (400, 422)
    finally:
        post("end_weight_update", {})


def test_a_checkpoint_in_fp32_is_served_in_fp16_where_the_dtype_is_left_to_the_server(
    tiny_models: TinyModels, tmp_path_factory: pytest.TempPathFactory
) -> None:
    home = tmp_path_factory.mktemp("auto")
    with SGLangServer(tiny_models.a, home / "server.log", ["--dtype", "auto"]) as server:
        assert inspected(server).intake.dtype == "float16"
        (row,) = server.post("get_weights_by_name", {"name": "lm_head.weight", "truncate_size": 1})
        kept = tiny_llama(SEED_A).lm_head.weight[0].half().tolist()
        assert row == kept
