"""Dynamo workers before fakes: which routes are called, with what, and what errors become."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from tests.vllm_fake import FakeVLLM, checkpoint, signature
from tests.vllm_fake.dynamo import DynamoWorker
from weight_update import EngineState
from weight_update.errors import ConfigurationError, EngineRejected, NotSupported
from weight_update.synchronizers.facades.dynamo import DynamoGeneration

NEW = signature(checkpoint(1))
FAMILIES = ["sidecar", "worker"]


@pytest.fixture(scope="module")
def servers() -> Iterator[list[FakeVLLM]]:
    started = [FakeVLLM(), FakeVLLM()]
    yield started
    for server in started:
        server.stop()


@pytest.fixture(params=FAMILIES)
def workers(request: Any, servers: list[FakeVLLM]) -> Iterator[list[DynamoWorker]]:
    """Two, before servers on the old weights."""
    with ExitStack() as stack:
        for server in servers:
            server.clear()
        yield [stack.enter_context(DynamoWorker(s.url, request.param)) for s in servers]


@pytest.fixture
def generation(workers: list[DynamoWorker]) -> Iterator[DynamoGeneration]:
    made = DynamoGeneration([worker.url for worker in workers], timeout=30.0)
    yield made
    made.shutdown()


def push(generation: DynamoGeneration, seed: int = 1) -> Any:
    delivery = generation.delivery(colocated=False, timeout_s=None, policy=None)
    try:
        return delivery.update(lambda: checkpoint(seed), whole=True)
    finally:
        delivery.shutdown()


def called(worker: DynamoWorker) -> list[str]:
    """What was done: routes that only look are left out, and what a route calls is said."""
    looks = ("is_paused", "get_weight_version")
    names = [
        body.get("engine_rpc") or route.rpartition("/")[2]
        for route, body in worker.log
        if not route.endswith(looks)
    ]
    return [name for i, name in enumerate(names) if i == 0 or names[i - 1] != name]


def test_workers_get_an_update_and_its_number(
    workers: list[DynamoWorker], generation: DynamoGeneration, servers: list[FakeVLLM]
) -> None:
    push(generation, 0)

    report = push(generation)

    assert [server.served() for server in servers] == [NEW, NEW]
    shown = generation.delivery(colocated=False, timeout_s=None, policy=None)
    shown.connect()
    assert {e.version for e in shown.engines.values()} == {str(report.version)}
    shown.shutdown()


def test_the_order_is_that_of_the_one_procedure(
    workers: list[DynamoWorker], generation: DynamoGeneration
) -> None:
    push(generation)

    order = called(workers[0])
    start = order.index("pause_generation")
    assert order[start : start + 4] == [
        "pause_generation",
        "start_weight_update",
        "update_weights",
        "finish_weight_update",
    ]
    assert "resume_generation" in order[start + 4 :]


def test_each_worker_joins_after_those_before_it(
    workers: list[DynamoWorker], generation: DynamoGeneration
) -> None:
    push(generation)

    joined = [b["init_info"] for worker in workers for _, b in worker.log if "init_info" in b]
    assert [(info["rank_offset"], info["world_size"]) for info in joined] == [(1, 3), (2, 3)]


def test_an_error_with_status_200_is_an_error(
    workers: list[DynamoWorker], generation: DynamoGeneration, servers: list[FakeVLLM]
) -> None:
    delivery = generation.delivery(colocated=False, timeout_s=None, policy=None)
    delivery.update(lambda: checkpoint(0), whole=True)
    servers[1].inject("/update_weights", "torn")

    with pytest.raises(EngineRejected, match="Connection closed by peer") as caught:
        delivery.update(lambda: checkpoint(1), whole=True)

    assert caught.value.report is not None
    assert caught.value.report.engines[workers[1].url].state is EngineState.MIXED
    assert servers[1].paused
    delivery.update(lambda: checkpoint(1), whole=True)
    assert [server.served() for server in servers] == [NEW, NEW]
    delivery.shutdown()


def test_the_prefix_cache_is_dropped_and_requests_go_on(
    workers: list[DynamoWorker], generation: DynamoGeneration, servers: list[FakeVLLM]
) -> None:
    push(generation)

    assert generation.invalidate_kv_cache()
    assert not any(server.paused for server in servers)


@pytest.mark.parametrize("routes", [None, *FAMILIES])
def test_the_family_of_routes_is_found_out_unless_it_is_given(
    routes: Any, servers: list[FakeVLLM]
) -> None:
    with DynamoWorker(servers[0].url, routes or "worker") as worker:
        generation = DynamoGeneration(worker.url, routes=routes, timeout=30.0)
        push(generation)

        looked = [route for route, _ in worker.log if route == "control/is_paused"]
        assert bool(looked) == (routes != "worker")
    assert servers[0].served() == NEW


def test_a_frontend_is_no_worker(servers: list[FakeVLLM]) -> None:
    generation = DynamoGeneration(servers[0].url, timeout=30.0)

    with pytest.raises(ConfigurationError, match=r"no Dynamo worker .*system URL"):
        push(generation)


def test_the_workers_ranks_are_those_that_were_given() -> None:
    generation = DynamoGeneration(["http://a:1", "http://b:1"], engine_world_size=4)

    assert generation.get_inference_world_size() == 8


def test_colocated_workers_are_refused_with_what_works() -> None:
    generation = DynamoGeneration("http://a:1")

    with pytest.raises(NotSupported, match="colocated") as caught:
        generation.delivery(colocated=True, timeout_s=None, policy=None)
    assert "colocated=False" in caught.value.remedy


@pytest.mark.parametrize(
    "bad", [{"engine_world_size": 0}, {"routes": "python"}, {"pause_generation_mode": "in_place"}]
)
def test_what_cannot_work_is_refused_when_it_is_made(bad: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError, match=next(iter(bad))):
        DynamoGeneration("http://a:1", **bad)
