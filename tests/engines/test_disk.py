"""Updates by disk on the real server: alone, as replicas, and as pipeline stages.

The last two cannot join a group, and are updated so without being told. Older releases are in
``test_sglang_releases.py``.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from weight_update import EngineState, SGLangWeightSender, SGLangWeightSyncScheme, WeightUpdateError
from weight_update.errors import ConfigurationError
from weight_update.report import Progress
from weight_update.weights.stream import Stream

from .conftest import require
from .long_request import LongRequest
from .models import SEED_A, SEED_B, TinyModels, greedy, tiny_llama
from .sglang_server import RELEASE, SGLangServer, engine_of

PROMPT = [3, 14, 15, 92, 65]
COUNT = 24


def sender_of(server: SGLangServer, **settings: Any) -> SGLangWeightSender:
    return SGLangWeightSyncScheme(server.url, timeout=60, **settings).create_sender()


def expected(seed: int) -> list[int]:
    return greedy(tiny_llama(seed), PROMPT, COUNT)


def shown(server: SGLangServer) -> Path:
    """The folder of the model that the server shows."""
    return Path(server.get("model_info")["model_path"])


def folders_of(directory: Path) -> list[Path]:
    return list(directory.glob("weight-update-*/version-*"))


# -- one server ----------------------------------------------------------------------------


@pytest.fixture
def server(sglang_at_a: SGLangServer, tiny_models: TinyModels) -> Iterator[SGLangServer]:
    yield sglang_at_a
    sglang_at_a.load(tiny_models.a)  # the folder that it shows by then is gone


def test_update_after_update_arrives_and_only_the_newest_folder_stays(
    server: SGLangServer, tmp_path: Path
) -> None:
    with sender_of(server, transport="disk", directory=tmp_path) as sender:
        for seed in (SEED_B, SEED_A, SEED_B):
            report = sender.update_weights(tiny_llama(seed))
            assert server.generate(PROMPT, COUNT) == expected(seed)
            assert server.label() == str(report.version)
            assert report.verification == "sample"
            assert folders_of(tmp_path) == [shown(server)]
    assert list(tmp_path.iterdir()) == []
    assert server.generate(PROMPT, COUNT) == expected(SEED_B)  # without the folder that it shows


def test_what_the_server_shows_is_a_checkpoint_that_it_can_load_again(
    server: SGLangServer, tmp_path: Path
) -> None:
    with sender_of(server, transport="disk", directory=tmp_path, bucket_bytes=50_000) as sender:
        sender.update_weights(tiny_llama(SEED_B))
        folder = shown(server)
        assert len(list(folder.glob("*.safetensors"))) > 2
        assert (folder / "config.json").is_file()
        assert (folder / "tokenizer.json").is_file()
        server.load(folder)
    assert server.generate(PROMPT, COUNT) == expected(SEED_B)


def test_a_broadcast_follows_an_update_by_disk(server: SGLangServer) -> None:
    with sender_of(server, transport="disk") as sender:
        sender.update_weights(tiny_llama(SEED_B))
    with sender_of(server) as sender:
        report = sender.update_weights(tiny_llama(SEED_A))
    assert server.generate(PROMPT, COUNT) == expected(SEED_A)
    assert report.warnings == ()


def test_requests_in_flight_are_carried_across(server: SGLangServer) -> None:
    with sender_of(server, transport="disk") as sender:
        sender.init_all_workers_group()
        request = LongRequest(server.url, PROMPT)
        request.wait_for(5)
        report = sender.update_weights(tiny_llama(SEED_B))
    request.wait_for(5)
    _, new = request.cut()["meta_info"]["weight_versions"]
    assert new["version"] == str(report.version)


def test_some_weights_alone_leave_the_others(server: SGLangServer) -> None:
    before, changed = tiny_llama(SEED_A), torch.full((64,), 0.5)
    with sender_of(server, transport="disk") as sender:
        sender.update_weights({"model.norm.weight": changed})
    before.get_parameter("model.norm.weight").data.copy_(changed)
    assert server.generate(PROMPT, COUNT) == greedy(before, PROMPT, COUNT)


def test_a_stream_arrives_bucket_by_bucket(server: SGLangServer) -> None:
    weights = tiny_llama(SEED_B).state_dict()
    with sender_of(server, transport="disk", bucket_bytes=100_000) as sender:
        report = sender.update_weights(Stream(iter(weights.items()), whole=True))
    assert report.buckets > 2
    assert server.generate(PROMPT, COUNT) == expected(SEED_B)


def test_a_folder_that_the_server_does_not_see_leaves_the_old_weights(
    server: SGLangServer, tmp_path: Path
) -> None:
    def hide(now: Progress) -> None:
        for file in tmp_path.glob("*/version-*/*.safetensors") if now.phase == "pause" else ():
            file.unlink()

    with sender_of(server, transport="disk", directory=tmp_path) as sender:
        with pytest.raises(WeightUpdateError, match="weights iterator") as caught:
            sender.update_weights(tiny_llama(SEED_B), progress=hide)
        assert caught.value.report.engines[server.url].state is EngineState.OLD
        assert server.generate(PROMPT, COUNT) == expected(SEED_A)
        sender.update_weights(tiny_llama(SEED_B))
    assert server.generate(PROMPT, COUNT) == expected(SEED_B)


# -- replicas and stages -------------------------------------------------------------------


@pytest.fixture(scope="module")
def several(
    request: pytest.FixtureRequest,
    tiny_models: TinyModels,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[SGLangServer]:
    """One server of two schedulers, which share the cores."""
    require(engine_of(RELEASE))
    log = tmp_path_factory.mktemp("several") / "server.log"
    cores = sorted(os.sched_getaffinity(0))
    with pytest.MonkeyPatch.context() as patch:
        # It wants a NUMA node each, or to be told which cores to take.
        patch.setenv("SGLANG_CPU_OMP_THREADS_BIND", f"{cores[0]}|{cores[-1]}")
        # Each piece of an answer repeats all of it: one a token would keep the server from
        # hearing the trainer.
        arguments = (request.param, "2", "--stream-interval", "50")
        with SGLangServer(tiny_models.a, log, arguments) as server:
            yield server


def answers(server: SGLangServer, count: int = 4) -> list[dict[str, Any]]:
    """Answers to one prompt, one after the other: replicas take turns."""
    sampling = {"max_new_tokens": COUNT, "temperature": 0, "ignore_eos": True}
    body = {"input_ids": PROMPT, "sampling_params": sampling}
    return [server.post("generate", body) for _ in range(count)]


def serves(server: SGLangServer, seed: int, label: int) -> bool:
    """Whether every replica serves a model under a label."""
    given = answers(server)
    same = all(answer["output_ids"] == expected(seed) for answer in given)
    return same and {answer["meta_info"]["weight_version"] for answer in given} == {str(label)}


replicas = pytest.mark.parametrize("several", ["--dp-size"], indirect=True)
stages = pytest.mark.parametrize("several", ["--pp-size"], indirect=True)


@replicas
def test_every_replica_gets_what_is_sent_without_a_word(several: SGLangServer) -> None:
    with sender_of(several) as sender:
        for seed in (SEED_B, SEED_A):
            report = sender.update_weights(tiny_llama(seed))
            assert serves(several, seed, report.version)
            assert report.verification == "sample"
    assert {answer["meta_info"]["dp_rank"] for answer in answers(several)} == {0, 1}
    assert report.route is not None
    assert report.route.way == "disk"
    assert "2 data-parallel replicas" in str(report)


@replicas
@pytest.mark.parametrize("mode", ["retract", "in_place", "abort"])
def test_a_pause_stops_every_replica(several: SGLangServer, mode: Any) -> None:
    with sender_of(several, pause_mode=mode) as sender:
        sender.init_all_workers_group()
        requests = [LongRequest(several.url, PROMPT) for _ in range(2)]
        for request in requests:
            request.wait_for(5)
        report = sender.update_weights(tiny_llama(SEED_B))
    for request in requests if mode != "abort" else ():
        request.wait_for(5)
    given = [request.cut()["meta_info"] for request in requests]

    assert {answer["dp_rank"] for answer in given} == {0, 1}
    spans = [answer["weight_versions"] for answer in given]
    assert [len(each) for each in spans] == [1 if mode == "abort" else 2] * 2
    assert (spans[0][-1]["version"] == str(report.version)) is (mode != "abort")


@replicas
def test_replicas_refuse_a_broadcast_before_they_are_paused(several: SGLangServer) -> None:
    with sender_of(several, transport="broadcast") as sender:
        with pytest.raises(ConfigurationError, match="2 data-parallel replicas"):
            sender.update_weights(tiny_llama(SEED_B))
        assert several.is_ready()


@stages
def test_every_stage_gets_what_is_sent_under_the_pause_that_stops_them(
    several: SGLangServer,
) -> None:
    with sender_of(several, pause_mode="abort") as sender:
        for seed in (SEED_B, SEED_A):
            report = sender.update_weights(tiny_llama(seed))
            assert serves(several, seed, report.version)
    # The first stage alone shows what it holds.
    assert report.verification == "unverified"


@stages
def test_stages_refuse_a_pause_that_does_not_stop_them(several: SGLangServer) -> None:
    with sender_of(several) as sender:
        with pytest.raises(ConfigurationError, match="does not stop pipeline stages"):
            sender.update_weights(tiny_llama(SEED_B))
        assert several.is_ready()
