"""The benchmark of slow answers delays every one of them, and compares what engines hold."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pytest
import requests

from tests.cli.kit import run
from weight_update.bench import fleet
from weight_update.bench.fleet import FleetJobs, Trace, run_fleet
from weight_update.bench.models import ModelShape
from weight_update.reference_engine import ReferenceEngine

LATENCY = 0.02
SMALL = FleetJobs(engines=(1, 2), latency=LATENCY, nbytes=200_000, rounds=2)
# What a connected sender asks of an engine in one update, beside the looks at it.
ASKED_IN_TURN = [
    "/pause_generation",
    "/begin_weight_update",
    "/update_weights_from_distributed",
    "/end_weight_update",
    "/weights_checker",
    "/update_weight_version",
    "/continue_generation",
]
LOOKS = 3


@pytest.fixture(scope="module")
def rows() -> list[dict[str, Any]]:
    return [row.to_dict() for row in run_fleet(SMALL, lambda _: None)]


def test_each_number_of_engines_has_a_row(rows: list[dict[str, Any]]):
    assert [row["job"] for row in rows] == [
        "1 engine, 20 ms on every answer",
        "2 engines, 20 ms on every answer",
    ]
    assert [row["settings"]["engines"] for row in rows] == [1, 2]


def test_each_round_is_compared_with_one_engine_of_the_same_round(rows: list[dict[str, Any]]):
    assert [row["limit"] for row in rows] == ["its answers' latency", "1 engine"]
    assert [len(row["ratios"]) for row in rows] == [SMALL.rounds] * 2


def test_the_values_of_all_engines_are_compared(rows: list[dict[str, Any]]):
    assert [row["correct"] for row in rows] == [True, True]


def test_rows_say_what_was_asked_and_what_it_cost(rows: list[dict[str, Any]]):
    for row in rows:
        assert set(row["cpu_seconds"]) == {"trainer", "engines"}
        assert {"machine", "versions", "seconds_by_phase"} <= set(row)


def test_an_update_asks_nothing_twice_and_waits_for_no_answer_that_it_does_not_need(
    rows: list[dict[str, Any]],
):
    """A round trip that somebody adds costs every user one: it has to be added here."""
    for row in rows:
        looks = ("/model_info", "/server_info", "/ready")
        assert [path for path in row["requests"] if path not in looks] == ASKED_IN_TURN
        assert row["requests"].count("/server_info") == LOOKS
        assert row["requests"].count("/ready") == 1
        # One look goes beside the stamp. Where a machine is busy, calls that go side by side may
        # come one after the other all the same.
        least = len(ASKED_IN_TURN) + LOOKS - 1
        assert least <= row["round_trips"] <= len(row["requests"])


def test_an_engine_that_holds_something_else_is_noticed(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(fleet, "engine_digests", lambda url: {"lies": url})

    (row,) = run_fleet(FleetJobs((1,), 0.001, 200_000, rounds=1), lambda _: None)

    assert row.correct is False
    assert row.failures


def test_sixteen_engines_are_promised_to_take_little_longer_than_one():
    assert FleetJobs().aim(16) == 1.3
    assert FleetJobs().aim(1) is None
    assert FleetJobs(latency=0.001).aim(16) is None


def test_requests_that_were_out_at_the_same_time_are_one_round_trip():
    times = [("/a", 0.0, 1.0), ("/b", 0.5, 1.5), ("/c", 1.2, 2.0), ("/d", 2.1, 2.2)]

    trace = Trace.of([{"path": path, "t0": t0, "t1": t1} for path, t0, t1 in times])

    assert trace == Trace(("/a", "/b", "/c", "/d"), trips=3)


@pytest.fixture(scope="module")
def slow() -> Iterator[ReferenceEngine]:
    model = ModelShape(12, 100_000).build(fleet.torch.device("cpu"))
    with ReferenceEngine(model, answer_delay=0.3) as engine:
        yield engine


@pytest.mark.parametrize("path", ["/model_info", "/no_such_route", "/ready"])
def test_every_answer_leaves_later_whatever_it_says(slow: ReferenceEngine, path: str):
    start = time.perf_counter()
    requests.get(slow.url + path, timeout=60)
    assert time.perf_counter() - start >= 0.3


def test_the_command_writes_rows_as_json():
    small = ["--engines", "1", "--rounds", "1", "--latency", "0.01", "--megabytes", "0.2"]

    done = run("bench", "fleet", *small, "--json")

    assert done.code == 0, done.err
    assert [row["round_trips"] > 0 for row in done.json] == [True]


def test_no_engine_at_all_is_a_wrong_argument():
    done = run("bench", "fleet", "--engines", "0")

    assert done.code == 2
    assert "at least one engine" in done.err
