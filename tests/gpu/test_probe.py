"""One GPU for trainer and engine: NCCL refuses, which the tiny transfer finds out.

Run it where a GPU is: ``pytest tests/gpu/test_probe.py``. Elsewhere it is skipped.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from tests.gpu.models import generated, greedy, llama
from weight_update import SGLangWeightSyncScheme, WeightUpdateError
from weight_update.reference_engine import ReferenceEngine

pytestmark = pytest.mark.skipif(torch.cuda.device_count() < 1, reason="needs a GPU")


@pytest.fixture
def engine() -> Iterator[ReferenceEngine]:
    with ReferenceEngine(llama(0), device="cuda:0") as engine:
        yield engine


def pushed(engine: ReferenceEngine, model: Any, **settings: Any) -> list[Any]:
    """Reports of two updates."""
    scheme = SGLangWeightSyncScheme(engine.url, timeout=60, **settings)
    with scheme.create_sender() as sender:
        return [sender.update_weights(model) for _ in range(2)]


def test_the_engine_on_the_trainers_own_gpu_is_reached_over_ipc(engine: ReferenceEngine) -> None:
    settings, model = dict(os.environ), llama(1).cuda()

    reports = pushed(engine, model)

    print(*reports, sep="\n")
    assert generated(engine) == greedy(model)
    for report in reports:
        assert report.route.way == "ipc"
        assert any("NCCL refuses" in reason for reason in report.route.reasons)
        assert report.warnings == ()
    assert dict(os.environ) == settings


def test_a_broadcast_that_was_asked_for_goes_through_the_hosts_memory(
    engine: ReferenceEngine,
) -> None:
    model = llama(1).cuda()

    reports = pushed(engine, model, transport="broadcast")

    print(*reports, sep="\n")
    assert generated(engine) == greedy(model)
    for report in reports:
        assert (report.route.way, report.route.backend) == ("broadcast", "gloo")
        assert any("many times slower" in warning for warning in report.warnings)


def test_who_asks_for_nccl_gets_its_words_and_the_engine_goes_on(engine: ReferenceEngine) -> None:
    with pytest.raises(WeightUpdateError, match="CUDA_VISIBLE_DEVICES") as caught:
        pushed(engine, llama(1).cuda(), backend="nccl")

    print(caught.value)
    assert "Duplicate GPU" in str(caught.value)
    assert generated(engine) == greedy(llama(0).cuda())
