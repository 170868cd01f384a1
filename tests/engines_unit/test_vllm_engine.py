"""Full updates of a vLLM server: the order of calls, and what is done about failed ones."""

from __future__ import annotations

import base64
import time
from contextlib import nullcontext
from typing import Any

import pytest
import torch

from weight_update.engines.vllm.client import VLLMClient
from weight_update.engines.vllm.engine import VLLMEngine
from weight_update.engines.vllm.session import Bracket, VLLMSession
from weight_update.errors import ConfigurationError, EngineRejected, UpdateTimeout
from weight_update.options import HttpOptions
from weight_update.waiting import Deadline, spawn
from weight_update.weights.buckets import Bucket
from weight_update.weights.cargo import Cargo
from weight_update.weights.extract import extract_weights

BUCKET = Bucket(extract_weights({"w": torch.ones(1)}))
ACTIVE = "start_weight_update called while a weight update is already active."
START, FINISH = "/start_weight_update", "/finish_weight_update"
INIT, LEAVE = "/init_weight_transfer_engine", "/shutdown_weight_transfer_engine"
RPC, UPDATE = "/collective_rpc", "/update_weights"
LABEL = "/weight_info"
ID = bytes(range(128))


def soon() -> Deadline:
    return Deadline(10.0)


def refused(answer: Any, words: str) -> Any:
    return answer(500, {"error": {"message": f"Worker failed with error '{words}'"}})


def posts(server: Any) -> list[str]:
    """Routes that were posted to, in order."""
    return [asked.path.partition("?")[0] for asked in server.asked if asked.method == "POST"]


@pytest.fixture
def bracket(server) -> Bracket:
    return Bracket(VLLMClient(server.url, HttpOptions()))


@pytest.fixture
def session(server, bracket: Bracket) -> VLLMSession:
    return VLLMSession(VLLMClient(server.url, HttpOptions()), bracket)


def apply(session: VLLMSession) -> None:
    session.apply(BUCKET, Cargo(), group_name="g", flush=False, deadline=soon())


def test_an_update_is_started_brought_and_finished(server, session: VLLMSession) -> None:
    assert session.open(soon()) is False
    apply(session)
    session.close(soon())

    assert posts(server) == [START, UPDATE, FINISH]


def test_an_update_that_a_dead_trainer_left_open_is_closed_first(
    server, answer, session: VLLMSession
) -> None:
    answers = iter([refused(answer, ACTIVE), answer()])
    server.by_body[START] = lambda _: next(answers)

    assert session.open(soon()) is True
    assert posts(server) == [START, FINISH, START]


def test_a_failed_update_is_undone_by_an_empty_one(server, answer, session: VLLMSession) -> None:
    server.answers[UPDATE] = refused(answer, "There is no module or parameter named 'x'")
    session.open(soon())
    with pytest.raises(EngineRejected) as caught:
        apply(session)
    session.recover(soon())

    assert caught.value.applied == "unknown"
    assert posts(server) == [START, UPDATE, START, FINISH]


def test_workers_with_the_extension_put_back_what_came_in_part(server) -> None:
    bracket = Bracket(VLLMClient(server.url, HttpOptions()), extended=True)
    bracket.restore(soon())

    assert posts(server) == [RPC, START, FINISH]
    assert server.asked[0].body["method"] == "weight_update_put_back"


def test_another_extension_has_nothing_of_the_kind_and_that_is_no_error(server, answer) -> None:
    words = "'Worker' object has no attribute 'weight_update_put_back'"
    server.answers[RPC] = refused(answer, words)
    bracket = Bracket(VLLMClient(server.url, HttpOptions()), extended=True)
    bracket.restore(soon())

    assert posts(server) == [RPC, START, FINISH]


def test_recovering_where_nothing_was_open_asks_nothing(server, session: VLLMSession) -> None:
    session.recover(soon())

    assert not server.asked


def test_an_update_that_cannot_be_undone_is_no_silence(
    server, answer, bracket: Bracket, session: VLLMSession
) -> None:
    """Of a server that is only silent it would be believed that it holds the old weights."""
    session.open(soon())
    server.answers[START] = answer(delay=2.0)

    with pytest.raises(EngineRejected, match="layers wait for weights"):
        session.recover(Deadline(0.3))
    assert bracket.open


def test_what_could_not_be_undone_is_undone_before_the_next_update(
    server, answer, bracket: Bracket, session: VLLMSession
) -> None:
    bracket.suspect = True
    session.open(soon())

    assert posts(server) == [START, FINISH, START]


# ---- the engine


class Server:
    """What a vLLM server answers to who inspects it."""

    def __init__(self, server: Any, answer: Any, *, release: str, backend: str | None) -> None:
        self.stub, self.answer = server, answer
        info: dict[str, Any] = {"instance_id": "1"}
        if backend is not None:
            info["weight_transfer_config"] = {"backend": backend}
        server.answers["/version"] = answer(body={"version": release})
        server.answers["/server_info?config_format=json"] = answer(body={"vllm_config": info})
        server.answers["/get_world_size?include_dp=true"] = answer(body={"world_size": 2})
        for route in (INIT, START, FINISH, UPDATE):
            server.answers.pop(route, None)
        if release < "0.32":
            server.answers[LEAVE] = answer(404, {"detail": "Not Found"})

    def engine(self, **settings: Any) -> VLLMEngine:
        engine = VLLMEngine(self.stub.url, HttpOptions(), unique_id=lambda *_: ID, **settings)
        engine.inspect(soon())
        self.stub.asked.clear()
        return engine

    def joined(self, engine: VLLMEngine, backend: str) -> dict[str, Any]:
        """What the server is told of a group."""
        engine.join(
            address="10.0.0.1",
            port=7,
            rank_offset=1,
            world_size=3,
            group_name="g",
            backend=backend,
            deadline=soon(),
        )
        told: dict[str, Any] = self.stub.asked[-1].body["init_info"]
        return told


@pytest.fixture
def vllm(server, answer) -> Any:
    def make(release: str = "0.32.0", backend: str | None = "weight_update_gloo") -> Server:
        return Server(server, answer, release=release, backend=backend)

    return make


@pytest.mark.parametrize(
    ("route", "words"),
    [
        ("/version", r"no vLLM server answers here .*\(without /v1\).*SGLangWeightSyncScheme"),
        ("/pause", "without the routes that change weights .*VLLM_SERVER_DEV_MODE=1"),
    ],
)
def test_a_server_that_takes_no_updates_is_refused_with_what_it_lacks(
    server, answer, vllm, route: str, words: str
) -> None:
    served = vllm()
    server.answers[route] = answer(404, {"detail": "Not Found"})

    with pytest.raises(ConfigurationError, match=words):
        served.engine()


def test_workers_join_a_gloo_group_by_the_rendezvous_that_every_engine_uses(vllm) -> None:
    served = vllm()
    engine = served.engine()

    assert engine.ranks == 2
    assert served.joined(engine, "gloo") == {
        "master_address": "10.0.0.1",
        "master_port": 7,
        "rank_offset": 1,
        "world_size": 3,
        "group_name": "g",
        "packed": True,
    }
    assert posts(served.stub) == [LEAVE, INIT]  # the group before, of whatever trainer


def test_workers_join_an_nccl_group_by_its_id_and_each_bucket_is_one_broadcast(vllm) -> None:
    served = vllm(backend="nccl")
    told = served.joined(served.engine(), "nccl")

    assert base64.b64decode(told.pop("nccl_unique_id_b64")) == ID
    assert told.pop("packed_buffer_size_bytes") > 1 << 50
    assert told == {"rank_offset": 1, "world_size": 3, "packed": True}


def test_a_release_that_takes_no_id_is_told_where_the_id_is(vllm) -> None:
    served = vllm("0.27.1", "nccl")

    assert served.joined(served.engine(), "nccl") == {
        "master_address": "10.0.0.1",
        "master_port": 7,
        "rank_offset": 1,
        "world_size": 3,
    }


@pytest.mark.parametrize(
    ("backend", "has", "remedy"),
    [
        ("gloo", "nccl", "weight_update_gloo"),
        ("gloo", None, "--worker-extension-cls weight_update.vllm_worker.WorkerExtension"),
        ("nccl", "ipc", '--weight-transfer-config \'{"backend": "nccl"}\''),
    ],
)
def test_a_server_of_another_backend_is_refused_with_how_to_start_it(
    vllm, backend: str, has: str | None, remedy: str
) -> None:
    served = vllm(backend=has)
    with pytest.raises(ConfigurationError) as caught:
        served.joined(served.engine(), backend)
    assert remedy in caught.value.remedy
    assert not served.stub.asked


@pytest.mark.parametrize(("release", "objects"), [("0.27.1", True), ("0.32.0", False)])
def test_a_release_that_loads_nothing_under_adapters_is_refused(
    vllm, server, answer, release: str, objects: bool
) -> None:
    served = vllm(release)
    info = {"lora_config": {"max_lora_rank": 8}}
    server.answers["/server_info?config_format=json"] = answer(body={"vllm_config": info})

    assert ("--enable-lora" in (served.engine().objection("abort") or "")) == objects


@pytest.mark.parametrize(("instance", "resumed"), [("1", False), ("2", True)])
def test_layers_that_wait_for_weights_are_remembered_until_the_server_starts_anew(
    vllm, answer, instance: str, resumed: bool
) -> None:
    fake = vllm()
    engine = fake.engine()
    engine.session("broadcast").open(soon())
    info = {"instance_id": instance}
    fake.stub.answers["/server_info?config_format=json"] = answer(body={"vllm_config": info})

    engine.inspect(soon())

    with nullcontext() if resumed else pytest.raises(EngineRejected, match="wait for weights"):
        engine.resume(soon())
    assert (fake.stub.asked[-1].path == "/resume") == resumed


def test_workers_that_cannot_open_memory_are_refused_when_they_are_met(vllm, answer) -> None:
    fake = vllm()
    words = "'CPUWorker' object has no attribute 'weight_update_place'"
    fake.stub.answers["/collective_rpc"] = answer(500, {"error": {"message": words}})

    with pytest.raises(ConfigurationError, match="--worker-extension-cls") as caught:
        fake.engine(by_memory=True)

    assert caught.value.phase == "connect"
    fake.engine()  # a broadcast does not need it


def test_a_group_that_is_not_theirs_any_more_is_not_dropped(vllm) -> None:
    served = vllm()
    engine = served.engine()
    served.joined(engine, "gloo")
    served.stub.asked.clear()

    engine.leave("another", soon())
    assert not served.stub.asked
    engine.leave("g", soon())
    assert posts(served.stub) == [LEAVE]


def test_who_leaves_a_group_late_does_not_drop_the_one_that_is_joined_meanwhile(vllm) -> None:
    served = vllm()
    engine = served.engine()
    served.joined(engine, "gloo")
    served.stub.asked.clear()
    served.stub.answers[LABEL] = served.answer(body={"weight_version": "1"}, delay=0.3)

    leaving = spawn(engine.leave, "g", soon())
    while not served.stub.asked:
        time.sleep(0.01)
    served.joined(engine, "gloo")
    leaving.result()

    assert posts(served.stub)[-1] == INIT


@pytest.mark.parametrize(
    ("mode", "query"),
    [
        ("abort", "mode=abort&clear_cache=false"),
        ("retract", "mode=keep&clear_cache=true"),
        ("in_place", "mode=keep&clear_cache=false"),
    ],
)
def test_the_pause_says_what_becomes_of_requests_in_flight(vllm, mode: Any, query: str) -> None:
    served = vllm()
    served.engine().pause(mode, soon(), again=False)

    assert served.stub.asked[-1].path == f"/pause?{query}"


def test_a_server_that_was_found_paused_is_undone_before_an_update_starts(vllm) -> None:
    """Somebody's update may have failed there, and a wrong shape would stay in a layer."""
    served = vllm()
    engine = served.engine()
    engine.pause("abort", soon(), again=True)
    served.stub.asked.clear()
    engine.session("broadcast").open(soon())

    assert posts(served.stub) == [START, FINISH, START]


def test_a_server_whose_layers_wait_for_weights_is_never_resumed(vllm) -> None:
    served = vllm()
    engine = served.engine()
    session = engine.session("broadcast")
    session.open(soon())
    served.stub.asked.clear()

    with pytest.raises(EngineRejected, match="not resumed"):
        engine.resume(soon())
    assert not served.stub.asked
    session.close(soon())
    engine.resume(soon())
    assert posts(served.stub) == [FINISH, "/resume"]


def test_a_flush_is_asked_for_until_it_is_done(vllm) -> None:
    served = vllm()
    route = "/reset_prefix_cache?reset_running_requests=true"
    said = iter([False, False, True])
    served.stub.by_body[route] = lambda _: served.answer(body={"success": next(said)})
    served.engine().flush(soon())

    assert posts(served.stub).count("/reset_prefix_cache") == 3
    assert posts(served.stub)[-1] == "/reset_encoder_cache"


def test_a_flush_that_is_never_done_is_an_error(vllm) -> None:
    served = vllm()
    route = "/reset_prefix_cache?reset_running_requests=true"
    served.stub.answers[route] = served.answer(body={"success": False})

    with pytest.raises(UpdateTimeout, match="not emptied"):
        served.engine().flush(Deadline(0.3))


def test_a_server_whose_workers_are_blocked_is_told_from_one_that_is_gone(vllm) -> None:
    """While an update request runs, /weight_info does not answer, and /health does."""
    served = vllm()
    engine = served.engine()
    served.stub.answers["/weight_info"] = served.answer(delay=6.0)

    with pytest.raises(EngineRejected, match="blocks its workers"):
        engine.label(Deadline(3.0))


def test_a_release_without_a_label_is_not_stamped(vllm, server, answer) -> None:
    server.answers["/update_weight_version"] = answer(404, {"detail": "Not Found"})
    served = vllm("0.23.0")
    served.engine().stamp("1", soon())

    assert not served.stub.asked


def test_an_older_release_is_told_of_packing_with_every_request(vllm) -> None:
    served = vllm("0.27.1", "nccl")
    engine = served.engine()
    session = engine.session("broadcast")
    session.apply(BUCKET, Cargo(), group_name="g", flush=False, deadline=soon())

    assert served.stub.asked[-1].body["update_info"]["packed"] is True
