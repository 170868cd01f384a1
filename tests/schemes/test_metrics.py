"""The numbers of an update: their names, their units, and what stands for staleness."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.schemes.told import report_of
from weight_update.delivery.metrics import Standing, metrics_of
from weight_update.schemes.loggers import History, Start


def short(metrics: dict[str, float]) -> dict[str, float]:
    """Without the prefix, which all names have."""
    assert all(name.startswith("weight_update/") for name in metrics)
    return {name.removeprefix("weight_update/"): value for name, value in metrics.items()}


def test_a_report_by_itself_has_its_costs_and_its_engines() -> None:
    report = report_of(7, ["new", "new"], warnings=("slow",))

    assert short(metrics_of(report)) == {
        "version": 7.0,
        "bytes": 2e9,
        "tensors": 291.0,
        "buckets": 3.0,
        "gigabytes_per_second": 4.0,  # 2e9 bytes in half a second
        "seconds/pause": 0.25,
        "seconds/transfer": 0.5,
        "seconds/paused": 0.75,
        "seconds/total": 1.0,
        "engines/new": 2.0,
        "engines/old": 0.0,
        "engines/mixed": 0.0,
        "engines/unreachable": 0.0,
        "engines/paused": 0.0,
        "staleness/versions": 0.0,
        "warnings": 1.0,
    }


def test_with_a_standing_there_are_counts_and_ages() -> None:
    standing = Standing(4, 2, False, due=7, served_seconds=1.5, replaced_seconds=20.0)

    found = short(metrics_of(report_of(7), standing))

    assert found["updates"] == 4.0
    assert found["failures"] == 2.0
    assert found["staleness/seconds"] == 1.5
    assert found["staleness/replaced_seconds"] == 20.0
    assert "failed_seconds" not in found


def test_a_failed_update_has_no_costs_that_would_spoil_those_of_others() -> None:
    standing = Standing(1, 1, True, due=2, served_seconds=60.0)

    found = short(metrics_of(report_of(1, ["old", "mixed"], ["1", "1"]), standing))

    assert found == {
        "version": 1.0,
        "updates": 1.0,
        "failures": 1.0,
        "failed_seconds": 1.0,
        "engines/new": 0.0,
        "engines/old": 1.0,
        "engines/mixed": 1.0,
        "engines/unreachable": 0.0,
        "engines/paused": 1.0,
        "staleness/seconds": 60.0,
        "staleness/versions": 1.0,
    }


@pytest.mark.parametrize(
    ("version", "labels", "due", "behind"),
    [
        (5, ["5", "5"], 5, 0.0),
        (5, ["5", "3"], 5, 2.0),  # a quorum left one out
        (5, ["5", "5"], 6, 1.0),  # the update failed
        (1, ["default"], 1, 1.0),  # no update of ours reached it
        (5, ["5", None], 5, 0.0),  # nobody knows what it serves
        (5, [None], 5, None),
        (2, ["9"], 2, 0.0),  # another trainer's
    ],
)
def test_versions_behind_are_those_of_the_engine_that_is_furthest_behind(
    version: int, labels: list[str | None], due: int, behind: float | None
) -> None:
    report = report_of(version, ["new"] * len(labels), labels)

    found = short(metrics_of(report, Standing(1, 0, False, due)))

    assert found.get("staleness/versions") == behind


def test_every_number_is_a_float_whatever_it_counts() -> None:
    metrics = metrics_of(report_of(3), Standing(1, 0, False, 3, 1, 1))

    assert {type(value) for value in metrics.values()} == {float}


@pytest.mark.parametrize("group", ["seconds", "engines", "staleness"])
def test_names_are_grouped_by_slashes(group: str) -> None:
    metrics = metrics_of(report_of(3), Standing(1, 0, False, 3, 1.0, 1.0))

    assert sum(name.startswith(f"weight_update/{group}/") for name in metrics) >= 2
    # TorchRL's W&B logger keeps names that end so for itself.
    assert not any(name.endswith("step") for name in metrics)


def ages(standing: Standing) -> tuple[Any, ...]:
    return (standing.updates, standing.failures, standing.served_seconds, standing.replaced_seconds)


def test_weights_age_from_the_call_that_took_them_until_others_replace_them() -> None:
    history = History()

    first = history.note(report_of(1), Start(0, taken=10.0), now=12.0, failed=False)
    second = history.note(report_of(2), Start(1, taken=50.0), now=53.0, failed=False)

    assert ages(first) == (1, 0, 2.0, None)
    assert ages(second) == (2, 0, 3.0, 43.0)


def test_weights_go_on_ageing_while_updates_fail() -> None:
    history = History()
    history.note(report_of(1), Start(0, taken=10.0), now=12.0, failed=False)

    once = history.note(report_of(1, ["old"]), Start(1, 50.0), now=55.0, failed=True)
    again = history.note(report_of(1, ["old"]), Start(1, 60.0), now=65.0, failed=True)
    healed = history.note(report_of(2), Start(1, 70.0), now=71.0, failed=False)

    assert ages(once) == (1, 1, 45.0, None)
    assert ages(again) == (1, 2, 55.0, None)
    assert ages(healed) == (2, 2, 1.0, 61.0)
    assert (once.due, again.due, healed.due) == (2, 2, 2)


def test_an_update_that_only_could_not_resume_brought_its_weights() -> None:
    history = History()
    history.note(report_of(1), Start(0, 10.0), now=12.0, failed=False)

    failed = history.note(report_of(2), Start(1, 50.0), now=55.0, failed=True)

    assert failed.failed
    assert (failed.due, failed.served_seconds, failed.replaced_seconds) == (2, 5.0, 45.0)


def test_a_resumed_run_that_fails_first_brought_nothing() -> None:
    standing = History().note(report_of(40), Start(40, 0.0), now=1.0, failed=True)

    assert (standing.due, standing.served_seconds) == (41, None)


def test_the_page_names_every_number() -> None:
    page = (Path(__file__).parents[2] / "docs" / "logging.md").read_text()
    phases = "`plan`, `connect`, `pause`, `drain`, `begin`, `transfer`, `end`, `flush`, `verify`"
    assert phases in page
    found = {
        *short(metrics_of(report_of(1), Standing(1, 0, False, 1, 1.0, 1.0))),
        *short(metrics_of(report_of(1), Standing(1, 1, True, 2, 1.0))),
    }

    for name in found - {"seconds/pause", "seconds/transfer"}:
        group, _, last = name.rpartition("/")
        assert f"`{name}`" in page or (group == "engines" and f"`{last}`" in page), name
