"""Each release from 0.5.6 to 0.5.23 has the routes, fields and habits of its time."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from weight_update.reference_engine import RELEASES, ReferenceEngine
from weight_update.reference_engine.edge import RequestLog
from weight_update.reference_engine.faults import FaultBoard
from weight_update.reference_engine.front import ServerInfo
from weight_update.reference_engine.group import GroupAddress
from weight_update.reference_engine.releases import release_named
from weight_update.reference_engine.routes import openapi
from weight_update.reference_engine.server import Server

ALL = [f"0.5.{patch}" for patch in range(6, 24)]


def since(first, last="0.5.23"):
    """The releases from ``first`` to ``last``."""
    return set(ALL[ALL.index(first) : ALL.index(last) + 1])


def having(habit):
    """The releases whose profile says so."""
    return {name for name in ALL if habit(release_named(name))}


@pytest.fixture(scope="module")
def documents():
    """What each release's ``/openapi.json`` says."""
    nothing: Any = None
    result = {}
    for name in ALL:
        info = ServerInfo(release_named(name), {}, {}, nothing)
        server = Server(nothing, info, FaultBoard(), RequestLog())
        result[name] = openapi(server.endpoints(), info.release)
    return result


@pytest.mark.parametrize(
    ("path", "releases"),
    [
        ("/pause_generation", since("0.5.6")),
        ("/weights_checker", since("0.5.6")),
        ("/get_load", since("0.5.6", "0.5.20")),
        ("/v1/loads", since("0.5.8")),
        ("/ready", since("0.5.20")),
        ("/begin_weight_update", since("0.5.21")),
        ("/end_weight_update", since("0.5.21")),
    ],
)
def test_a_route_is_there_in_its_releases_only(documents, path, releases):
    assert {name for name in ALL if path in documents[name]["paths"]} == releases


@pytest.mark.parametrize(
    ("body", "field", "releases"),
    [
        ("UpdateWeightsFromDistributed", "load_format", since("0.5.6")),
        ("UpdateWeightsFromDistributed", "torch_empty_cache", since("0.5.11")),
        ("ContinueGeneration", "torch_empty_cache", since("0.5.12")),
        ("UpdateWeightsFromDistributed", "selector", since("0.5.21")),
    ],
)
def test_a_field_is_there_in_its_releases_only(documents, body, field, releases):
    def fields(name):
        return documents[name]["components"]["schemas"][f"{body}ReqInput"]["properties"]

    assert {name for name in ALL if field in fields(name)} == releases


@pytest.mark.parametrize(
    ("habit", "releases"),
    [
        ("paused_updates_are_labelled", since("0.5.7")),
        ("continue_waits", {"0.5.6"} | since("0.5.11")),
        ("raw_tcp_address", since("0.5.6", "0.5.9")),
        ("flush_timeout", since("0.5.10")),
        ("paused_flush_ignores_queue", since("0.5.6", "0.5.9") | since("0.5.21")),
        ("retractions_counted", since("0.5.12")),
        ("live_loads", since("0.5.6", "0.5.14")),
        ("token_spans", since("0.5.19")),
        ("sessions", since("0.5.21")),
        ("failed_receive_told", since("0.5.21")),
        ("unknown_group_kills", since("0.5.6", "0.5.20")),
        ("refused_flush_kills", since("0.5.6", "0.5.21")),
        ("attn_dp_size", since("0.5.22")),
    ],
)
def test_a_habit_is_that_of_its_releases_only(habit, releases):
    assert having(lambda release: getattr(release, habit)) == releases


def test_checksums_came_first_on_request_and_then_by_default():
    assert having(lambda release: release.checksums != "never") == since("0.5.12")
    assert having(lambda release: release.checksums == "default") == since("0.5.13")


@pytest.mark.parametrize(
    ("name", "profile"),
    [("0.5.17", "0.5.15"), ("0.5.15.post1", "0.5.15"), ("0.5.9.post2", "0.5.9")],
)
def test_a_release_between_two_profiles_has_the_one_in_force(name, profile):
    assert release_named(name) == replace(RELEASES[profile], name=name)


@pytest.mark.parametrize("name", ["0.5.5", "0.5.24", "0.6.0", "0.5", "latest", "0.5.9rc1"])
def test_an_unknown_release_is_an_error_that_tells_the_range(name):
    with pytest.raises(ValueError, match=r"there are 0\.5\.6 to 0\.5\.23"):
        release_named(name)


def test_an_old_release_takes_an_ipv6_address_as_it_is():
    old = GroupAddress("::1", 29500, 1, 2, "group", "gloo", raw=True)
    assert old.url == "tcp://::1:29500"
    assert replace(old, host="[::1]").url == "tcp://[::1]:29500"


@pytest.fixture(scope="module")
def oldest(model_a):
    with ReferenceEngine(model_a, release="0.5.6") as engine:
        yield engine


def test_0_5_6_ignores_the_label_of_an_update_under_a_pause(oldest, kit, model_b):
    trainer = kit.Trainer(oldest)
    kit.post(oldest, "/pause_generation", mode="retract")
    reply = trainer.send(dict(model_b.named_parameters()), weight_version="7", flush_cache=True)
    assert reply.message == "Succeeded to update parameter online."
    kit.post(oldest, "/continue_generation")
    assert kit.get(oldest, "/model_info").json["weight_version"] == "default"
    answer = oldest.generate(kit.PROMPT)
    assert answer["output_ids"] == kit.greedy(model_b, kit.PROMPT, 16)
    assert answer["meta_info"]["weight_version"] == "default"
    trainer.close()


def test_0_5_6_flushes_under_retract_and_says_flushed_in_any_case(oldest, kit):
    with kit.background() as start:
        request = start(oldest.generate, kit.PROMPT, max_new_tokens=3000, rid="long")
        kit.wait_for(lambda: kit.get(oldest, "/get_load").json[0]["num_reqs"] == 1)
        refused = kit.post(oldest, "/flush_cache")
        kit.post(oldest, "/pause_generation", mode="retract")
        flushed = kit.post(oldest, "/flush_cache")
        kit.post(oldest, "/continue_generation")
        kit.post(oldest, "/abort_request", rid="long")
        assert "num_retractions" not in request.result()["meta_info"]
    assert (refused.status, flushed.status) == (400, 200)
    assert refused.text == flushed.text == "Cache flushed.\n"


def test_0_5_6_must_be_told_what_to_check_and_knows_no_checksum(oldest, kit):
    assert "body.action: Field required" in kit.post(oldest, "/weights_checker").text
    assert kit.post(oldest, "/weights_checker", action="checksum").status == 400


@pytest.mark.parametrize(
    ("release", "waits"), [("0.5.10", False), ("0.5.11", True)], ids=["0.5.10", "0.5.11"]
)
def test_continue_waits_for_an_update_only_where_it_holds_the_pause(
    model_a, model_b, kit, release, waits
):
    name = "model.norm.weight"
    tensors = {name: model_b.get_parameter(name)}
    with ReferenceEngine(model_a, release=release) as engine, kit.background() as start:
        trainer = kit.Trainer(engine)
        kit.post(engine, "/pause_generation", mode="in_place")
        update = start(trainer.announce, tensors)
        kit.wait_for(lambda: engine.requests()[-1]["path"].endswith("_distributed"))
        continued = start(kit.post, engine, "/continue_generation")
        if waits:
            assert kit.stays_open(continued)
        else:
            assert continued.result(30).status == 200
            assert kit.stays_open(update)
        trainer.broadcast(tensors)
        assert update.result(30).status == 200
        assert continued.result(30).status == 200
        trainer.close()
