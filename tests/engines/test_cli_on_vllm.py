"""The command line against the real vLLM, alone and beside an engine of SGLang's protocol."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from weight_update.cli.main import app
from weight_update.reference_engine import ReferenceEngine

from .models import SEED_B, greedy
from .vllm_pushes import PROMPT, TOKENS, serves
from .vllm_server import VLLMServer, vllm_llama


def run(*arguments: object) -> Any:
    return CliRunner().invoke(app, [str(each) for each in arguments], catch_exceptions=False)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Model B, in several shards."""
    folder = tmp_path_factory.mktemp("b")
    vllm_llama(SEED_B).save_pretrained(folder, max_shard_size="200KB")
    assert len(list(folder.glob("*.safetensors"))) > 1
    return folder


@pytest.mark.parametrize("transport", ["broadcast", "ipc"])
def test_a_pushed_checkpoint_generates_what_transformers_does(
    vllm: VLLMServer, checkpoint: Path, transport: str
) -> None:
    assert not serves(vllm, SEED_B)
    ended = run("push", "--server", vllm.url, checkpoint, "--transport", transport)
    assert ended.exit_code == 0, ended.stderr
    assert serves(vllm, SEED_B)
    assert f"{vllm.url} new (version {vllm.label()})" in ended.stdout
    assert f"{vllm.url} is vLLM: /v1/models" in ended.stderr


def test_a_mixed_set_gets_one_update_and_one_version(vllm: VLLMServer, checkpoint: Path) -> None:
    with ReferenceEngine(vllm_llama()) as other:
        ended = run("push", "--server", other.url, "--server", vllm.url, checkpoint, "--json")
        assert ended.exit_code == 0, ended.stderr
        report = json.loads(ended.stdout)
        told = other.generate(PROMPT, max_new_tokens=TOKENS)["output_ids"]
        assert told == greedy(vllm_llama(SEED_B), PROMPT, TOKENS)
    assert serves(vllm, SEED_B)
    versions = {url: engine["version"] for url, engine in report["engines"].items()}
    assert versions == dict.fromkeys((other.url, vllm.url), vllm.label())


def test_a_diagnosis_describes_the_server_and_changes_nothing(
    vllm: VLLMServer, checkpoint: Path
) -> None:
    before = (vllm.label(), vllm.generate(PROMPT, TOKENS))

    ended = run("doctor", "--server", vllm.url, "--checkpoint", checkpoint, "--json")
    rehearsed = run("push", "--server", vllm.url, checkpoint, "--dry-run")

    assert (ended.exit_code, rehearsed.exit_code) == (0, 0), ended.stdout + rehearsed.stdout
    (server,) = json.loads(ended.stdout)["servers"]
    expected = {
        "service": "vllm",
        "release": "0.32.0",
        "dtype": "float32",
        "device": "cpu",
        "backend": "weight_update_gloo",
        "ranks": 1,
        "paused": False,
        "warnings": [],
    }
    assert {name: server[name] for name in expected} == expected
    assert not [what for what in server["unknown"] if "weights" in what]
    assert (vllm.label(), vllm.generate(PROMPT, TOKENS)) == before


def test_a_server_that_is_only_paused_is_warned_of(vllm: VLLMServer) -> None:
    vllm.post("pause?mode=keep", {})
    ended = run("doctor", "--server", vllm.url, "--json")
    vllm.post("resume", {})
    assert ended.exit_code == 0
    (server,) = json.loads(ended.stdout)["servers"]
    assert [warning["what"].partition(":")[0] for warning in server["warnings"]] == ["it is paused"]


def test_names_that_the_server_does_not_have_are_found_without_a_push(
    vllm: VLLMServer, tmp_path: Path
) -> None:
    from safetensors.torch import save_file

    weights = {f"policy.{name}": value for name, value in vllm_llama(SEED_B).state_dict().items()}
    save_file(weights, tmp_path / "model.safetensors")
    label = vllm.label()

    refused = run("push", "--server", vllm.url, tmp_path)

    assert refused.exit_code == 1
    assert "of the checkpoint are not the server's" in refused.stderr
    assert vllm.label() == label
