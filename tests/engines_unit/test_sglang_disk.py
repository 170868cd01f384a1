"""What a server is told of a folder, what its answers mean, and what stands beside weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest

from weight_update.engines.model_folder import folder_of, link_rest, read_config
from weight_update.engines.sglang.client import SGLangClient
from weight_update.engines.sglang.disk import SGLangDiskSession
from weight_update.engines.sglang.facts import digests_of, first_row_of, model_of
from weight_update.errors import Applied, EngineRejected
from weight_update.options import HttpOptions
from weight_update.transports.folders import VersionFolders
from weight_update.waiting import Deadline
from weight_update.weights.buckets import Bucket
from weight_update.weights.cargo import Cargo

LOAD = "/update_weights_from_disk"
BEGAN = "Succeeded to update model weights."
LOADED = "Weights were updated, but the cache was not flushed because requests are still running"
NOT_BEGUN = "Failed to get weights iterator: Cannot find any model weights with `/x`."
HALF_WAY = "Failed to update weights: size mismatch.\nRolling back to original weights."
LLAMA = ["LlamaForCausalLM"]


def load(server: Any, folder: Path, model_path: Any = None, *, flush: bool = False) -> None:
    session = SGLangDiskSession(SGLangClient(server.url, HttpOptions()), model_path)
    assert session.open(Deadline(5.0)) is False
    cargo = Cargo(folder=folder)
    session.apply(Bucket(()), cargo, group_name="none", flush=flush, deadline=Deadline(5.0))
    session.close(Deadline(5.0))


@pytest.mark.parametrize("flush", [True, False])
def test_a_server_is_told_the_folder_and_nothing_that_aborts_or_labels(
    server: Any, tmp_path: Path, flush: bool
) -> None:
    load(server, tmp_path, flush=flush)
    (asked,) = server.asked
    assert (asked.method, asked.path) == ("POST", LOAD)
    assert asked.body == {
        "model_path": str(tmp_path),
        "load_format": "auto",
        "flush_cache": flush,
        "abort_all_requests": False,
    }


@pytest.mark.parametrize(
    ("text", "applied"),
    [
        (NOT_BEGUN, "nothing"),
        ("Failed to get model loader: <DummyModelLoader>.", "nothing"),
        ("Online weight updates are not supported while ...", "nothing"),
        (HALF_WAY, "partly"),
        (LOADED, "all"),
        ("what nobody knows", "unknown"),
        # Replicas; the second and the last were seen on 0.5.23.
        (f"{BEGAN} | {NOT_BEGUN}", "partly"),
        (f"{NOT_BEGUN} | {NOT_BEGUN}", "nothing"),
        (f"{NOT_BEGUN} | {HALF_WAY}", "partly"),
        (f"{LOADED} | {NOT_BEGUN}", "partly"),
        (f"{BEGAN} | {LOADED}", "all"),
    ],
)
def test_what_a_refused_load_left_is_told_from_the_words_of_each_replica(
    server: Any, answer: Any, tmp_path: Path, text: str, applied: Applied
) -> None:
    server.answers[LOAD] = answer(400, {"success": False, "message": text})
    with pytest.raises(EngineRejected) as caught:
        load(server, tmp_path)
    assert caught.value.applied == applied
    assert text.split("\n", maxsplit=1)[0] in caught.value.message


@pytest.mark.parametrize(
    ("status", "body", "applied"),
    [
        (400, {"object": "error", "message": "1 validation errors"}, "nothing"),
        (401, {"error": "Unauthorized"}, "nothing"),
        (404, {"detail": "Not Found"}, "nothing"),
        (404, "<html>Not Found</html>", "unknown"),
        (500, "Internal Server Error", "unknown"),
        (502, {"error": "Bad Gateway"}, "unknown"),
        (200, {"success": False}, "unknown"),
        (200, "", "unknown"),
        (200, [], "unknown"),
    ],
)
def test_an_answer_that_is_no_loaders_says_what_it_can(
    server: Any, answer: Any, tmp_path: Path, status: int, body: Any, applied: Applied
) -> None:
    server.answers[LOAD] = answer(status, body)
    with pytest.raises(EngineRejected) as caught:
        load(server, tmp_path)
    assert caught.value.applied == applied


def test_a_folder_that_cannot_be_read_is_told_with_a_way_out(
    server: Any, answer: Any, tmp_path: Path
) -> None:
    server.answers[LOAD] = answer(400, {"success": False, "message": NOT_BEGUN})
    with pytest.raises(EngineRejected) as caught:
        load(server, tmp_path)
    assert str(tmp_path) in caught.value.remedy
    assert "directory=" in caught.value.remedy


# -- what stands beside weights ------------------------------------------------------------


@pytest.fixture
def served(tmp_path: Path) -> Path:
    folder = tmp_path / "served"
    (folder / "nested").mkdir(parents=True)
    beside = ("config.json", "tokenizer.json", "chat_template.jinja", "modeling_x.py")
    weights = ("model.safetensors", "model.safetensors.index.json", "x.bin", ".hidden")
    for name in (*beside, *weights):
        (folder / name).write_text("{}")
    (folder / "config.json").write_text(json.dumps({"architectures": LLAMA}))
    return folder


def test_what_a_model_has_beside_its_weights_appears_in_the_new_folder(
    server: Any, tmp_path: Path, served: Path
) -> None:
    new = tmp_path / "new"
    new.mkdir()
    load(server, new, str(served))
    load(server, new, str(served))  # another engine of the fleet
    assert sorted(file.name for file in new.iterdir()) == [
        *("chat_template.jinja", "config.json", "modeling_x.py", "tokenizer.json")
    ]
    assert read_config(str(new)) == {"architectures": LLAMA}


def test_links_lead_to_the_files_themselves_and_not_from_version_to_version(
    tmp_path: Path, served: Path
) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    for folder, source in ((first, served), (second, first)):
        folder.mkdir()
        link_rest(str(source), folder)
    assert (second / "config.json").readlink() == served / "config.json"


@pytest.mark.parametrize("path", [None, "org/model", "/nowhere", 5])
def test_a_model_that_cannot_be_read_here_brings_nothing(tmp_path: Path, path: Any) -> None:
    link_rest(path, tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_the_path_of_a_model_is_what_the_server_shows_now(served: Path) -> None:
    info, model = {"model_path": "/start"}, {"model_path": "/now", "tokenizer_path": str(served)}
    assert folder_of(info, {**model, "architectures": LLAMA}) == "/now"
    assert folder_of(info, {}) == "/start"
    assert folder_of({}, {}) is None


def pushed(architectures: list[str], tokenizer: Path, tmp_path: Path) -> tuple[str, Any]:
    path = f"{tmp_path}/weight-update-host-5-{uuid4().hex}/version-{uuid4().hex}"
    model = {"architectures": architectures, "tokenizer_path": str(tokenizer)}
    return path, folder_of({}, {**model, "model_path": path})


def test_once_a_pushed_folder_is_gone_the_one_that_the_server_started_from_is_looked_at(
    served: Path, tmp_path: Path
) -> None:
    assert pushed(LLAMA, served, tmp_path)[1] == str(served)


def test_the_tokenizer_of_another_model_tells_nothing(served: Path, tmp_path: Path) -> None:
    path, found = pushed(["Qwen2ForCausalLM"], served, tmp_path)
    assert found == path


def test_folders_that_senders_write_are_known_by_their_names(tmp_path: Path, served: Path) -> None:
    folders = VersionFolders(tmp_path)
    with folders.written(1) as (_, place):
        pass
    folders.close()
    model = {"architectures": LLAMA, "tokenizer_path": str(served), "model_path": str(place)}
    assert folder_of({}, model) == str(served)


# -- replicas and stages -------------------------------------------------------------------

INFO = {"version": "0.5.23", "tp_size": 1, "dtype": "float32", "device": "cpu"}


def test_the_values_of_all_replicas_are_compared() -> None:
    assert first_row_of([[[0.5, 1.0]], [[0.5, 1.0]]], replicas=2) == (0.5, 1.0)
    row = first_row_of([[[0.5, 1.0]], [[0.5, 2.0]]], replicas=2)
    assert row is not None
    assert all(value != value for value in row)  # noqa: PLR0124 - equal to nothing


@pytest.mark.parametrize("body", [[[0.5, 1.0]], [[[0.5]], None], {"error": {}}, None])
def test_an_answer_that_lacks_a_replica_proves_nothing(body: Any) -> None:
    row = first_row_of(body, replicas=2)
    assert row is None or row[0] != row[0]


def test_digests_of_replicas_are_in_order_however_they_answer() -> None:
    rows = [
        {"checksums": {"x": str(rank)}, "parallelism_info": [{"dp_rank": rank, "tp_rank": 0}]}
        for rank in (2, 0, 1)
    ]
    found = digests_of({"ranks": rows})
    assert found is not None
    assert [rank["x"] for rank in found.ranks] == ["0", "1", "2"]


def test_servers_of_other_numbers_of_replicas_are_not_compared() -> None:
    layouts = {
        model_of({**INFO, **more}, {"architectures": LLAMA}).layout
        for more in ({"dp_size": 1}, {"dp_size": 2}, {"dp_size": 3})
    }
    assert len(layouts) == 3


def test_of_pipeline_stages_nothing_is_compared() -> None:
    """Only the first answers: the names and the values of the others are not known."""
    model = model_of({**INFO, "pp_size": 2}, {"architectures": LLAMA})
    assert (model.layout, model.plain, model.names_known) == (None, False, False)
