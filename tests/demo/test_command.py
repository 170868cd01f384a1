"""The whole demo, short, against the reference engine."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.cli.kit import ERROR, run


def demo(directory: Path, *arguments: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "weight_update.cli", "demo", *arguments]
    return subprocess.run(
        command, cwd=directory, capture_output=True, text=True, timeout=360, check=False
    )


def report(directory: Path) -> dict[str, Any]:
    made: dict[str, Any] = json.loads((directory / "demo-report.json").read_text())
    return made


def test_a_short_run_learns_and_proves_it(tmp_path: Path) -> None:
    ended = demo(tmp_path, "--steps", "16")
    assert ended.returncode == 0, ended.stdout + ended.stderr
    made = report(tmp_path)
    assert made["tokens_equal"] is True
    assert (made["requests_lost"], made["updates"]) == (0, 16)
    assert made["reward_last"] > made["reward_first"] + 0.3
    assert made["reward_control"] < 0.2
    assert made["engine"].startswith("reference 0.")
    assert made["requests_carried"] > 0
    assert "claims proven" in ended.stdout


def test_without_pushes_nothing_is_proven(tmp_path: Path) -> None:
    ended = demo(tmp_path, "--steps", "3", "--no-push")
    assert ended.returncode == 1, ended.stdout + ended.stderr
    assert "NOT PROVEN" in ended.stdout
    made = report(tmp_path)
    assert (made["proven"], made["tokens_equal"], made["updates"]) == (False, False, 0)
    assert made["requests_lost"] == 0


def test_a_missing_engine_is_no_success(tmp_path: Path) -> None:
    (tmp_path / "demo-report.json").write_text('{"proven": true}')
    ended = demo(tmp_path, "--engine", "sglang")
    assert ended.returncode == 1
    assert "nothing was proven" in ended.stdout
    made = report(tmp_path)
    assert made["proven"] is False
    assert sorted(made["error"]) == ERROR


@pytest.mark.parametrize(
    "arguments", [["--steps", "0"], ["--engine", "vllm"], ["--report", "no/such/folder/x.json"]]
)
def test_wrong_arguments_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run("demo", *arguments).code == 2
