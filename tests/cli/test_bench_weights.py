"""``weight-update bench weights``: which jobs run, and how they are shown."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Iterator, Mapping
from typing import Any

import pytest

from weight_update.bench import weights
from weight_update.bench.rows import Pair, Row
from weight_update.cli.bench import WeightsJob

from .kit import run


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int, str]]:
    """The jobs that were run, none of them for real."""
    jobs: list[tuple[str, int, str]] = []

    def rows(job: str, how: weights.WeightsJobs, identity: Mapping[str, Any]) -> Iterator[Row]:
        jobs.append((job, how.rounds, how.device))
        seen = {"overlapped_seconds": 1.0, "gathering_seconds": 2.0}
        known = {"machine": identity["machine"], "copy_memory_bytes": 9_000_000, **seen}
        kept = job != "names"
        yield Row(
            f"the job {job}", "a copy", [Pair(1.0, 4.0)], 1.0 if kept else 0.1, identity=known
        )

    monkeypatch.setattr(weights, "_rows", rows)
    return jobs


def test_the_jobs_of_the_command_are_the_benchmarks() -> None:
    assert tuple(WeightsJob) == weights.JOBS


def test_without_a_choice_all_jobs_run(asked: list[tuple[str, int, str]]) -> None:
    assert run("bench", "weights").code == 0
    assert asked == [(job, 5, "cpu") for job in weights.JOBS]


def test_chosen_jobs_run_in_the_benchmarks_order(asked: list[tuple[str, int, str]]) -> None:
    run("bench", "weights", "--job", "names", "--job", "lora", "--rounds", "2")
    assert asked == [("lora", 2, "cpu"), ("names", 2, "cpu")]


@pytest.mark.usefixtures("asked")
def test_people_read_a_table_and_what_was_not_kept() -> None:
    ended = run("bench", "weights")
    assert "the job lora" in ended.out
    assert "0.25x" in ended.out
    assert "a copy took 9 MB above it" in ended.out
    assert "1.00 of 2.00 s of gathering passed while a bucket travelled" in ended.out
    assert "the job names: not kept: 0.25x of a copy, promised 0.10x" in ended.out
    assert "measuring" in ended.err


@pytest.mark.usefixtures("asked")
def test_with_json_standard_output_is_the_rows_and_nothing_else() -> None:
    rows = run("bench", "weights", "--json").json
    assert [row["job"] for row in rows] == [f"the job {job}" for job in weights.JOBS]
    assert [bool(row["failures"]) for row in rows] == [False, False, True]
    assert rows[0]["machine"]["cores"] >= 1


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--device", "tpu"], "neither cpu nor cuda"),
        (["--job", "everything"], "everything"),
        (["--rounds", "0"], "rounds"),
    ],
    ids=" ".join,
)
def test_what_cannot_be_run_is_refused_at_once(
    asked: list[tuple[str, int, str]], arguments: list[str], words: str
) -> None:
    ended = run("bench", "weights", *arguments)
    assert (ended.code, asked) == (2, [])
    assert words in ended.err


def test_the_job_lora_needs_peft(
    asked: list[tuple[str, int, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    found = importlib.util.find_spec
    monkeypatch.setattr(weights, "find_spec", lambda name: None if name == "peft" else found(name))
    ended = run("bench", "weights", "--job", "lora")
    assert (ended.code, asked) == (2, [])
    assert "peft is not installed" in ended.err
    assert run("bench", "weights", "--job", "names").code == 0


@pytest.fixture
def breaks_off(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second job fails."""

    def rows(job: str, _: weights.WeightsJobs, __: Mapping[str, Any]) -> Iterator[Row]:
        if job != weights.JOBS[0]:
            raise RuntimeError("the engine ended")
        yield Row(f"the job {job}", "a copy", [Pair(1.0, 4.0)])

    monkeypatch.setattr(weights, "_rows", rows)


@pytest.mark.usefixtures("breaks_off")
def test_rows_that_were_measured_are_shown_whatever_becomes_of_the_next() -> None:
    ended = run("bench", "weights")
    assert ended.code == 1
    assert "0.25x" in ended.out
    assert f"the job {weights.JOBS[0]}: 1.000 s, 0.25x of a copy" in ended.err
    assert "the benchmark failed: the engine ended" in ended.err


@pytest.mark.usefixtures("breaks_off")
def test_with_json_rows_that_were_measured_are_a_whole_list() -> None:
    ended = run("bench", "weights", "--json")
    assert ended.code == 1
    (row,) = json.loads(ended.out)
    assert row["ratio"] == 0.25
