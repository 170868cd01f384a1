"""vLLM servers that sleep between rollouts, on a fake whose memory is as fragile as vLLM's."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.vllm_fake import FakeVLLM, checkpoint, signature
from weight_update import EngineState
from weight_update.engines.vllm.client import VLLMClient
from weight_update.errors import ConfigurationError, EngineRejected
from weight_update.synchronizers import VLLMGeneration

OLD, NEW = signature(checkpoint(0)), signature(checkpoint(1))
RESUME = "/resume"


@pytest.fixture(scope="module")
def server() -> Iterator[FakeVLLM]:
    with FakeVLLM() as started:
        yield started


@pytest.fixture
def generation(server: FakeVLLM) -> Iterator[VLLMGeneration]:
    """Free to offload; its server is awake and whole, on the old weights."""
    made = VLLMGeneration(server.url, needs_offload=True, timeout=30.0)
    server.clear()
    server.call("POST", "/wake_up")
    push(made, 0)
    yield made
    made.shutdown()


@pytest.mark.parametrize(
    ("variable", "value"),
    [
        ("TORCHRL_SGLANG_WEIGHT_SYNC_FLUSH_CACHE", "no"),
        ("TORCHRL_SGLANG_WEIGHT_SYNC_FLUSH_CACHE", "nonsense"),
        ("TORCHRL_SGLANG_PAUSE_GENERATION_MODE", "in_place"),
    ],
)
def test_variables_of_sglang_mean_nothing_to_vllm(
    variable: str, value: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(variable, value)
    options = VLLMGeneration("http://127.0.0.1:8000").options
    assert (options.effective_pause_mode(), options.flush_wanted()) == ("retract", True)


def push(generation: VLLMGeneration, seed: int) -> Any:
    delivery = generation.delivery(colocated=False, timeout_s=None, policy=None)
    try:
        return delivery.update(lambda: checkpoint(seed), whole=True)
    finally:
        delivery.shutdown()


def sleeping(server: FakeVLLM) -> bool:
    return bool(server.call("GET", "/is_sleeping")["is_sleeping"])


def test_memory_comes_back_in_two_steps_and_only_then_is_anything_generated(
    server: FakeVLLM, generation: VLLMGeneration
) -> None:
    generation.finish_generation()
    assert sleeping(server)
    assert server.paused

    generation.prepare_for_generation(tags=["weights"])
    assert sleeping(server)
    assert server.paused

    generation.prepare_for_generation(tags=["kv_cache"])
    assert not sleeping(server)
    assert server.served() == OLD


@pytest.mark.parametrize(
    "call",
    [
        lambda g: g.finish_generation(),
        lambda g: g.prepare_for_generation(tags=["weights"]),
        lambda g: g.prepare_for_generation(),
    ],
    ids=["finish", "weights", "all"],
)
def test_each_step_may_be_repeated(
    call: Callable[[VLLMGeneration], None], server: FakeVLLM, generation: VLLMGeneration
) -> None:
    generation.finish_generation()
    call(generation)
    after = (sleeping(server), server.paused, server.paths())

    call(generation)

    assert (sleeping(server), server.paused, server.paths()) == after


def test_all_tags_at_once_wake_weights_first(server: FakeVLLM, generation: VLLMGeneration) -> None:
    generation.finish_generation()
    generation.prepare_for_generation()

    tags = [e["query"].get("tags") for e in server.log() if e["path"] == "/wake_up"][-2:]
    assert tags == [["weights"], ["kv_cache"]]


@pytest.mark.parametrize(("enabled", "warned"), [(False, True), (True, False)])
def test_a_server_that_keeps_its_memory_is_warned_of(
    generation: VLLMGeneration,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    enabled: bool,
    warned: bool,
) -> None:
    info = {"instance_id": "a", "model_config": {"enable_sleep_mode": enabled}}
    monkeypatch.setattr(VLLMClient, "server_info", lambda *_: info)

    generation.finish_generation()

    assert ("--enable-sleep-mode" in caplog.text) == warned


def test_a_server_that_sleeps_takes_weights_and_is_not_resumed_by_it(
    server: FakeVLLM, generation: VLLMGeneration
) -> None:
    generation.finish_generation()
    generation.prepare_for_generation(tags=["weights"])
    resumed = server.paths().count(RESUME)

    push(generation, 1)

    assert server.paths().count(RESUME) == resumed
    assert sleeping(server)
    generation.prepare_for_generation(tags=["kv_cache"])
    assert server.served() == NEW


def test_a_server_with_mixed_weights_is_not_woken_up_fully_until_the_next_update(
    server: FakeVLLM, generation: VLLMGeneration
) -> None:
    delivery = generation.delivery(colocated=False, timeout_s=None, policy=None)
    generation.finish_generation()
    generation.prepare_for_generation(tags=["weights"])
    server.inject("/update_weights", "torn")
    with pytest.raises(EngineRejected):
        delivery.update(lambda: checkpoint(1), whole=True)
    assert delivery.engines[server.url].state is EngineState.MIXED

    generation.prepare_for_generation(tags=["kv_cache"])

    assert sleeping(server)
    assert server.paused
    delivery.update(lambda: checkpoint(1), whole=True)
    generation.prepare_for_generation(tags=["kv_cache"])
    assert not sleeping(server)
    assert server.served() == NEW
    delivery.shutdown()


def test_a_server_that_somebody_else_paused_is_left_alone(
    server: FakeVLLM, generation: VLLMGeneration
) -> None:
    server.call("POST", "/pause")

    generation.prepare_for_generation()

    assert server.paused


def test_a_server_that_another_trainer_left_mixed_is_not_woken_up_fully_until_an_update(
    server: FakeVLLM, generation: VLLMGeneration
) -> None:
    server.inject("/update_weights", "torn")
    with pytest.raises(EngineRejected):
        push(generation, 1)
    assert server.paused
    successor = VLLMGeneration(server.url, needs_offload=True, timeout=30.0)
    successor.finish_generation()

    successor.prepare_for_generation()

    assert sleeping(server)
    assert server.paused
    push(successor, 1)
    successor.prepare_for_generation()
    assert server.served() == NEW
    successor.shutdown()


def test_a_server_that_restarted_meanwhile_is_awake_and_takes_updates(
    server: FakeVLLM, generation: VLLMGeneration
) -> None:
    generation.finish_generation()
    server.restart()

    generation.prepare_for_generation(tags=["weights"])
    push(generation, 1)

    assert "/wake_up" not in server.paths()
    assert server.served() == NEW


def test_without_offload_memory_is_left_alone(server: FakeVLLM) -> None:
    generation = VLLMGeneration(server.url, timeout=30.0)
    before = server.paths()

    generation.finish_generation()
    generation.prepare_for_generation(tags=["weights"])
    generation.prepare_for_generation(tags=["kv_cache"])

    assert server.paths() == before


def test_the_prefix_cache_is_dropped(server: FakeVLLM, generation: VLLMGeneration) -> None:
    assert generation.invalidate_kv_cache()
    assert server.paths()[-1] == "/reset_prefix_cache"


def test_a_cache_that_cannot_be_dropped_is_told(
    server: FakeVLLM, generation: VLLMGeneration
) -> None:
    server.inject("/reset_prefix_cache", "refuse")

    assert not generation.invalidate_kv_cache()


def test_workers_of_all_servers_are_counted(server: FakeVLLM, generation: VLLMGeneration) -> None:
    assert generation.get_inference_world_size() == 1


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"pause_generation_mode": "in_place"}, "a KV cache of older weights"),
        ({"pause_generation_mode": "keep"}, "pause_generation_mode='keep' is unknown"),
        ({"sleep_level": 0}, "sleep_level=0 must be 1 or 2"),
        ({"needs_offload": "yes"}, "needs_offload='yes'"),
        ({"urls": []}, "server_url is empty"),
        ({"timeout": 0}, "timeout=0"),
    ],
    ids=str,
)
def test_what_cannot_work_is_refused_when_it_is_made(given: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigurationError, match=words):
        VLLMGeneration(**{"urls": "http://127.0.0.1:9", **given})


@pytest.mark.parametrize(("transport", "colocated"), [("ipc", False), ("broadcast", True)])
def test_a_transport_that_does_not_go_with_the_placement_is_refused(
    transport: Any, colocated: bool
) -> None:
    generation = VLLMGeneration("http://127.0.0.1:9", transport=transport)

    with pytest.raises(ConfigurationError, match=f"does not go with colocated={colocated}"):
        generation.delivery(colocated=colocated, timeout_s=None, policy=None)
