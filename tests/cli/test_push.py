"""``weight-update push`` into live engines: what lands, what is said, how it ends."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import typer
from safetensors.torch import save_file

from weight_update import WeightUpdateError
from weight_update.cli.output import Exit
from weight_update.cli.push import _failed
from weight_update.errors import Phase
from weight_update.reference_engine import Fault, ReferenceEngine
from weight_update.report import EngineOutcome, EngineState

from . import kit
from .kit import ERROR, Checkpoints, run, served, servers, tokens_of

B_BYTES = sum(p.nbytes for p in kit.llama(1).parameters())


def test_a_sharded_checkpoint_lands_on_both_servers(
    two: list[ReferenceEngine], checkpoints: Checkpoints
) -> None:
    ended = run("push", *servers(*two), checkpoints.b)

    assert ended.code == 0, ended.err
    assert [served(engine) for engine in two] == [tokens_of(1)] * 2
    assert all(f"{engine.url} new (version" in ended.out for engine in two)


def test_progress_goes_to_standard_error_in_plain_lines(
    engine: ReferenceEngine, checkpoints: Checkpoints
) -> None:
    ended = run("push", *servers(engine), checkpoints.b, "--bucket-bytes", 20_000)

    lines = ended.err.splitlines()
    assert {"plan", "pause", "continue"} <= set(lines)
    assert any(line.startswith("transfer: ") and "buckets" in line for line in lines)
    assert "\x1b" not in ended.err + ended.out
    assert "transfer:" not in ended.out


def test_json_is_the_report_and_standard_error_stays_empty(
    engine: ReferenceEngine, checkpoints: Checkpoints
) -> None:
    ended = run("push", *servers(engine), checkpoints.b, "--json", "--bucket-bytes", 20_000)

    assert (ended.code, ended.err) == (0, "")
    assert ended.json["engines"][engine.url]["state"] == "new"
    assert ended.json["bytes"] == B_BYTES
    assert ended.json["tensors"] == 21
    assert ended.json["buckets"] > 1
    assert str(ended.json["version"]) == kit.label(engine)


def test_every_push_moves_the_version_on_from_the_servers(
    engine: ReferenceEngine, checkpoints: Checkpoints
) -> None:
    first = run("push", *servers(engine), checkpoints.b, "--json").json["version"]
    second = run("push", *servers(engine), checkpoints.a, "--json").json["version"]
    assert second == first + 1


@pytest.mark.parametrize("mode", ["abort", "retract", "in_place"])
def test_the_pause_mode_is_the_servers(
    engine: ReferenceEngine, checkpoints: Checkpoints, mode: str
) -> None:
    log = len(engine.requests())
    ended = run("push", *servers(engine), checkpoints.b, "--pause-mode", mode, "--json")
    asked = [r for r in engine.requests()[log:] if r["method"] == "POST"]
    bodies = [r["json"] for r in asked if r["path"] == kit.PAUSE]
    assert (ended.json["pause_mode"], bodies) == (mode, [{"mode": mode}])


def test_a_dtype_casts_on_the_way(engine: ReferenceEngine, checkpoints: Checkpoints) -> None:
    ended = run("push", *servers(engine), checkpoints.b, "--dtype", "bfloat16", "--json")
    assert ended.json["bytes"] == B_BYTES // 2


def test_the_servers_own_dtype_can_be_asked_for(
    engine: ReferenceEngine, checkpoints: Checkpoints, tmp_path: Path
) -> None:
    half = saved(tmp_path, {n: t.bfloat16() for n, t in kit.llama(1).state_dict().items()})
    ended = run("push", *servers(engine), half, "--dtype", "engine", "--json")
    assert ended.json["bytes"] == B_BYTES, ended.err  # the engine serves float32


def test_a_value_that_is_no_number_is_refused_before_the_pause(
    engine: ReferenceEngine, tmp_path: Path
) -> None:
    state = {name: tensor.clone() for name, tensor in kit.llama(1).state_dict().items()}
    state["model.norm.weight"][3] = torch.nan
    log = kit.Log(engine)

    ended = run("push", *servers(engine), saved(tmp_path, state), "--check-finite")

    assert ended.code == 1
    assert "model.norm.weight" in ended.err
    assert log.count(kit.PAUSE) == 0


def padded(rows: int) -> dict[str, torch.Tensor]:
    """Model B with a vocabulary that its trainer padded."""
    state = dict(kit.llama(1).state_dict())
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        state[name] = torch.cat([state[name], torch.zeros(rows - 64, 32)])
    return state


def test_padding_of_the_vocabulary_is_cut_off_on_request_alone(
    engine: ReferenceEngine, tmp_path: Path
) -> None:
    path = saved(tmp_path, padded(72))
    log = kit.Log(engine)

    refused = run("push", *servers(engine), path)
    before_the_pause = log.count(kit.PAUSE) == 0
    landed = run("push", *servers(engine), path, "--trim-vocabulary")

    assert (refused.code, before_the_pause) == (1, True)
    assert landed.code == 0, landed.err
    assert served(engine) == tokens_of(1)


@pytest.mark.parametrize("way", ["broadcast", "ipc", "disk"])
def test_the_way_that_is_asked_for_is_taken_and_named(
    engine: ReferenceEngine, checkpoints: Checkpoints, tmp_path: Path, way: str
) -> None:
    folder = ["--directory", tmp_path] if way == "disk" else []
    asked = ["--transport", way, *folder]

    ended = run("push", *servers(engine), checkpoints.b, *asked)

    assert ended.code == 0, ended.err
    assert f"\n  by {way}" in ended.out
    assert served(engine) == tokens_of(1)


def test_json_says_which_way_the_bytes_took(
    engine: ReferenceEngine, checkpoints: Checkpoints
) -> None:
    route = run("push", *servers(engine), checkpoints.b, "--json").json["route"]

    assert (route["way"], route["backend"]) == ("broadcast", "gloo")


def test_files_for_the_servers_are_written_where_it_is_told(
    engine: ReferenceEngine, checkpoints: Checkpoints, tmp_path: Path
) -> None:
    log = len(engine.requests())

    asked = ["--transport", "disk", "--directory", tmp_path]
    ended = run("push", *servers(engine), checkpoints.b, *asked)

    told = [r["json"] for r in engine.requests()[log:] if r["path"] == kit.FROM_DISK]
    assert ended.code == 0, ended.err
    assert [Path(each["model_path"]).is_relative_to(tmp_path) for each in told] == [True]


def test_a_way_that_is_unknown_is_a_wrong_argument(
    engine: ReferenceEngine, checkpoints: Checkpoints
) -> None:
    ended = run("push", *servers(engine), checkpoints.b, "--transport", "pigeon")

    assert ended.code == 2
    assert "'broadcast', 'ipc', 'disk'" in ended.err


# -- a state_dict in a file ---------------------------------------------------------------


def saved(folder: Path, what: Any, name: str = "model.pt") -> Path:
    torch.save(what, folder / name)
    return folder / name


@pytest.mark.parametrize("name", ["model.pt", "pytorch_model.bin", "last.pth", "step-3"])
def test_a_state_dict_in_a_file_lands(engine: ReferenceEngine, tmp_path: Path, name: str) -> None:
    wrapped = {f"module._orig_mod.{n}": t for n, t in kit.llama(1).state_dict().items()}
    path = saved(tmp_path, {"model": wrapped, "epoch": 3}, name)

    ended = run("push", *servers(engine), path)

    assert ended.code == 0, ended.err
    assert served(engine) == tokens_of(1)


def test_a_file_that_would_run_code_is_refused_and_the_server_asked_nothing(
    engine: ReferenceEngine, tmp_path: Path
) -> None:
    log = kit.Log(engine)

    ended = run("push", *servers(engine), saved(tmp_path, kit.llama(1)))

    assert ended.code == 1
    assert "weights_only=True" in ended.err
    assert "AutoModelForCausalLM.from_pretrained(OLD).save_pretrained(NEW)" in ended.err
    assert log.asked() == []


def test_a_dry_run_of_a_file_says_the_same_as_of_a_folder(
    engine: ReferenceEngine, checkpoints: Checkpoints, tmp_path: Path
) -> None:
    path = saved(tmp_path, kit.llama(1).state_dict())

    of_file = run("push", *servers(engine), path, "--dry-run", "--json").json
    of_folder = run("push", *servers(engine), checkpoints.b, "--dry-run", "--json").json

    assert of_file == of_folder | {"checkpoint": str(path)}


# -- names --------------------------------------------------------------------------------


def test_names_are_mapped_in_order(engine: ReferenceEngine, tmp_path: Path) -> None:
    state = {f"policy/{n.replace('.', '/')}": t for n, t in kit.llama(1).state_dict().items()}
    rules = ["--name-map", "^policy/=", "--name-map", "/=."]

    ended = run("push", *servers(engine), saved(tmp_path, state), *rules)

    assert ended.code == 0, ended.err
    assert served(engine) == tokens_of(1)


def test_a_rule_that_matches_no_name_is_refused_before_the_pause(
    engine: ReferenceEngine, checkpoints: Checkpoints
) -> None:
    log = kit.Log(engine)
    for dry in ([], ["--dry-run"]):
        ended = run("push", *servers(engine), checkpoints.b, "--name-map", "^policy[.]=", *dry)
        assert ended.code == 1
        assert "'^policy[.]' matches no name" in ended.err
    assert log.count(kit.PAUSE) == 0


# -- a dry run ----------------------------------------------------------------------------


def test_a_dry_run_shows_what_is_cast_and_renamed(engine: ReferenceEngine, tmp_path: Path) -> None:
    path = saved(tmp_path, {f"policy.{n}": t for n, t in kit.llama(1).state_dict().items()})
    how = ["--name-map", "^policy[.]=", "--dtype", "bfloat16", "--dry-run", "--json"]

    ended = run("push", *servers(engine), path, *how)

    assert ended.code == 0, ended.out
    assert ended.json["dtypes"] == {"bfloat16": B_BYTES // 2}


def test_a_dry_run_says_what_would_be_sent_and_sends_nothing(
    two: list[ReferenceEngine], checkpoints: Checkpoints
) -> None:
    logs, labels = [kit.Log(engine) for engine in two], [kit.label(engine) for engine in two]

    ended = run("push", *servers(*two), checkpoints.b, "--dry-run", "--json")

    assert ended.code == 0, ended.out
    assert ended.json["bytes"] == B_BYTES
    assert (ended.json["tensors"], ended.json["buckets"]) == (21, 1)
    assert ended.json["dtypes"] == {"float32": B_BYTES}
    assert ended.json["doctor"]["ok"] is True
    assert [kit.label(engine) for engine in two] == labels
    assert [served(engine) for engine in two] == [tokens_of(0)] * 2
    asked = {(method, path) for log in logs for method, path in log.asked() if path != "/generate"}
    assert {method for method, _ in asked} == {"GET", "OPTIONS"}


@pytest.mark.parametrize(
    ("way", "buckets"), [("broadcast", 7), ("disk", 1)], ids=["broadcast", "disk"]
)
def test_a_dry_run_counts_the_buckets_of_the_way_that_is_named(
    engine: ReferenceEngine, checkpoints: Checkpoints, way: str, buckets: int
) -> None:
    asked = ("--transport", way, "--bucket-bytes", 20_000)
    plan = run("push", *servers(engine), checkpoints.b, "--dry-run", "--json", *asked).json

    assert (plan["way"], plan["buckets"]) == (way, buckets)


def test_a_dry_run_says_that_replicas_are_reached_by_disk(checkpoints: Checkpoints) -> None:
    with ReferenceEngine(kit.llama(0), shows={"dp_size": 2}) as replicas:
        ended = run("push", *servers(replicas), checkpoints.b, "--dry-run")

    assert "in 1 bucket(s) by disk" in ended.out


def test_a_dry_run_fails_where_a_push_would(
    engine: ReferenceEngine, checkpoints: Checkpoints
) -> None:
    ended = run("push", *servers(engine), checkpoints.wide, "--dry-run")
    assert ended.code == 1
    assert "another shape" in ended.out
    assert "would send 21 tensors" in ended.out


# -- refusals before anything is paused ---------------------------------------------------


def unreadable(folder: Path) -> None:
    (folder / "model.safetensors").write_text("no safetensors")


def pickled(folder: Path) -> None:
    torch.save({}, folder / "pytorch_model.bin")


@pytest.mark.parametrize("make", [unreadable, pickled])
def test_a_checkpoint_that_cannot_be_read_asks_the_server_nothing(
    engine: ReferenceEngine, tmp_path: Path, make: Callable[[Path], None]
) -> None:
    make(tmp_path)
    log = kit.Log(engine)

    ended = run("push", *servers(engine), tmp_path)

    assert ended.code == 1
    assert str(tmp_path) in ended.err
    assert log.asked() == []


def test_float8_weights_are_not_cast_without_their_scales(
    engine: ReferenceEngine, tmp_path: Path
) -> None:
    save_file({"a": torch.zeros(2).to(torch.float8_e4m3fn)}, tmp_path / "model.safetensors")
    ended = run("push", *servers(engine), tmp_path, "--dtype", "bfloat16")
    assert ended.code == 1
    assert "scales" in ended.err


def test_a_checkpoint_of_another_shape_is_refused_before_the_pause(
    engine: ReferenceEngine, checkpoints: Checkpoints
) -> None:
    log = kit.Log(engine)

    ended = run("push", *servers(engine), checkpoints.wide, "--json")

    assert ended.code == 1
    assert "another shape" in ended.json["error"]["message"]
    assert ended.json["error"]["engine"] == engine.url
    assert log.count(kit.PAUSE) == 0


def test_a_checkpoint_with_other_names_is_refused_before_the_pause(
    engine: ReferenceEngine, tmp_path: Path
) -> None:
    weights = {f"policy.{name}": value for name, value in kit.llama(1).state_dict().items()}
    save_file(weights, tmp_path / "model.safetensors")
    log = kit.Log(engine)

    ended = run("push", *servers(engine), tmp_path)

    assert ended.code == 1
    assert "would ignore them: 'policy." in ended.err
    assert "would stay old: " in ended.err
    assert r"--name-map '^policy\.='" in ended.err
    assert log.count(kit.PAUSE) == 0


def test_a_dead_server_leaves_the_other_one_as_it_was(
    two: list[ReferenceEngine], checkpoints: Checkpoints
) -> None:
    with kit.impostor({}) as gone:
        pass
    ended = run("push", "--server", gone, *servers(two[1]), checkpoints.b, "--timeout", 30)

    assert ended.code == 1
    assert gone in ended.err
    assert "Traceback" not in ended.err
    assert served(two[1]) == tokens_of(0)


@pytest.mark.parametrize(
    "arguments",
    [
        ["--server", "no-url", "DIR"],
        ["--server", "http://127.0.0.1:1", "--server", "http://127.0.0.1:1", "DIR"],
        ["DIR"],
        ["--server", "http://127.0.0.1:1"],
        ["--server", "http://127.0.0.1:1", "DIR", "--pause-mode", "retarct"],
        ["--server", "http://127.0.0.1:1", "DIR", "--dtype", "int8"],
        ["--server", "http://127.0.0.1:1", "DIR", "--device", "warp"],
        ["--server", "http://127.0.0.1:1", "DIR", "--bucket-bytes", "0"],
        ["--server", "http://127.0.0.1:1", "DIR", "--ca-file", "nowhere.pem"],
        ["--server", "http://127.0.0.1:1", "DIR", "--master-port", "70000"],
        ["--server", "http://127.0.0.1:1", "DIR", "--timeout", "nan"],
        ["--server", "http://127.0.0.1:1", "DIR", "--name-map", "policy"],
        ["--server", "http://127.0.0.1:1", "DIR", "--name-map", "(=x"],
        ["--server", "http://127.0.0.1:1", "DIR", "--name-map", r"a=\1"],
        ["--server", "http://127.0.0.1:1", "DIR", "--name-map", "a=b", "--name-map", "a=c"],
    ],
    ids=" ".join,
)
def test_wrong_arguments_are_a_matter_of_usage(arguments: list[str]) -> None:
    ended = run("push", *arguments)
    assert (ended.code, ended.out) == (2, "")
    assert "Error" in ended.err


def test_a_late_leave_of_an_earlier_command_is_none_of_a_later_ones_requests(
    engine: ReferenceEngine,
) -> None:
    log = kit.Log(engine)
    with suppress(RuntimeError):  # the engine is in no such group
        engine.call("POST", kit.LEAVE, {"group_name": "earlier"}, timeout=20)
    kit.wait_for(lambda: len(engine.requests()) > log.start)
    assert log.asked() == []


# -- failures -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("phase", "state", "paused", "code"),
    [
        ("plan", "mixed", True, Exit.FAILED),
        ("connect", "unreachable", False, Exit.FAILED),
        ("transfer", "old", False, Exit.FAILED),
        ("transfer", "mixed", True, Exit.UNCLEAN),
        ("pause", "old", True, Exit.UNCLEAN),
        ("continue", "new", True, Exit.UNCLEAN),
        ("begin", "unreachable", False, Exit.UNCLEAN),
    ],
)
def test_the_exit_code_tells_whether_a_touched_server_is_left_unclean(
    phase: Phase, state: str, paused: bool, code: Exit
) -> None:
    outcome = EngineOutcome("http://a:1", EngineState(state), None, paused=paused)
    sender: Any = SimpleNamespace(engines={outcome.url: outcome})
    job: Any = SimpleNamespace(as_json=False)

    with pytest.raises(typer.Exit) as ended:
        _failed(job, WeightUpdateError("broken", phase=phase), sender)

    assert ended.value.exit_code == code


def test_a_refused_update_is_told_in_the_engines_words_and_leaves_it_old(
    engine: ReferenceEngine, checkpoints: Checkpoints
) -> None:
    engine.inject(Fault(kit.UPDATE, "refuse", message="not today", times=1))

    ended = run("push", *servers(engine), checkpoints.b, "--json", "--timeout", 60)

    assert ended.code == 1
    error = ended.json["error"]
    assert "not today" in error["message"]
    assert (error["kind"], error["phase"]) == ("EngineRejected", "transfer")
    assert (error["engine"], error["engines"]) == (engine.url, [engine.url])
    assert sorted(error) == ERROR
    assert ended.json["engines"][engine.url]["state"] == "old"
    assert "Traceback" not in ended.err
    assert served(engine) == tokens_of(0)


def test_a_server_left_mixed_has_an_exit_code_of_its_own_and_the_next_push_heals_it(
    engine: ReferenceEngine, checkpoints: Checkpoints
) -> None:
    engine.inject(Fault(kit.UPDATE, "refuse", after=1, times=1))
    small = ("--bucket-bytes", 20_000, "--timeout", 60)

    failed = run("push", *servers(engine), checkpoints.b, *small)
    assert failed.code == 3
    assert f"{engine.url} mixed" in failed.err
    assert "paused" in failed.err
    assert "push again" in failed.err

    healed = run("push", *servers(engine), checkpoints.b, *small)
    assert healed.code == 0, healed.err
    assert served(engine) == tokens_of(1)


def test_without_the_check_the_engine_itself_refuses_a_wrong_shape(
    engine: ReferenceEngine, checkpoints: Checkpoints
) -> None:
    ended = run("push", *servers(engine), checkpoints.wide, "--no-check", "--timeout", 60)
    assert ended.code == 3
    assert "partially updated" in ended.err


# -- keys ---------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def locked() -> Any:
    with ReferenceEngine(kit.llama(0), api_key="open-sesame", admin_api_key="please") as engine:
        yield engine


RIGHT = {"WEIGHT_UPDATE_API_KEY": "open-sesame", "WEIGHT_UPDATE_ADMIN_API_KEY": "please"}


@pytest.mark.parametrize(
    "keys",
    [
        {},
        {"WEIGHT_UPDATE_API_KEY": "guessed-key"},
        {**RIGHT, "WEIGHT_UPDATE_ADMIN_API_KEY": "guessed-key"},
    ],
    ids=["none", "a wrong one", "a wrong admin key"],
)
def test_a_key_that_is_not_the_servers_is_refused_and_not_told(
    locked: ReferenceEngine, checkpoints: Checkpoints, keys: dict[str, str]
) -> None:
    ended = run("push", *servers(locked), checkpoints.b, "--timeout", 60, **keys)
    assert ended.code == 1
    assert "401" in ended.err
    assert "guessed-key" not in ended.out + ended.err


def test_keys_come_from_the_environment(locked: ReferenceEngine, checkpoints: Checkpoints) -> None:
    ended = run("push", *servers(locked), checkpoints.b, "--json", **RIGHT)
    assert ended.code == 0, ended.err
    assert not any(key in ended.out + ended.err for key in RIGHT.values())
    assert served(locked) == tokens_of(1)
