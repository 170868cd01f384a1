"""Measuring the link to a real server leaves its weights, its label and its service alone."""

from __future__ import annotations

import json
from typing import Any

import requests
from typer.testing import CliRunner

from weight_update.cli.main import app

from .models import SEED_A, greedy, tiny_llama
from .served import PROMPT
from .sglang_server import SGLangServer

SECONDS = 120.0


def seen(server: SGLangServer) -> tuple[Any, Any, bool]:
    """Digests, label, and whether it generates."""
    digests = requests.get(f"{server.url}/weights_checker", timeout=SECONDS).json()
    ready = requests.get(f"{server.url}/ready", timeout=SECONDS).status_code == 200
    return digests["per_engine_checksum"], server.label(), ready


def test_a_measured_server_holds_what_it_held_and_goes_on(sglang_at_a: SGLangServer) -> None:
    before = seen(sglang_at_a)
    arguments = ["bench", "link", "--server", sglang_at_a.url, "--gigabytes", "0.02"]

    ended = CliRunner().invoke(app, [*arguments, "--rounds", "1", "--json"])

    assert ended.exit_code == 0, ended.stderr
    rows = json.loads(ended.stdout)
    assert rows[0]["job"] == "as update_weights() divides it"
    assert all(row["bytes"] == 20_000_000 and row["request_seconds"] > 0 for row in rows)
    print(*((row["job"], row["seconds"], row["limit_seconds"]) for row in rows), sep="\n")
    print("a request costs", rows[0]["request_seconds"])
    assert seen(sglang_at_a) == before
    assert before[2]
    assert sglang_at_a.generate(PROMPT, 8) == greedy(tiny_llama(SEED_A), PROMPT, 8)
