"""The benchmark really updates engines, and notices an engine that holds something else."""

from __future__ import annotations

import json
import subprocess
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.cli.kit import run
from weight_update.bench import receiver
from weight_update.bench.bare import BareBroadcasts
from weight_update.bench.loopback import LoopbackJobs, digests, engine_digests, run_loopback
from weight_update.bench.machine import PeakMemory
from weight_update.bench.models import ModelShape, change
from weight_update.reference_engine import ReferenceEngine

SMALL = LoopbackJobs(tensors=(21,), engines=(1, 2), nbytes=2_000_000, rounds=2)


def bench(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = Path(sys.executable).with_name("weight-update")
    return subprocess.run(
        [command, "bench", "loopback", *arguments],
        capture_output=True,
        text=True,
        timeout=170,
        check=False,
    )


@pytest.fixture(scope="module")
def rows() -> dict[str, Any]:
    return {row.job: row for row in run_loopback(SMALL, lambda _: None)}


def test_every_job_has_its_rows(rows: dict[str, Any]):
    assert list(rows) == [
        "planning 21 tensors",
        "21 tensors unchanged",
        "21 tensors, 1 engine",
        "21 tensors, 1 engine, against one broadcast a tensor",
        "21 tensors, 2 engines",
        "21 tensors, 2 engines, against one broadcast a tensor",
    ]


def test_updates_are_compared_bit_for_bit(rows: dict[str, Any]):
    moved = [row for job, row in rows.items() if "engine" in job]

    assert [row.correct for row in moved] == [True] * 4


def test_each_round_is_one_pair(rows: dict[str, Any]):
    assert all(len(rows[job].pairs) == SMALL.rounds for job in rows if "engine" in job)


def test_rows_say_what_was_run(rows: dict[str, Any]):
    data = rows["21 tensors, 2 engines"].to_dict()

    assert data["settings"]["engines"] == 2
    assert data["settings"]["tensors"] == 21
    assert data["versions"]["torch"] == torch.__version__
    assert data["machine"]["cores"] >= 1


def test_every_row_says_what_identifies_it(rows: dict[str, Any]):
    assert all({"machine", "versions", "settings"} <= set(row.to_dict()) for row in rows.values())


def test_a_receiver_that_does_not_come_is_an_error_and_none_is_left(monkeypatch):
    started = []
    real = subprocess.Popen

    def broken(command: list[str], **options: Any) -> subprocess.Popen[bytes]:
        started.append(real([sys.executable, "-c", "raise SystemExit('no torch')"], **options))
        return started[-1]

    monkeypatch.setattr(subprocess, "Popen", broken)
    monkeypatch.setattr(receiver, "_PATIENCE", timedelta(seconds=2))
    with pytest.raises(RuntimeError, match="no torch"), BareBroadcasts([torch.ones(1)], ["cpu"]):
        pass
    assert started[0].returncode is not None


def test_a_small_run_promises_nothing(rows: dict[str, Any]):
    assert all(rows[job].aim is None for job in rows if "engine" in job)


@pytest.mark.parametrize(
    ("tensors", "engines", "aims"),
    [
        (300, 1, (1.3, None)),
        (300, 2, (1.5, None)),
        (20_000, 1, (1.6, 1 / 3)),
        (20_000, 2, (2.0, 1 / 3)),
    ],
)
def test_the_documented_jobs_promise_their_ratios(
    tensors: int, engines: int, aims: tuple[float, float | None]
):
    assert LoopbackJobs().aims(tensors, engines) == aims


def test_an_engine_with_other_values_is_noticed():
    model = ModelShape(21, 200_000).build(torch.device("cpu"))
    with ReferenceEngine(model) as engine:
        assert engine_digests(engine.url) == digests(model)
        change(model)
        assert engine_digests(engine.url) != digests(model)


def test_peak_memory_is_that_of_what_was_held_and_let_go():
    peak = PeakMemory(torch.device("cpu"))
    held = torch.ones(32 << 20, dtype=torch.uint8)
    del held
    extra = peak.above()

    assert extra is None or extra > 30 << 20


@pytest.mark.timeout(300)
def test_with_json_standard_output_is_the_rows_and_nothing_else():
    done = bench(
        *("--tensors", "21", "--engines", "1", "--gigabytes", "0.001", "--rounds", "1", "--json")
    )

    assert done.returncode == 0, done.stderr
    assert [row["job"] for row in json.loads(done.stdout)][2] == "21 tensors, 1 engine"
    assert "first update" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--device", "tpu"), "neither cpu nor cuda"),
        (("--against", "somebody"), "there is torchrl"),
        (("--against", "torchrl"), "NCCL only"),
        (("--tensors", "3"), "at least 12 tensors"),
        (("--engines", "0"), "at least one engine"),
        (("--rounds", "0"), "rounds"),
    ],
)
def test_jobs_that_cannot_be_run_are_refused_at_once(arguments: tuple[str, ...], words: str):
    done = run("bench", "loopback", *arguments)

    assert done.code == 2
    assert words in done.err
