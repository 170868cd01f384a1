"""A row quotes one round, and says which promises it does not keep."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weight_update.bench.rows import Pair, Row, median_pair

SECONDS = st.floats(0.001, 1000)
PAIRS = st.lists(st.builds(Pair, SECONDS, SECONDS), min_size=1, max_size=9)


@given(PAIRS)
def test_the_median_is_a_round_that_was_measured(pairs: list[Pair]):
    median = median_pair(pairs)

    faster = [pair for pair in pairs if pair.ratio < median.ratio]
    slower = [pair for pair in pairs if pair.ratio > median.ratio]
    assert median in pairs
    assert len(faster) <= len(pairs) / 2
    assert len(slower) <= len(pairs) / 2


@given(PAIRS)
def test_the_ratio_of_the_json_row_is_its_seconds_over_its_limit(pairs: list[Pair]):
    data = Row("a job", "a limit", pairs).to_dict()

    assert data["ratio"] == data["seconds"] / data["limit_seconds"]
    assert len(data["ratios"]) == len(pairs)


def test_a_json_row_has_the_documented_fields():
    row = Row("a job", "a limit", [Pair(1.0, 2.0)], identity={"machine": {"cores": 2}})

    assert json.loads(json.dumps(row.to_dict())) == {
        "job": "a job",
        "limit": "a limit",
        "aim": None,
        "seconds": 1.0,
        "limit_seconds": 2.0,
        "ratio": 0.5,
        "ratios": [0.5],
        "extra_memory_bytes": None,
        "engine_memory_bytes": None,
        "allowed_memory_bytes": None,
        "correct": None,
        "failures": [],
        "machine": {"cores": 2},
    }


@pytest.mark.parametrize(
    ("facts", "failure"),
    [
        ({"correct": False}, "other values"),
        ({"aim": 1.5}, "2.00x of a limit, promised 1.50x"),
        ({"extra_memory_bytes": 3_000_000, "allowed_memory_bytes": 2_000_000}, "3 MB above"),
        ({"correct": True, "aim": 2.0}, None),
        ({"extra_memory_bytes": 3, "allowed_memory_bytes": 3}, None),
        ({"extra_memory_bytes": None, "allowed_memory_bytes": 3}, None),
        ({}, None),
    ],
)
def test_a_promise_that_was_not_kept_is_named(facts: dict[str, Any], failure: str | None):
    failures = Row("a job", "a limit", [Pair(2.0, 1.0)], **facts).failures

    if failure is None:
        assert failures == []
    else:
        assert len(failures) == 1
        assert failure in failures[0]
