"""NCCL between two GPUs: the trainer on the first, a reference engine on the second.

Run it where two GPUs are: ``pytest tests/gpu``. Elsewhere it is skipped.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from tests.gpu.models import generated, greedy, llama
from weight_update import EngineRejected, EngineState, UpdateTimeout, WeightUpdateError
from weight_update.options import UpdateOptions
from weight_update.reference_engine import Fault, ReferenceEngine
from weight_update.schemes.transport import SGLangCollectiveTransport

pytestmark = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")

UPDATE = "/update_weights_from_distributed"


@pytest.fixture(scope="module")
def models() -> tuple[Any, Any]:
    return llama(0).cuda(0), llama(1).cuda(0)


@pytest.fixture
def engine(models: tuple[Any, Any]) -> Iterator[ReferenceEngine]:
    with ReferenceEngine(models[0].cpu(), device="cuda:1") as engine:
        models[0].cuda(0)
        yield engine


def test_the_engine_generates_with_the_new_weights(
    engine: ReferenceEngine, models: tuple[Any, Any]
) -> None:
    before, after = models
    assert generated(engine) == greedy(before)
    transport = SGLangCollectiveTransport(engine.url, timeout=60)

    reports = [transport.update(lambda m=m: m) for m in (after, before, after)]

    print(*reports, sep="\n")
    assert generated(engine) == greedy(after)
    assert [report.version for report in reports] == [1, 2, 3]
    transport.shutdown()


def test_the_process_keeps_its_settings(engine: ReferenceEngine, models: tuple[Any, Any]) -> None:
    torch.cuda.set_device(1)
    settings = {key: value for key, value in os.environ.items() if "NCCL" in key}
    transport = SGLangCollectiveTransport(engine.url, timeout=60)

    transport.update(lambda: models[1])

    assert torch.cuda.current_device() == 1
    assert settings == {key: value for key, value in os.environ.items() if "NCCL" in key}
    transport.shutdown()
    torch.cuda.set_device(0)


@pytest.mark.parametrize("connected", [True, False])
def test_a_refusal_ends_the_attempt_within_two_seconds_and_the_next_group_works(
    engine: ReferenceEngine, models: tuple[Any, Any], connected: bool
) -> None:
    transport = SGLangCollectiveTransport(engine.url, timeout=60)
    if connected:
        transport.update(lambda: models[0])
    engine.inject(Fault(UPDATE, "refuse", message="no thanks", times=1))
    start = time.monotonic()

    with pytest.raises(EngineRejected, match="no thanks") as failure:
        transport.update(lambda: models[1])

    elapsed = time.monotonic() - start
    print(f"refused after {elapsed:.2f} s: {failure.value}")
    assert elapsed < (2.5 if connected else 4.5)  # connecting itself takes a second or two
    assert generated(engine) == greedy(models[0])
    transport.update(lambda: models[1])
    assert generated(engine) == greedy(models[1])
    transport.shutdown()


NEVER_RECEIVES = [
    Fault(UPDATE, "hang", times=1),
    Fault(UPDATE, "stop", times=1),
    Fault(UPDATE, "die", times=1),
    Fault(UPDATE, "lie", times=1),
    Fault(UPDATE, "hang", when="after_receive", tensors=1, times=1),
    Fault(UPDATE, "stop", when="after_receive", tensors=1, times=1),
    Fault(UPDATE, "die", when="after_receive", tensors=1, times=1),
]


@pytest.mark.parametrize("fault", NEVER_RECEIVES, ids=lambda f: f"{f.kind}-{f.when}")
def test_a_peer_that_never_receives_costs_no_more_than_the_deadline(
    engine: ReferenceEngine, models: tuple[Any, Any], fault: Fault
) -> None:
    options = UpdateOptions(timeout=8, load_format="tensors")
    transport = SGLangCollectiveTransport(engine.url, options=options)
    transport.update(lambda: models[0])
    engine.inject(fault)
    start = time.monotonic()

    with pytest.raises(WeightUpdateError) as failure:
        transport.update(lambda: models[1])

    elapsed = time.monotonic() - start
    print(f"{fault.kind} {fault.when}: {elapsed:.2f} s: {failure.value}")
    assert elapsed < 10.5
    assert isinstance(failure.value, UpdateTimeout) or fault.kind in ("die", "lie")
    assert failure.value.report is not None
    state = failure.value.report.engines[engine.url].state
    assert state in (EngineState.MIXED, EngineState.UNREACHABLE)
    engine.restart()
    assert transport.update(lambda: models[1]).version >= 1
    assert generated(engine) == greedy(models[1])
    transport.shutdown()


def test_a_peer_that_never_joins_costs_no_more_than_the_deadline(
    engine: ReferenceEngine, models: tuple[Any, Any]
) -> None:
    transport = SGLangCollectiveTransport(engine.url, timeout=8)
    engine.inject(Fault("/init_weights_update_group", "hang", times=1))
    start = time.monotonic()

    with pytest.raises(UpdateTimeout):
        transport.update(lambda: models[1])

    assert time.monotonic() - start < 10.5
    transport.update(lambda: models[1])
    assert generated(engine) == greedy(models[1])
    transport.shutdown()


@pytest.mark.parametrize("load_format", ["flattened_bucket", "tensors"])
def test_digests_prove_what_arrived(
    engine: ReferenceEngine, models: tuple[Any, Any], load_format: Any
) -> None:
    options = UpdateOptions(timeout=60, verify="checksum", load_format=load_format)
    transport = SGLangCollectiveTransport(engine.url, options=options)

    report = transport.update(lambda: models[1])

    assert report.verification == "checksum"
    transport.shutdown()


def test_a_large_model_moves_at_a_good_part_of_the_link(engine: ReferenceEngine) -> None:
    weights = {f"layers.{i}.weight": torch.randn(4096, 4096, device="cuda:0") for i in range(64)}
    options = UpdateOptions(timeout=60, verify="off")  # no engine knows these weights
    transport = SGLangCollectiveTransport(engine.url, options=options)

    reports = [transport.update(lambda: weights) for _ in range(5)]

    print(*(f"{r.gigabytes_per_second:.1f} GB/s {r}" for r in reports), sep="\n")
    assert torch.cuda.memory_allocated(0) < 12e9
    transport.shutdown()
