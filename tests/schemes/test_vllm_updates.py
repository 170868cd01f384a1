"""Whole models through the vLLM scheme, to fakes over real HTTP and gloo."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

from tests.integration import kit
from tests.vllm_fake import FakeVLLM, checkpoint, signature
from weight_update import (
    EngineState,
    Stream,
    VLLMWeightSender,
    VLLMWeightSyncScheme,
    get_model_metadata,
)
from weight_update.errors import ConfigurationError, WeightUpdateError

OLD, NEW = signature(checkpoint(0)), signature(checkpoint(1))


@pytest.fixture(scope="module")
def servers() -> Iterator[list[FakeVLLM]]:
    started = [FakeVLLM(), FakeVLLM()]
    yield started
    for server in started:
        server.stop()


def sender_for(servers: list[FakeVLLM], **options: Any) -> VLLMWeightSender:
    scheme = VLLMWeightSyncScheme([s.url for s in servers], **{"timeout": 60.0, **options})
    return scheme.create_sender()


@pytest.fixture
def sender(servers: list[FakeVLLM]) -> Iterator[VLLMWeightSender]:
    """Has brought the old weights already."""
    with sender_for(servers) as made:
        made.update_weights(checkpoint(0))
        yield made


def model(seed: int) -> nn.Module:
    """A module with the weights of a checkpoint under their names."""
    root = nn.Module()
    for name, value in checkpoint(seed).items():
        *path, last = name.split(".")
        holder = root
        for part in path:
            if not hasattr(holder, part):
                holder.add_module(part, nn.Module())
            holder = getattr(holder, part)
        holder.register_parameter(last, nn.Parameter(value))
    return root


def test_every_server_generates_with_the_new_weights_and_one_number_more(
    servers: list[FakeVLLM], sender: VLLMWeightSender
) -> None:
    trained, collector = model(1), kit.Collector()
    sender.register_model(trained)
    sender.register_collector(collector)
    before = sender.version

    report = sender.update_weights()

    assert report.version == before + 1
    assert [server.served() for server in servers] == [NEW, NEW]
    assert [server.label for server in servers] == [str(report.version)] * 2
    assert collector.version == 1
    assert report.verification == "unverified"


@pytest.mark.parametrize("load_format", ["flattened_bucket", "tensors"])
@pytest.mark.parametrize("bucket_bytes", [600, None])
def test_weights_arrive_in_every_format_and_size(
    servers: list[FakeVLLM], load_format: Any, bucket_bytes: int | None
) -> None:
    with sender_for(servers, load_format=load_format, bucket_bytes=bucket_bytes) as made:
        report = made.update_weights(checkpoint(1))

    assert [server.served() for server in servers] == [NEW, NEW]
    assert (report.buckets > 1) == (bucket_bytes is not None)


def test_a_stream_may_bring_the_parts_of_a_layer_in_different_buckets(
    servers: list[FakeVLLM],
) -> None:
    """The order of the alphabet is that of many files: o_proj lies between k_proj and q_proj."""
    with sender_for(servers, bucket_bytes=600) as made:
        made.update_weights(Stream(sorted(checkpoint(1).items()), whole=True))

    assert [server.served() for server in servers] == [NEW, NEW]


def test_a_stream_that_ends_within_a_layer_is_refused_and_never_served(
    servers: list[FakeVLLM],
) -> None:
    weights = checkpoint(1)
    some = [name for name in weights if "k_proj" in name or "q_proj" in name]
    with sender_for(servers, bucket_bytes=600) as made:
        with pytest.raises(ConfigurationError, match=r"without 'model.layers.0.self_attn.v_proj"):
            made.update_weights(Stream((name, weights[name]) for name in some))
        assert all(server.paused for server in servers)

        made.update_weights(model(1))
    assert [server.served() for server in servers] == [NEW, NEW]


def test_weights_are_cast_and_renamed_on_the_way(servers: list[FakeVLLM]) -> None:
    theirs = {f"actor.{name}": value for name, value in checkpoint(1).items()}
    with sender_for(servers, dtype=torch.bfloat16, name_map={r"^actor\.": ""}) as made:
        made.update_weights(theirs)

    rounded = {name: value.bfloat16() for name, value in checkpoint(1).items()}
    assert [server.served() for server in servers] == [signature(rounded)] * 2


@pytest.mark.parametrize(("mode", "reason"), [("retract", "length"), ("abort", "abort")])
def test_the_pause_mode_says_what_becomes_of_requests_in_flight(
    mode: Any, reason: str, servers: list[FakeVLLM]
) -> None:
    with sender_for(servers, pause_mode=mode) as made:
        made.update_weights(checkpoint(1))

    asked = [e["query"]["mode"] for e in servers[0].log() if e["path"] == "/pause"]
    assert asked[-1] == [{"length": "keep", "abort": "abort"}[reason]]


def test_a_quorum_leaves_out_who_fails_and_takes_it_back(servers: list[FakeVLLM]) -> None:
    with sender_for(servers, quorum=1) as made:
        made.update_weights(checkpoint(0))
        servers[1].inject("/update_weights", "torn", times=3)
        report = made.update_weights(checkpoint(1))

        assert report.engines[servers[0].url].state is EngineState.NEW
        assert report.engines[servers[1].url].state is EngineState.MIXED
        assert servers[0].served() == NEW
        assert servers[1].paused

        servers[1].clear()
        report = made.update_weights(checkpoint(1))
        assert {e.state for e in report.engines.values()} == {EngineState.NEW}
        assert servers[1].served() == NEW


def test_a_proof_that_vllm_cannot_give_is_refused_before_the_pause(
    servers: list[FakeVLLM],
) -> None:
    paused = [server.paths().count("/pause") for server in servers]

    with sender_for(servers, verify="checksum") as made, pytest.raises(WeightUpdateError):
        made.update_weights(checkpoint(1))
    assert [server.paths().count("/pause") for server in servers] == paused


def test_a_wrong_number_of_ranks_is_refused_before_a_group_is_made(
    servers: list[FakeVLLM],
) -> None:
    with sender_for(servers, num_gpus=3) as made, pytest.raises(ConfigurationError, match="3"):
        made.update_weights(checkpoint(1))


def test_the_pattern_of_torchrls_trainers_works_word_for_word(servers: list[FakeVLLM]) -> None:
    trained, collector = model(1), kit.Collector()
    scheme = VLLMWeightSyncScheme(
        [s.url for s in servers], None, None, 2, strategy="state_dict", device="cpu"
    )
    sender = VLLMWeightSender(scheme)
    sender.register_model(trained)
    metadata = get_model_metadata(trained)
    sender.init_all_workers_group(metadata, vllm_engine=None)
    sender.register_collector(collector)
    sender.register_collector(collector)

    report = sender.update_weights()

    assert [server.served() for server in servers] == [NEW, NEW]
    assert (collector.version, sender.version) == (1, report.version)
    assert sender.flush_cache()
    sender.shutdown()
    sender.shutdown()


def test_metadata_that_the_weights_do_not_match_is_refused_before_the_pause(
    servers: list[FakeVLLM],
) -> None:
    paused = [server.paths().count("/pause") for server in servers]
    with sender_for(servers) as made:
        made.init_all_workers_group({"lm_head.weight": (torch.bfloat16, torch.Size([16, 8]))})
        with pytest.raises(ValueError, match=r"lm_head\.weight"):
            made.update_weights(checkpoint(1))
    assert [server.paths().count("/pause") for server in servers] == paused


def test_a_module_may_be_given_to_each_update(servers: list[FakeVLLM]) -> None:
    with sender_for(servers) as made:
        made.update_weights(model(1))

    assert [server.served() for server in servers] == [NEW, NEW]
