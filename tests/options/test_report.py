"""The report: figures that agree with each other, readable and as plain JSON."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from typing import Any

import pytest

from weight_update.report import EngineOutcome, EngineState, Route, UpdateReport


def make_report(modes: tuple[Any, Any] = ("retract", "retract"), **more: Any) -> UpdateReport:
    a = EngineOutcome("http://a:1", EngineState.NEW, "3", paused=False)
    b = EngineOutcome(
        "http://b:1", EngineState.MIXED, None, paused=True, detail="weights new, cache stale"
    )
    engines = {o.url: replace(o, pause_mode=mode) for o, mode in zip((a, b), modes, strict=True)}
    facts = {
        "version": 3,
        "bytes": 4_000_000,
        "tensors": 21,
        "buckets": 2,
        "seconds": {"pause": 0.002, "transfer": 0.004, "paused": 0.01, "total": 0.012},
        "engines": engines,
    }
    return UpdateReport(**(facts | more))


def test_the_rate_is_bytes_over_the_seconds_of_the_transfer() -> None:
    assert make_report().gigabytes_per_second == 1.0


@pytest.mark.parametrize("seconds", [{}, {"transfer": 0.0}])
def test_the_rate_of_an_update_without_a_transfer_is_zero(seconds: dict[str, float]) -> None:
    assert make_report(seconds=seconds).gigabytes_per_second == 0.0


def test_a_report_reads_as_one_line_an_engine_and_one_a_warning() -> None:
    assert str(make_report(warnings=("the cache was not flushed",))).splitlines() == [
        "version 3: 21 tensors, 4.00 MB in 2 buckets, 1.00 GB/s, 12 ms, paused 10 ms "
        "(pause 2, transfer 4)",
        "  http://a:1 new (version 3)",
        "  http://b:1 mixed (version unknown, paused): weights new, cache stale",
        "  warning: the cache was not flushed",
    ]


def test_a_report_of_engines_that_differ_says_what_became_of_requests_on_each() -> None:
    report = make_report(("abort", "in_place"))
    assert str(report).splitlines()[-1] == (
        "  requests in flight: aborted on http://a:1, frozen on http://b:1"
    )
    assert report.pause_mode is report.in_flight is None
    assert UpdateReport.from_dict(report.to_dict()) == report


def test_a_report_counts_one_thing_in_the_singular() -> None:
    assert "1 tensor, 4.00 MB in 1 bucket," in make_report(tensors=1, buckets=1).headline


def test_a_route_without_a_bound_names_no_size_of_a_bucket() -> None:
    assert str(Route("request", "none", sys.maxsize)) == "by request"


def test_a_report_is_plain_json() -> None:
    made = make_report(warnings=("w",))

    plain = json.loads(json.dumps(made.to_dict()))

    assert plain == made.to_dict()
    assert plain["engines"]["http://b:1"] == {
        "url": "http://b:1",
        "state": "mixed",
        "version": None,
        "paused": True,
        "detail": "weights new, cache stale",
        "verified": "unverified",
        "pause_mode": "retract",
        "in_flight": "retracted",
    }
    assert plain["verification"] == "unverified"
    assert (plain["pause_mode"], plain["in_flight"]) == ("retract", "retracted")
    assert plain["warnings"] == ["w"]
    assert plain["gigabytes_per_second"] == 1.0


@pytest.mark.parametrize("state", list(EngineState))
def test_a_state_equals_and_prints_as_its_word(state: EngineState) -> None:
    assert state == state.value == str(state) == f"{state}"


@pytest.mark.parametrize(
    ("size", "text"),
    [(0, "0 B"), (999, "999 B"), (1000, "1.00 kB"), (5_250_000, "5.25 MB"), (16e9, "16.00 GB")],
)
def test_sizes_are_shown_in_decimal_units(size: int, text: str) -> None:
    assert f", {text} in" in str(make_report(bytes=size))


def test_one_bucket_is_not_called_buckets() -> None:
    assert "in 1 bucket," in str(make_report(buckets=1))
