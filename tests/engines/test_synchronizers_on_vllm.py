"""The rows of vLLM and of dynamo on a real server, and the memory that it frees in between."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from tests.vllm_fake.dynamo import DynamoWorker
from weight_update import VLLMWeightSyncScheme, WeightUpdateError
from weight_update.synchronizers import (
    DynamoGeneration,
    StaticCluster,
    TorchPolicy,
    VLLMGeneration,
    WeightSynchronizer,
    create_weight_synchronizer,
)

from .models import SEED_B, greedy
from .vllm_server import VLLMServer, vllm_llama

PROMPT = [3, 14, 15, 92, 65]
TOKENS = 24
CLUSTERS = {"train_cluster": StaticCluster(1), "inference_cluster": StaticCluster(1)}


def serves(server: VLLMServer, model: Any) -> bool:
    return server.generate(PROMPT, TOKENS) == greedy(model, PROMPT, TOKENS)


def sleeping(server: VLLMServer) -> bool:
    return bool(server.get("is_sleeping")["is_sleeping"])


@pytest.fixture
def generation(vllm: VLLMServer) -> Iterator[VLLMGeneration]:
    """Has the server sleep between rollouts."""
    made = VLLMGeneration(vllm.url, needs_offload=True, timeout=60.0)
    yield made
    made.prepare_for_generation()
    made.shutdown()


@pytest.fixture
def model() -> Any:
    return vllm_llama(SEED_B)


def synchronizer(model: Any, generation: Any, backend: str, **more: Any) -> WeightSynchronizer:
    made = create_weight_synchronizer(TorchPolicy(model), generation, backend, **more)
    made.init_communicator()
    return made


def sync(made: WeightSynchronizer) -> dict[str, float]:
    assert made.is_stale
    metrics = made.sync_weights()
    assert not made.is_stale
    assert metrics is not None
    return metrics


def test_weights_are_broadcast_to_a_server_with_devices_of_its_own(
    vllm: VLLMServer, generation: VLLMGeneration, model: Any
) -> None:
    made = synchronizer(model, generation, "vllm", colocated=False, **CLUSTERS)
    try:
        metrics = sync(made)
        assert serves(vllm, model)
        assert vllm.label() == str(int(metrics["version"]))

        with torch.no_grad():
            model.lm_head.weight.mul_(-1)
        made.sync_weights()
        assert serves(vllm, model)
    finally:
        made.shutdown()


def test_a_server_that_sleeps_opens_the_trainers_memory_and_wakes_up_with_the_new_weights(
    vllm: VLLMServer, generation: VLLMGeneration, model: Any
) -> None:
    made = synchronizer(model, generation, "vllm", colocated=True)
    try:
        for scale in (1, -1):
            generation.finish_generation()
            assert sleeping(vllm)
            with torch.no_grad():
                model.lm_head.weight.mul_(scale)
            made.sync_weights()
            assert not sleeping(vllm)
            assert not vllm.is_paused()
            assert serves(vllm, model)
    finally:
        made.shutdown()


def test_a_sync_that_fails_before_anything_is_sent_wakes_the_server_up_as_it_was(
    vllm: VLLMServer, generation: VLLMGeneration, model: Any
) -> None:
    checked = VLLMGeneration(vllm.url, needs_offload=True, check_finite=True, timeout=60.0)
    made = synchronizer(model, checked, "vllm", colocated=True)
    with torch.no_grad():
        model.lm_head.weight[0, 0] = float("nan")
    checked.finish_generation()
    try:
        with pytest.raises(WeightUpdateError, match=r"lm_head\.weight"):
            made.sync_weights()
        assert made.is_stale
        assert not sleeping(vllm)
        assert serves(vllm, vllm_llama())
    finally:
        made.shutdown()


def test_memory_comes_back_in_two_steps(vllm: VLLMServer, generation: VLLMGeneration) -> None:
    generation.finish_generation()
    generation.finish_generation()
    generation.prepare_for_generation(tags=["weights"])
    assert sleeping(vllm)
    assert vllm.is_paused()

    generation.prepare_for_generation(tags=["kv_cache"])
    generation.prepare_for_generation(tags=["kv_cache"])
    assert not sleeping(vllm)
    assert serves(vllm, vllm_llama())


def test_the_prefix_cache_is_dropped_and_workers_are_counted(
    vllm: VLLMServer, generation: VLLMGeneration
) -> None:
    assert generation.invalidate_kv_cache()
    assert generation.get_inference_world_size() == 1
    assert serves(vllm, vllm_llama())


@pytest.mark.parametrize("family", ["sidecar", "worker"])
def test_dynamos_routes_bring_the_weights_to_the_same_server(
    family: Any, vllm: VLLMServer, model: Any
) -> None:
    with DynamoWorker(vllm.url, family) as worker:
        generation = DynamoGeneration(worker.url, timeout=60.0)
        made = synchronizer(model, generation, "dynamo", colocated=False, **CLUSTERS)
        try:
            sync(made)
            assert serves(vllm, model)
            assert generation.invalidate_kv_cache()
            assert serves(vllm, model)
        finally:
            made.shutdown()
            generation.shutdown()


@pytest.mark.parametrize("transport", ["broadcast", "ipc"])
def test_the_scheme_brings_whole_models(vllm: VLLMServer, model: Any, transport: Any) -> None:
    scheme = VLLMWeightSyncScheme(vllm.url, transport=transport, timeout=60.0)
    with scheme.create_sender() as sender:
        report = sender.update_weights(model)

        assert serves(vllm, model)
        assert vllm.label() == str(report.version)
