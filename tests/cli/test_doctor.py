"""``weight-update doctor`` on live engines and on servers that are something else."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from weight_update.cli import doctor_facts
from weight_update.reference_engine import ReferenceEngine

from . import kit
from .kit import Checkpoints, impostor, run, served, servers, tokens_of


def problems(ended: kit.Ended) -> str:
    return "\n".join(f"{p['where']}: {p['what']} -> {p['remedy']}" for p in ended.json["problems"])


def test_a_server_that_would_take_an_update_is_described(
    engine: ReferenceEngine, checkpoints: Checkpoints
) -> None:
    ended = run("doctor", *servers(engine), "--checkpoint", checkpoints.b, "--json")

    assert (ended.code, ended.err) == (0, "")
    assert list(ended.json) == ["ok", "servers", "problems"]
    assert (ended.json["ok"], ended.json["problems"]) == (True, [])
    (found,) = ended.json["servers"]
    expected = {
        "url": engine.url,
        "reachable": True,
        "service": "sglang",
        "release": "0.5.23",
        "dtype": "float32",
        "tp": 1,
        "ranks": 1,
        "sessions": True,
        "pause_modes": ["abort", "retract", "in_place"],
        "keys": {"ordinary": "open", "control": "open"},
        "paused": False,
        "running_requests": 0,
        "rendezvous": "127.0.0.1",
    }
    assert {name: found[name] for name in expected} == expected
    assert found["version"] == kit.label(engine)


def test_nothing_is_changed_by_it(engine: ReferenceEngine, checkpoints: Checkpoints) -> None:
    before = kit.label(engine)
    log = kit.Log(engine)

    run("doctor", *servers(engine), "--checkpoint", checkpoints.b)

    asked = log.asked()
    assert {method for method, _ in asked} == {"GET", "OPTIONS"}
    harmful = {"/flush_cache", "/release_memory_occupation", "/resume_memory_occupation"}
    assert not harmful & {path for method, path in asked if method == "GET"}
    assert (kit.label(engine), kit.is_paused(engine)) == (before, False)
    assert served(engine) == tokens_of(0)


def test_people_read_the_same_in_words(engine: ReferenceEngine, checkpoints: Checkpoints) -> None:
    ended = run("doctor", *servers(engine), "--checkpoint", checkpoints.wide)
    assert ended.code == 1
    assert engine.url in ended.out
    assert "SGLang 0.5.23" in ended.out
    assert "problem: " in ended.out
    assert "an update would not work" in ended.out


def test_of_two_servers_the_dead_one_is_the_problem(engine: ReferenceEngine) -> None:
    with impostor({}) as gone:
        pass
    ended = run("doctor", *servers(engine), "--server", gone, "--json")
    assert ended.code == 1
    assert [problem["where"] for problem in ended.json["problems"]] == [gone]
    assert [server["reachable"] for server in ended.json["servers"]] == [True, False]


def test_a_paused_server_is_warned_of(engine: ReferenceEngine) -> None:
    engine.call("POST", kit.PAUSE, {"mode": "retract"})
    ended = run("doctor", *servers(engine), "--json")
    assert ended.code == 0
    assert ended.json["servers"][0]["paused"] is True
    assert "paused" in ended.json["servers"][0]["warnings"][0]["what"]


# -- a checkpoint -------------------------------------------------------------------------


def test_other_names_and_shapes_are_problems(
    engine: ReferenceEngine, checkpoints: Checkpoints, tmp_path: Path
) -> None:
    weights = {f"policy.{name}": value for name, value in kit.llama(1).state_dict().items()}
    save_file(weights, tmp_path / "model.safetensors")

    other_names = run("doctor", *servers(engine), "--checkpoint", tmp_path, "--json")
    other_shapes = run("doctor", *servers(engine), "--checkpoint", checkpoints.wide, "--json")

    assert "would ignore them: 'policy." in problems(other_names)
    assert "(48,) in the checkpoint and (32,) in the server" in problems(other_shapes)


def test_a_state_dict_in_a_file_is_compared_too(engine: ReferenceEngine, tmp_path: Path) -> None:
    torch.save(kit.llama(1, hidden_size=48).state_dict(), tmp_path / "wide.pt")
    ended = run("doctor", *servers(engine), "--checkpoint", tmp_path / "wide.pt", "--json")
    assert "(64, 48) in the checkpoint and (64, 32) in the server" in problems(ended)


def test_a_broken_checkpoint_is_a_problem_beside_what_the_server_says(
    engine: ReferenceEngine, tmp_path: Path
) -> None:
    ended = run("doctor", *servers(engine), "--checkpoint", tmp_path / "none", "--json")
    assert ended.code == 1
    assert "does not exist" in problems(ended)
    assert ended.json["servers"][0]["release"] == "0.5.23"


# -- keys ---------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def locked() -> Iterator[ReferenceEngine]:
    model = kit.llama(0)
    with ReferenceEngine(model, api_key="open-sesame", admin_api_key="please") as engine:
        yield engine


NORMAL, ADMIN = "WEIGHT_UPDATE_API_KEY", "WEIGHT_UPDATE_ADMIN_API_KEY"


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({}, "ordinary routes need a key"),
        ({NORMAL: "guessed-key"}, "ordinary routes refuse this key"),
        ({NORMAL: "open-sesame"}, "control routes refuse this key"),
        ({NORMAL: "open-sesame", ADMIN: "guessed-key"}, "control routes refuse this key"),
        ({NORMAL: "open-sesame", ADMIN: "please"}, ""),
    ],
    ids=["none", "wrong", "no admin key", "wrong admin key", "both"],
)
def test_keys_are_judged_without_being_told(
    locked: ReferenceEngine, keys: dict[str, str], said: str
) -> None:
    ended = run("doctor", *servers(locked), "--json", **keys)

    assert said in problems(ended)
    assert ended.json["ok"] is (not said)
    assert not any(key in ended.out for key in ("open-sesame", "please", "guessed-key"))
    if not said:
        assert ended.json["servers"][0]["keys"] == {"ordinary": "accepted", "control": "accepted"}


def test_a_caller_that_is_forbidden_is_told_apart_from_a_wrong_key() -> None:
    with impostor({"*": (403, {"error": "Forbidden"})}) as url:
        ended = run("doctor", "--server", url, "--json", WEIGHT_UPDATE_API_KEY="k")
    assert "(403)" in problems(ended)


# -- what is no SGLang server -------------------------------------------------------------

MODELS = {"object": "list", "data": [{"id": "m", "owned_by": "vllm"}]}


@pytest.mark.parametrize(
    ("answers", "said"),
    [
        ({"/v1/models": (200, MODELS)}, "vLLM"),
        ({}, "no SGLang server and no vLLM server answers here"),
        ({"*": (502, "<html>Bad Gateway</html>")}, "502"),
        ({"*": (200, "<html>welcome</html>")}, "no SGLang server and no vLLM server answers here"),
    ],
    ids=["vLLM", "an empty server", "a gateway", "a web site"],
)
def test_what_answers_instead_is_named(answers: dict[str, Any], said: str) -> None:
    with impostor(answers) as url:
        ended = run("doctor", "--server", url, "--json")
    assert ended.code == 1
    assert said in problems(ended)


def test_a_router_is_named_and_its_servers_are_not_looked_at() -> None:
    workers = {"workers": [{"url": "http://a:1"}]}
    with impostor({"/workers": (200, workers), "/model_info": (200, {})}) as url:
        ended = run("doctor", "--server", url, "--json")
    assert "this is a router" in json.dumps(ended.json)
    assert ended.code == 0


def test_a_redirect_is_not_followed() -> None:
    there = "http://elsewhere.example/model_info"
    with impostor({"*": (307, "")}, headers=[("Location", there)]) as url:
        ended = run("doctor", "--server", url, "--json")
    assert there in problems(ended)


def test_an_older_release_is_described_as_it_is() -> None:
    with ReferenceEngine(kit.llama(0), release="0.5.15") as engine:
        ended = run("doctor", *servers(engine), "--json")
    (found,) = ended.json["servers"]
    assert (ended.json["ok"], found["release"], found["sessions"]) == (True, "0.5.15", False)
    assert found["paused"] is None


# -- the address --------------------------------------------------------------------------


def test_an_address_of_another_host_is_a_problem(engine: ReferenceEngine) -> None:
    ended = run("doctor", *servers(engine), "--master-address", "192.0.2.1", "--json")
    assert ended.code == 1
    assert "192.0.2.1" in problems(ended)


@pytest.fixture
def hanging(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A host whose name is looked up until the test ends."""
    name, ended, look_up = "hanging.example", threading.Event(), socket.getaddrinfo

    def getaddrinfo(host: Any, *arguments: Any, **options: Any) -> Any:
        if host == name:
            ended.wait(60)
            raise socket.gaierror("no answer")
        return look_up(host, *arguments, **options)

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)
    monkeypatch.setattr(doctor_facts, "_GRACE_SECONDS", 0.5)
    yield name
    ended.set()


@pytest.mark.parametrize("command", ["doctor", "push"])
def test_a_name_whose_look_up_hangs_is_a_problem(
    hanging: str, checkpoints: Checkpoints, command: str
) -> None:
    url = f"http://{hanging}:30000"
    rest = ("--json",) if command == "doctor" else (checkpoints.b, "--dry-run", "--json")
    ended = run(command, "--server", url, "--timeout", 0.5, *rest)

    assert ended.code == 1
    found = ended.json if command == "doctor" else ended.json["doctor"]
    assert found["servers"][0]["reachable"] is False
    assert {
        "what": "no answer in time",
        "where": url,
        "remedy": "check the name and the network",
    } in found["problems"]


def test_a_master_address_whose_look_up_hangs_is_a_problem(hanging: str) -> None:
    with impostor({}) as url:
        ended = run("doctor", "--server", url, "--master-address", hanging, "--json")
    assert ended.code == 1
    assert f"{hanging}: its name is not looked up in time" in problems(ended)


@pytest.mark.parametrize(
    "arguments",
    [[], ["--server", "no-url"], ["--server", "http://a", "--pause-mode", "x"]],
    ids=["no server", "no URL", "an unknown pause mode"],
)
def test_wrong_arguments_are_a_matter_of_usage(arguments: list[str]) -> None:
    assert run("doctor", *arguments).code == 2
