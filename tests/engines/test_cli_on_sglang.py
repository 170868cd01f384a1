"""The command line against the real server."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import requests
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

from weight_update.cli.main import app

from .models import SEED_A, SEED_B, TinyModels, greedy, tiny_llama
from .sglang_server import SGLangServer

PROMPT = [3, 14, 15, 92, 65]
SECONDS = 120.0


def run(*arguments: object) -> Any:
    return CliRunner().invoke(app, [str(each) for each in arguments], catch_exceptions=False)


def checksums(server: SGLangServer) -> Any:
    answer = requests.get(f"{server.url}/weights_checker", timeout=SECONDS)
    return answer.json()["per_engine_checksum"]


def is_ready(server: SGLangServer) -> bool:
    return requests.get(f"{server.url}/ready", timeout=SECONDS).status_code == 200


def test_a_pushed_checkpoint_generates_what_transformers_does(
    sglang_at_a: SGLangServer, tmp_path: Path
) -> None:
    tiny_llama(SEED_B).save_pretrained(tmp_path, max_shard_size="100KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    assert sglang_at_a.generate(PROMPT, 24) == greedy(tiny_llama(SEED_A), PROMPT, 24)

    ended = run("push", "--server", sglang_at_a.url, tmp_path, "--bucket-bytes", 20_000)

    assert ended.exit_code == 0, ended.stderr
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert sglang_at_a.generate(PROMPT, 24) == greedy(loaded, PROMPT, 24)
    assert f"{sglang_at_a.url} new (version {sglang_at_a.label()})" in ended.stdout


@pytest.mark.parametrize("command", ["doctor", "a dry run"])
def test_a_diagnosis_changes_nothing_on_the_server(
    sglang_at_a: SGLangServer, tiny_models: TinyModels, command: str
) -> None:
    before = (sglang_at_a.label(), checksums(sglang_at_a))
    server = ("--server", sglang_at_a.url)

    if command == "doctor":
        ended = run("doctor", *server, "--checkpoint", tiny_models.b)
    else:
        ended = run("push", *server, tiny_models.b, "--dry-run")

    assert ended.exit_code == 0, ended.stdout + ended.stderr
    assert (sglang_at_a.label(), checksums(sglang_at_a)) == before
    assert is_ready(sglang_at_a)
    assert sglang_at_a.generate(PROMPT, 24) == greedy(tiny_llama(SEED_A), PROMPT, 24)


def test_a_diagnosis_describes_the_server(
    sglang_at_a: SGLangServer, tiny_models: TinyModels
) -> None:

    ended = run("doctor", "--server", sglang_at_a.url, "--checkpoint", tiny_models.b, "--json")

    diagnosis = json.loads(ended.stdout)
    assert (diagnosis["ok"], diagnosis["problems"]) == (True, [])
    (server,) = diagnosis["servers"]
    expected = {"release": "0.5.23", "dtype": "float32", "ranks": 1, "sessions": True}
    assert {name: server[name] for name in expected} == expected
    assert not [what for what in server["unknown"] if "weights" in what]


def test_names_that_the_server_does_not_have_are_found_without_a_push(
    sglang_at_a: SGLangServer, tmp_path: Path
) -> None:

    weights = {f"policy.{name}": value for name, value in tiny_llama(SEED_B).state_dict().items()}
    save_file(weights, tmp_path / "model.safetensors")

    refused = run("push", "--server", sglang_at_a.url, tmp_path)

    assert refused.exit_code == 1
    assert "21 weight(s) of the checkpoint are not the server's" in refused.stderr
    assert sglang_at_a.generate(PROMPT, 24) == greedy(tiny_llama(SEED_A), PROMPT, 24)
