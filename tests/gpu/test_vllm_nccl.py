"""Whole updates over vLLM's ``nccl`` backend, to a peer that speaks its routes and its NCCL side.

The trainer joins by torch, the peer by the group's id alone, as vLLM's workers do. Run it where
two GPUs are: ``pytest tests/gpu``. Elsewhere it is skipped. No vLLM is needed, and none is run.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import pytest
import torch

from weight_update.delivery.delivery import Delivery
from weight_update.delivery.vllm import VLLMDeployment
from weight_update.options import UpdateOptions
from weight_update.waiting import spawn

pytestmark = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")

SCRIPT = Path(__file__).with_name("vllm_peer.py")
SECONDS = 120.0


@pytest.fixture
def peer() -> Iterator[str]:
    command = [sys.executable, str(SCRIPT), "1"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            yield f"http://127.0.0.1:{int(spawn(process.stdout.readline).result(SECONDS))}"
        finally:
            process.kill()


def shown(url: str) -> dict[str, Any]:
    with urlopen(f"{url}/__bits__", timeout=SECONDS) as answer:
        found: dict[str, Any] = json.load(answer)
        return found


def weights(seed: int) -> dict[str, torch.Tensor]:
    made = torch.Generator(device="cuda:0").manual_seed(seed)
    sizes = {"a.weight": (512, 1024), "b.weight": (7, 3), "c.weight": (1 << 20,), "norm": (64,)}
    return {
        name: torch.randn(size, generator=made, device="cuda:0").bfloat16()
        for name, size in sizes.items()
    }


def bits(given: dict[str, torch.Tensor]) -> dict[str, int]:
    sys.path.insert(0, str(SCRIPT.parent))
    from vllm_peer import bits_of

    return {name: bits_of(value) for name, value in given.items()}


@pytest.mark.parametrize(
    "settings",
    [{}, {"bucket_bytes": 1_200_000}, {"load_format": "tensors"}],
    ids=["packed", "packed in several buckets", "one broadcast a tensor"],
)
def test_every_bit_arrives_and_each_packed_bucket_is_one_broadcast(
    peer: str, settings: dict[str, Any]
) -> None:
    delivery = Delivery([peer], UpdateOptions(timeout=SECONDS, **settings), VLLMDeployment)
    try:
        delivery.connect(torch.device("cuda", 0))
        for seed in (1, 2):
            given, before = weights(seed), shown(peer)["broadcasts"]
            report = delivery.update(lambda given=given: given, whole=True)

            found, single = shown(peer), "load_format" in settings
            assert {name: found["bits"][name] for name in given} == bits(given)
            expected = report.tensors if single else report.buckets
            assert found["broadcasts"] - before == expected
            assert (report.buckets > 1) == ("bucket_bytes" in settings)
            assert not found["paused"]
            assert report.route is not None
            assert report.route.backend == "nccl"
    finally:
        delivery.shutdown()


def test_a_second_group_is_joined_after_the_first_was_given_up(peer: str) -> None:
    for seed in (3, 4):
        delivery = Delivery([peer], UpdateOptions(timeout=SECONDS), VLLMDeployment)
        try:
            given = weights(seed)
            delivery.update(lambda given=given: given, whole=True)
            assert {name: shown(peer)["bits"][name] for name in given} == bits(given)
        finally:
            delivery.shutdown()
