"""``weight-update bench gpu``: which jobs run, and what is refused."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.kit import run
from weight_update.bench.gpu import JOBS
from weight_update.cli.bench_gpu import GpuJob

COMMAND = Path(sys.executable).with_name("weight-update")


def bench(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [COMMAND, "bench", "gpu", *arguments],
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )


def test_the_jobs_of_the_command_are_the_benchmarks():
    assert tuple(GpuJob) == JOBS


@pytest.mark.timeout(300)
def test_with_json_standard_output_is_the_rows_and_nothing_else():
    done = bench(
        *("--device", "cpu", "--shrink", "32", "--layers", "1", "--rounds", "1"),
        *("--gpus", "2", "--job", "llama", "--json"),
    )

    assert done.returncode == 0, done.stderr
    transfer, whole, against = json.loads(done.stdout)
    assert transfer["seconds_by_phase"]["transfer"] == transfer["seconds"]
    assert whole["route"].startswith("by broadcast over gloo")
    assert against["limit"] == "TorchRL's settings"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--device", "cpu", "--job", "moe"), "not one of --gpus 1"),
        (("--device", "cpu", "--gpus", "2", "--job", "ipc"), "not one of --gpus 2"),
        (("--device", "tpu"), "neither cpu nor cuda"),
        (("--gpus", "3"), "gpus"),
        (("--rounds", "0"), "rounds"),
        (("--job", "everything"), "everything"),
    ],
)
def test_jobs_that_cannot_be_run_are_refused_at_once(arguments: tuple[str, ...], words: str):
    done = run("bench", "gpu", *arguments)

    assert done.code == 2
    assert words in done.err
