"""Shared memory into real SGLang servers: what they unpickle, open, copy and let go of.

A server of each release; the one in this process is the trainer that they open memory of.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from weight_update import EngineState, SGLangWeightSender, SGLangWeightSyncScheme, WeightUpdateError
from weight_update.options import PauseMode

from .conftest import require
from .long_request import LongRequest
from .models import SEED_A, SEED_B, TinyModels, greedy, tiny_llama
from .sglang_server import RELEASE, SGLangServer, engine_of

RELEASES = ("0.5.15.post1", "0.5.9", RELEASE)
PROMPT = [3, 14, 15, 92, 65, 35, 89]
FRESH = [27, 18, 28, 182, 84, 59]
NORM = "model.norm.weight"


each_release = pytest.mark.parametrize("older", RELEASES, indirect=True)


@pytest.fixture
def server(older_at_a: SGLangServer) -> SGLangServer:
    return older_at_a


def sender_of(server: SGLangServer, **settings: Any) -> SGLangWeightSender:
    scheme = SGLangWeightSyncScheme(server.url, transport="ipc", timeout=60, **settings)
    return scheme.create_sender()


def serves(server: SGLangServer, seed: int, prompt: list[int] = PROMPT) -> bool:
    return server.generate(prompt, 24) == greedy(tiny_llama(seed), prompt, 24)


def shared_files() -> set[str]:
    return {path.name for path in Path("/dev/shm").glob(f"torch_{os.getpid()}_*")}


@each_release
@pytest.mark.parametrize("load_format", ["flattened_bucket", "tensors"])
@pytest.mark.parametrize("bucket_bytes", [None, 20_000])
def test_every_format_and_bucket_size_lands(
    server: SGLangServer, load_format: Any, bucket_bytes: int | None
) -> None:
    assert serves(server, SEED_A)

    with sender_of(server, load_format=load_format, bucket_bytes=bucket_bytes) as sender:
        report = sender.update_weights(tiny_llama(SEED_B))

    assert serves(server, SEED_B, FRESH)
    assert report.engines[server.url].state is EngineState.NEW
    assert (report.buckets > 1) is (bucket_bytes is not None)
    assert report.route is not None
    assert (report.route.way, report.route.backend) == ("ipc", "shared memory")


@each_release
@pytest.mark.parametrize("mode", ["abort", "retract", "in_place"])
def test_requests_in_flight_are_carried_as_the_pause_mode_says(
    server: SGLangServer, mode: PauseMode
) -> None:
    with sender_of(server, pause_mode=mode) as sender:
        sender.update_weights(tiny_llama(SEED_A))  # the first one meets the engine
        request = LongRequest(server.url, PROMPT)
        request.wait_for(4)
        report = sender.update_weights(tiny_llama(SEED_B))

    if mode == "abort":
        assert request.end()["meta_info"]["finish_reason"]["type"] == "abort"
    else:
        request.wait_for(16)
        assert request.cut()["meta_info"]["weight_version"] == str(report.version)
    assert server.label() == str(report.version)
    assert serves(server, SEED_B, FRESH)


@each_release
@pytest.mark.parametrize("load_format", ["flattened_bucket", "tensors"])
def test_the_same_memory_is_opened_again_at_every_update(
    server: SGLangServer, load_format: Any
) -> None:
    models = {SEED_A: tiny_llama(SEED_A), SEED_B: tiny_llama(SEED_B)}
    before = shared_files()
    with sender_of(server, load_format=load_format, bucket_bytes=50_000) as sender:
        sender.update_weights(models[SEED_A])
        used = shared_files()
        for seed in (SEED_B, SEED_A) * 10 + (SEED_B,):
            sender.update_weights(models[seed])
        assert shared_files() == used
        assert len(used - before) == 2
        assert serves(server, SEED_B, FRESH)
    assert shared_files() <= before


def test_a_server_that_ends_on_a_wrong_shape_is_said_to_have_ended(
    tiny_models: TinyModels, tmp_path: Path
) -> None:
    """The shapes in its model's folder would have been compared, but for ``verify="off"``."""
    import torch

    require(engine_of(RELEASE))
    with SGLangServer(tiny_models.a, tmp_path / "server.log") as server:
        with sender_of(server) as sender, pytest.raises(WeightUpdateError, match="shape"):
            sender.update_weights({NORM: torch.ones(3)})
        assert serves(server, SEED_A)
        with sender_of(server, verify="off") as sender:
            with pytest.raises(WeightUpdateError, match="the server ended") as caught:
                sender.update_weights({NORM: torch.ones(3)})
            assert caught.value.phase == "transfer"
