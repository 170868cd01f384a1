"""The row "SGLang, colocated" on a real server: it opens the trainer's memory (CPU)."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import requests
from torch import nn, optim

from tests.synchronizers import ray_cluster
from weight_update import EngineState, WeightUpdateError
from weight_update.engines.sglang import actor
from weight_update.synchronizers import SGLangGeneration, TorchPolicy, create_weight_synchronizer

from .models import SEED_A, SEED_B, greedy, tiny_llama
from .sglang_server import SGLangServer

PROMPT = [3, 14, 15, 92, 65]
FRESH = [27, 18, 28, 182, 84, 59]
NORM = "model.norm.weight"


class NotingPolicy(TorchPolicy):
    """Notes when it makes room, and when it takes it back."""

    def __init__(self, model: nn.Module, journal: list[str]) -> None:
        super().__init__(model, optim.AdamW(model.parameters()))
        self._journal = journal

    def offload_before_refit(self) -> None:
        self._journal.append("offload")
        super().offload_before_refit()

    def offload_after_refit(self) -> None:
        self._journal.append("restore")
        super().offload_after_refit()


class NotingGeneration(SGLangGeneration):
    """Notes what it is prepared for."""

    def __init__(self, engines: Any, journal: list[str], **options: Any) -> None:
        super().__init__(engines, **options)
        self._journal = journal

    def prepare_for_generation(self, *, tags: Any = None) -> None:
        self._journal.append(f"prepare {'+'.join(tags or ())}")
        super().prepare_for_generation(tags=tags)


@contextmanager
def synchronizer(engines: Any, model: Any, journal: list[str], **options: Any) -> Iterator[Any]:
    made = create_weight_synchronizer(
        NotingPolicy(model, journal),
        NotingGeneration(engines, journal, **options),
        "sglang",
        colocated=True,
        refit_timeout_s=120.0,
    )
    made.init_communicator()
    yield made
    made.shutdown()


def serves(server: SGLangServer, seed: int, prompt: list[int] = PROMPT) -> bool:
    return server.generate(prompt, 24) == greedy(tiny_llama(seed).eval(), prompt, 24)


@pytest.mark.parametrize("needs_offload", [False, True])
def test_the_server_generates_with_the_policys_weights_and_each_side_makes_room(
    sglang_at_a: SGLangServer, needs_offload: bool
) -> None:
    assert serves(sglang_at_a, SEED_A)
    journal: list[str] = []
    model = tiny_llama(SEED_B)
    with synchronizer(sglang_at_a.url, model, journal, needs_offload=needs_offload) as sync:
        for _ in range(2):
            sync.generation.finish_generation()
            sync.sync_weights()
        report = sync.report
    order = ["offload", "prepare weights", "restore", "prepare kv_cache"]
    assert [step for step in journal if step in order] == order * 2
    assert serves(sglang_at_a, SEED_B, FRESH)
    assert (report.route.way, report.route.backend) == ("ipc", "shared memory")
    assert report.verification in ("checksum", "sample")


def test_small_buckets_arrive_one_by_one(sglang_at_a: SGLangServer) -> None:
    with synchronizer(sglang_at_a.url, tiny_llama(SEED_B), [], bucket_bytes=20_000) as sync:
        sync.sync_weights()
        assert sync.report.buckets > 2
    assert serves(sglang_at_a, SEED_B, FRESH)


def test_a_wrong_shape_is_refused_and_each_side_is_put_right(sglang_at_a: SGLangServer) -> None:
    journal: list[str] = []
    model = tiny_llama(SEED_B)
    model.model.norm.weight = nn.Parameter(model.model.norm.weight[:3].clone())
    with (
        synchronizer(sglang_at_a.url, model, journal) as sync,
        pytest.raises(WeightUpdateError, match="shape") as caught,
    ):
        sync.sync_weights()
    assert caught.value.report is not None
    assert {e.state for e in caught.value.report.engines.values()} == {EngineState.OLD}
    assert journal[-2:] == ["restore", "prepare kv_cache"]
    assert sync.is_stale
    assert serves(sglang_at_a, SEED_A)


# ---- the same server behind a Ray actor


class RoutedServer:
    """An actor as frameworks write them: a method a route, with the arguments that it sends."""

    def __init__(self, url: str) -> None:
        self._url = url

    def _post(self, name: str, body: dict[str, Any]) -> Any:
        response = requests.post(f"{self._url}/{name}", json=body, timeout=60)
        response.raise_for_status()
        return response.json()

    def get_server_info(self) -> Any:
        return requests.get(f"{self._url}/server_info", timeout=60).json()

    def get_model_info(self) -> Any:
        return requests.get(f"{self._url}/model_info", timeout=60).json()

    def pause_generation(self, mode: str) -> Any:
        return self._post("pause_generation", {"mode": mode})

    def continue_generation(self) -> Any:
        return self._post("continue_generation", {})

    def flush_cache(self) -> Any:
        return requests.post(f"{self._url}/flush_cache", json={}, timeout=60).ok

    def begin_weight_update(self) -> Any:
        return self._post("begin_weight_update", {})

    def end_weight_update(self) -> Any:
        return self._post("end_weight_update", {})

    def update_weights_from_tensor(
        self,
        serialized_named_tensors: list[str],
        load_format: str | None = None,
        flush_cache: bool = False,
    ) -> Any:
        body = {"serialized_named_tensors": serialized_named_tensors, "load_format": load_format}
        return self._post("update_weights_from_tensor", {**body, "flush_cache": flush_cache})

    def update_weight_version(self, new_version: str) -> Any:
        body = {"new_version": new_version, "abort_all_requests": False}
        return self._post("update_weight_version", body)


def test_a_ray_actor_in_front_of_the_server_serves_as_well(sglang_at_a: SGLangServer) -> None:
    ray = pytest.importorskip("ray")
    assert serves(sglang_at_a, SEED_A)
    # Its workers cannot import tests, so the class goes along.
    ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])
    with ray_cluster.cluster(ray, 2):
        handle = ray.remote(RoutedServer).options(num_cpus=0).remote(sglang_at_a.url)
        with synchronizer(handle, tiny_llama(SEED_B), []) as sync:
            sync.sync_weights()
            assert list(sync.report.engines) == [actor.name_of(handle)]
    ray.cloudpickle.unregister_pickle_by_value(sys.modules[__name__])
    assert serves(sglang_at_a, SEED_B, FRESH)
