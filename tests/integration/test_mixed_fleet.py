"""SGLang and vLLM servers behind one sender: one update, one report, one version."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from typing import Any

import pytest
from torchrl.collectors import Collector

from tests.cli.kit import impostor
from tests.collectors.worlds import Idle, client
from tests.vllm_fake import FakeVLLM
from weight_update import (
    EngineState,
    SGLangWeightSender,
    SGLangWeightSyncScheme,
    VLLMWeightSyncScheme,
    WeightUpdateError,
)
from weight_update.errors import ConfigurationError
from weight_update.reference_engine import Fault, ReferenceEngine
from weight_update.schemes.fleet import FleetWeightSyncScheme

from . import kit
from .mixed import Server, fleet_of, is_paused, label, llama, serves

OLD, NEW = EngineState.OLD, EngineState.NEW


@pytest.fixture(scope="module")
def started() -> Iterator[list[Server]]:
    """Two of each kind."""
    servers: list[Server] = [
        *(ReferenceEngine(llama(0), wait=False) for _ in range(2)),
        *(FakeVLLM() for _ in range(2)),
    ]
    yield servers
    for server in servers:
        server.stop()


@pytest.fixture
def servers(started: list[Server]) -> Iterator[list[Server]]:
    """Two SGLang servers and two vLLM servers, put right again afterwards."""
    for server in started:
        if isinstance(server, ReferenceEngine):
            server.wait_until_ready()
            kit.relabel(server, "default")
        else:
            server.call("POST", "/update_weight_version", {"new_version": "default"})
    yield started
    for server in started:
        if isinstance(server, ReferenceEngine):
            kit.revive(server)
        else:
            server.clear()


@pytest.fixture
def pair(servers: list[Server]) -> list[Server]:
    """One of each kind."""
    return [servers[0], servers[2]]


def sender_to(servers: list[Server], **options: Any) -> SGLangWeightSender:
    return fleet_of(servers, **options).create_sender()


def asked(server: Server, path: str) -> list[dict[str, Any]]:
    """The requests that a route of a server got."""
    entries = server.log() if isinstance(server, FakeVLLM) else server.requests()
    return [entry for entry in entries if entry["path"] == path]


def test_every_server_generates_with_the_new_weights_under_one_version(
    servers: list[Server],
) -> None:
    collector, trained = kit.Collector(), llama(1)
    with sender_to(servers) as sender:
        sender.register_model(trained)
        sender.register_collector(collector)
        sender.update_weights(llama(0))

        report = sender.update_weights()

    assert all(serves(server, NEW) for server in servers)
    assert [label(server) for server in servers] == [str(report.version)] * 4
    assert {outcome.state for outcome in report.engines.values()} == {NEW}
    assert (report.version, collector.version) == (2, 2)
    assert report.buckets == 3
    assert report.route is not None
    assert (report.route.way, report.route.backend) == ("broadcast", "gloo")


def test_each_kind_proves_what_it_can(pair: list[Server]) -> None:
    with sender_to(pair) as sender:
        report = sender.update_weights(llama(1))

    assert [report.engines[s.url].verified for s in pair] == ["checksum", "unverified"]
    assert report.verification == "unverified"


@pytest.mark.parametrize("load_format", ["auto", "flattened_bucket", "tensors"])
@pytest.mark.parametrize("bucket_bytes", [600, None])
def test_weights_arrive_in_every_format_and_size(
    load_format: Any, bucket_bytes: int | None, pair: list[Server]
) -> None:
    with sender_to(pair, load_format=load_format, bucket_bytes=bucket_bytes) as sender:
        for state, seed in ((OLD, 0), (NEW, 1)):
            sender.update_weights(llama(seed))
            assert all(serves(server, state) for server in pair)


def test_the_version_counts_on_from_the_highest_label_of_either_kind(pair: list[Server]) -> None:
    sglang, vllm = pair
    assert isinstance(vllm, FakeVLLM)
    vllm.call("POST", "/update_weight_version", {"new_version": "6"})

    with sender_to(pair) as sender:
        assert sender.update_weights(llama(1)).version == 7
    assert [label(sglang), label(vllm)] == ["7", "7"]


def test_each_kind_pauses_and_flushes_in_its_own_way(pair: list[Server]) -> None:
    sglang, vllm = pair
    options = {"sglang": {"pause_mode": "abort"}, "vllm": {"flush_cache_on_update": False}}
    flushes = len(asked(vllm, "/reset_prefix_cache"))

    with sender_to(pair, **options) as sender:
        report = sender.update_weights(llama(1))

    assert asked(sglang, kit.PAUSE)[-1]["json"]["mode"] == "abort"
    assert asked(vllm, "/pause")[-1]["query"]["mode"] == ["keep"]
    assert len(asked(vllm, "/reset_prefix_cache")) == flushes
    (warning,) = report.warnings
    assert vllm.url in warning
    assert sglang.url not in warning
    fates = {url: outcome.in_flight for url, outcome in report.engines.items()}
    assert fates == {sglang.url: "aborted", vllm.url: "retracted"}
    assert report.pause_mode is report.in_flight is None  # there is no one mode to name


def test_a_fleet_of_one_mind_names_its_pause_mode(pair: list[Server]) -> None:
    options = {"sglang": {"pause_mode": "abort"}, "vllm": {"pause_mode": "abort"}}
    with sender_to(pair, **options) as sender:
        report = sender.update_weights(llama(1))
    assert (report.pause_mode, report.in_flight) == ("abort", "aborted")


def test_a_failed_update_says_under_which_mode_each_engine_was_paused(pair: list[Server]) -> None:
    sglang, vllm = pair
    options = {"sglang": {"pause_mode": "abort"}}
    with sender_to(pair, **options) as sender:
        sglang.inject(Fault(kit.UPDATE, "refuse", times=1))
        with pytest.raises(WeightUpdateError) as caught:
            sender.update_weights(llama(1))
    assert caught.value.report is not None
    modes = {url: outcome.pause_mode for url, outcome in caught.value.report.engines.items()}
    assert modes == {sglang.url: "abort", vllm.url: "retract"}


def test_a_variable_of_sglang_is_sglangs_alone(
    pair: list[Server], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHRL_SGLANG_PAUSE_GENERATION_MODE", "abort")
    sglang, vllm = pair

    with sender_to(pair) as sender:
        sender.update_weights(llama(1))

    assert asked(sglang, kit.PAUSE)[-1]["json"]["mode"] == "abort"
    assert asked(vllm, "/pause")[-1]["query"]["mode"] == ["keep"]


def test_a_server_that_is_added_is_asked_what_it_is(servers: list[Server]) -> None:
    with sender_to([servers[0], servers[2]]) as sender:
        sender.update_weights(llama(0))
        sender.add_engine(servers[3].url)
        sender.add_engine(servers[1].url)

        report = sender.update_weights(llama(1))

        assert all(serves(server, NEW) for server in servers)
        assert len(report.engines) == 4

        sender.remove_engine(servers[0].url)
        sender.remove_engine(servers[3].url)
        sender.update_weights(llama(0))
    assert [serves(s, OLD) for s in servers] == [False, True, True, False]


def test_one_kind_may_leave_altogether(pair: list[Server]) -> None:
    with sender_to(pair) as sender:
        sender.update_weights(llama(0))
        sender.remove_engine(pair[1].url)
        sender.update_weights(llama(1))

        assert (serves(pair[0], NEW), serves(pair[1], OLD)) == (True, True)


def test_a_server_that_does_not_answer_is_not_added(pair: list[Server]) -> None:
    with sender_to(pair) as sender:
        with pytest.raises(WeightUpdateError):
            sender.add_engine("http://127.0.0.1:9")
        assert set(sender.engines) == {server.url for server in pair}
        sender.update_weights(llama(1))


def test_a_server_of_no_kind_that_the_fleet_has_is_not_added(pair: list[Server]) -> None:
    with sender_to(pair) as sender, impostor({}) as url:
        with pytest.raises(ConfigurationError, match=r"none of the kinds .*sglang, vllm"):
            sender.add_engine(url)
        assert set(sender.engines) == {server.url for server in pair}


def test_a_copy_in_another_process_knows_who_was_added(servers: list[Server]) -> None:
    with sender_to([servers[0], servers[2]]) as sender:
        sender.add_engine(servers[3].url)
        with pickle.loads(pickle.dumps(sender)) as twin:
            twin.update_weights(llama(1))

    assert [serves(servers[i], NEW) for i in (0, 2, 3)] == [True] * 3


def test_a_wrong_number_of_ranks_is_refused_for_its_own_kind(pair: list[Server]) -> None:
    with sender_to(pair, vllm={"num_gpus": 2}) as sender:
        with pytest.raises(ConfigurationError, match=r"num_gpus=2, but the vllm servers run 1"):
            sender.update_weights(llama(1))
        assert not any(is_paused(server) for server in pair)


def test_a_right_number_of_ranks_is_taken(pair: list[Server]) -> None:
    scheme = fleet_of(pair, num_gpus=1)
    assert scheme.world_size == 3

    with scheme.create_sender() as sender:
        sender.update_weights(llama(1))
    assert all(serves(server, NEW) for server in pair)


@pytest.mark.parametrize("kinds", ["vllm", "both"])
def test_a_collector_drives_it_and_counts_each_update_once(kinds: str, pair: list[Server]) -> None:
    targets = pair if kinds == "both" else pair[1:]
    alone = VLLMWeightSyncScheme(pair[1].url, timeout=60.0)
    scheme = fleet_of(pair) if kinds == "both" else alone
    trained = llama(1)
    scheme.register_model(trained)
    collector = Collector(
        Idle(),
        client(),
        frames_per_batch=4,
        total_frames=4,
        weight_sync_schemes={"policy": scheme},
        track_policy_version=True,
    )
    try:
        before = collector.policy_version
        collector.update_policy_weights_()

        assert all(serves(server, NEW) for server in targets)
        assert collector.policy_version == before + 1
    finally:
        collector.shutdown()
        scheme.shutdown()


def test_a_fleet_may_be_of_one_kind_with_two_settings(servers: list[Server]) -> None:
    one, two = servers[:2]
    schemes = [
        SGLangWeightSyncScheme(one.url, timeout=60.0, pause_mode="abort"),
        SGLangWeightSyncScheme(two.url, timeout=60.0, pause_mode="retract"),
    ]

    with FleetWeightSyncScheme(schemes).create_sender() as sender:
        sender.update_weights(llama(1))

    assert [asked(s, kit.PAUSE)[-1]["json"]["mode"] for s in (one, two)] == ["abort", "retract"]
    assert all(serves(server, NEW) for server in (one, two))


def test_vllm_alone_may_be_a_fleet(pair: list[Server]) -> None:
    scheme = VLLMWeightSyncScheme(pair[1].url, timeout=60.0)

    with FleetWeightSyncScheme([scheme]).create_sender() as sender:
        sender.update_weights(llama(1))
    assert serves(pair[1], NEW)
