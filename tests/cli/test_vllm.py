"""``weight-update push`` and ``doctor`` on vLLM servers and on mixed sets, played by the fake."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from safetensors.torch import save_file

from tests.vllm_fake import FakeVLLM, signature
from tests.vllm_fake.weights import checkpoint
from weight_update.cli.servers import Servers, schemes_for, sort_out
from weight_update.engines.recognition import Recognised
from weight_update.reference_engine import ReferenceEngine

from . import kit
from .kit import impostor, run

VERSION = {"/version": (200, {"version": "0.32.0"})}


@pytest.fixture(scope="module")
def running() -> Iterator[FakeVLLM]:
    with FakeVLLM() as started:
        yield started


@pytest.fixture
def fake(running: FakeVLLM) -> Iterator[FakeVLLM]:
    """The fake; one that a test left paused or torn is started again."""
    yield running
    running.clear()
    if running.paused or running.dead:
        running.restart()


@pytest.fixture(scope="module")
def pushed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint that the fake does not serve yet."""
    folder = tmp_path_factory.mktemp("pushed")
    save_file({k: v.contiguous() for k, v in checkpoint(1).items()}, folder / "model.safetensors")
    return folder


# -- doctor -----------------------------------------------------------------------------------


def test_a_server_that_would_take_an_update_is_described(fake: FakeVLLM, pushed: Path) -> None:
    ended = run("doctor", "--server", fake.url, "--checkpoint", pushed, "--json")
    assert (ended.code, ended.err) == (0, "")
    assert list(ended.json) == ["ok", "servers", "problems"]
    (found,) = ended.json["servers"]
    expected = {"url": fake.url, "service": "vllm", "release": "0.32.0", "ranks": 1}
    assert {name: found[name] for name in expected} == expected
    assert "vLLM" in found["found_by"]


def test_a_diagnosis_changes_nothing(fake: FakeVLLM, pushed: Path) -> None:
    before, label, served = len(fake.log()), fake.label, fake.served()
    run("doctor", "--server", fake.url, "--checkpoint", pushed)
    run("push", "--server", fake.url, pushed, "--dry-run")
    asked = fake.log()[before:]
    assert {entry["method"] for entry in asked if entry["path"] != "/v1/completions"} == {"GET"}
    assert (fake.label, fake.served()) == (label, served)


def test_people_read_what_was_found_and_why(fake: FakeVLLM) -> None:
    ended = run("doctor", "--server", fake.url)
    assert ended.code == 0
    assert "vLLM 0.32.0: /version names a release" in ended.out
    assert "  layout      1 rank(s) join" in ended.out


def test_a_paused_server_is_warned_of(fake: FakeVLLM) -> None:
    fake.call("POST", "/pause?mode=keep")
    ended = run("doctor", "--server", fake.url, "--json")
    assert ended.code == 0
    assert "paused" in ended.json["servers"][0]["warnings"][0]["what"]


def test_development_mode_that_is_off_is_the_problem() -> None:
    with impostor(VERSION) as url:
        ended = run("doctor", "--server", url, "--json")
    assert ended.code == 1
    assert "VLLM_SERVER_DEV_MODE=1" in ended.json["problems"][0]["remedy"]


# -- push -------------------------------------------------------------------------------------


def test_a_pushed_checkpoint_is_served(fake: FakeVLLM, pushed: Path) -> None:
    ended = run("push", "--server", fake.url, pushed)
    assert ended.code == 0, ended.err
    assert fake.served() == signature(checkpoint(1))
    assert f"{fake.url} new (version {fake.label})" in ended.out
    assert f"{fake.url} is vLLM: /version names a release" in ended.err


def test_json_is_the_report_and_nothing_else(fake: FakeVLLM, pushed: Path) -> None:
    ended = run("push", "--server", fake.url, pushed, "--json")
    assert (ended.code, ended.err) == (0, "")
    assert ended.json["engines"][fake.url]["state"] == "new"


def test_an_update_that_is_torn_leaves_the_server_held_and_a_push_heals_it(
    fake: FakeVLLM, pushed: Path
) -> None:
    fake.inject("/update_weights", "torn", tensors=2)
    failed = run("push", "--server", fake.url, pushed)
    assert failed.code == 3
    assert "Connection closed by peer" in failed.err
    assert fake.paused

    healed = run("push", "--server", fake.url, pushed)

    assert healed.code == 0, healed.err
    assert fake.served() == signature(checkpoint(1))


def test_a_server_without_its_development_mode_is_refused_before_anything_is_sent(
    pushed: Path,
) -> None:
    with impostor(VERSION) as url:
        ended = run("push", "--server", url, pushed, "--json")
    assert ended.code == 1
    assert "VLLM_SERVER_DEV_MODE=1" in ended.json["error"]["remedy"]


def test_a_dry_run_says_what_would_be_sent(fake: FakeVLLM, pushed: Path) -> None:
    ended = run("push", "--server", fake.url, pushed, "--dry-run", "--json")
    assert ended.code == 0
    assert (ended.json["tensors"], ended.json["way"]) == (len(checkpoint(1)), "broadcast")
    assert ended.json["doctor"]["servers"][0]["service"] == "vllm"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--transport", "disk"], "transport='disk' does not go with vLLM"),
        (["--directory", "/tmp"], "which vLLM does not"),
    ],
)
def test_what_vllm_cannot_do_is_a_matter_of_usage(
    fake: FakeVLLM, pushed: Path, arguments: list[str], said: str
) -> None:
    before = fake.paths()
    for engine in ("auto", "vllm"):
        ended = run("push", "--server", fake.url, pushed, "--engine", engine, *arguments)
        assert ended.code == 2
        assert said in ended.err
    assert fake.paths() == before


def test_a_key_is_never_told(fake: FakeVLLM, pushed: Path) -> None:
    keys = {"WEIGHT_UPDATE_API_KEY": "open-sesame", "WEIGHT_UPDATE_ADMIN_API_KEY": "please-do"}
    fake.inject("/update_weights", "refuse")
    for command in (("doctor",), ("push", pushed)):
        ended = run(command[0], "--server", fake.url, *command[1:], **keys)
        assert not any(key in ended.out + ended.err for key in keys.values())


# -- what a server is -------------------------------------------------------------------------


def test_who_names_the_engine_is_believed(fake: FakeVLLM) -> None:
    ended = run("doctor", "--server", fake.url, "--engine", "sglang", "--json")
    assert ended.code == 1
    assert ended.json["servers"][0]["found_by"] == "--engine sglang says so"
    assert ended.json["problems"][0]["what"].startswith("no SGLang server answers here")


def test_who_names_the_wrong_engine_hears_that_it_is_none(engine: ReferenceEngine) -> None:
    ended = run("doctor", *kit.servers(engine), "--engine", "vllm", "--json")
    assert ended.code == 1
    assert [found["what"] for found in ended.json["problems"]] == ["no vLLM server answers here"]
    assert "--engine auto" in ended.json["problems"][0]["remedy"]


def test_each_kind_of_a_mixed_set_comes_to_a_port_of_its_own() -> None:
    _, sglang, vllm = schemes_for(Servers((S,), (V,)), master_port=29500)
    assert (sglang.master_port, vllm.master_port) == (29500, 29501)
    (alone,) = schemes_for(Servers((), (V,)), master_port=29500)
    assert alone.master_port == 29500


def test_a_mixed_set_gets_one_update_and_one_report(
    fake: FakeVLLM, engine: ReferenceEngine, tmp_path: Path
) -> None:
    kit.llama(1).save_pretrained(tmp_path)
    ended = run("push", *kit.servers(engine), "--server", fake.url, tmp_path, "--json")
    # The fake has another model: it refuses, and one report tells of both.
    assert ended.code == 3
    assert ended.json["error"]["engine"] == fake.url
    assert set(ended.json["engines"]) == {engine.url, fake.url}
    assert ended.json["engines"][fake.url]["state"] == "mixed"


def found(url: str, service: str | None, *workers: str) -> Recognised:
    return Recognised(url, service, "it says so", workers)  # type: ignore[arg-type]


S, V, X = "http://s:1", "http://v:1", "http://x:1"


@pytest.mark.parametrize(
    ("services", "expected"),
    [
        ([found(S, "sglang"), found(V, "vllm")], ((S,), (V,))),
        ([found(S, "sglang"), found(X, None)], ((S, X), ())),
        ([found(V, "vllm"), found(X, None)], ((), (V, X))),
        ([found(V, "vllm"), found(X, "other")], ((), (V, X))),
        ([found(S, "sglang"), found(V, "vllm"), found(X, None)], ((S, X), (V,))),
        ([found(X, None)], ((X,), ())),
        ([found(X, "router")], ((X,), ())),
    ],
    ids=["mixed", "gone, beside SGLang", "gone, beside vLLM", "other", "gone", "alone", "router"],
)
def test_what_does_not_answer_is_taken_for_what_the_others_are(
    services: list[Recognised], expected: tuple[tuple[str, ...], ...]
) -> None:
    sorted_out = sort_out(services)
    assert (sorted_out.sglang, sorted_out.vllm) == expected


def test_vllm_servers_behind_a_router_take_its_place(fake: FakeVLLM, pushed: Path) -> None:
    with impostor({"/workers": (200, {"workers": [{"url": fake.url}]})}) as router:
        ended = run("push", "--server", router, pushed)
        seen = run("doctor", "--server", router, "--json")
    assert ended.code == 0, ended.err
    assert f"{fake.url} is vLLM" in ended.err
    assert f"{router} lists it" in ended.err
    assert fake.served() == signature(checkpoint(1))
    assert "router" in json.dumps(seen.json["servers"])


def test_sglang_servers_behind_a_router_are_left_to_its_list() -> None:
    router = found(X, "router", S)
    assert sort_out([router], {X: [found(S, "sglang")]}).urls == (X,)
    assert sort_out([router], {X: [found(V, "vllm")]}) == Servers(
        (), (V,), (f"{V} is vLLM: it says so; {X} lists it",)
    )
