"""What a progress hook is told, and that no hook can spoil an update."""

from __future__ import annotations

import importlib.util
import logging
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from weight_update import WeightUpdateError
from weight_update.report import Progress

_spec = importlib.util.spec_from_file_location("fakes", Path(__file__).parent / "fakes.py")
assert _spec is not None
assert _spec.loader is not None
fakes = sys.modules["fakes"] = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(fakes)

PHASES = ["plan", "connect", "plan", "pause", "drain", "begin", "transfer"]
AFTERWARDS = ["end", "flush", "verify", "stamp", "count", "continue"]


def push(home: Any, hook: Any) -> Any:
    weights = fakes.extract_weights({name: fakes.torch.zeros(2) for name in "abcd"})
    return home.updater.update(
        fakes.Push(lambda: fakes.Payload(weights), lambda _: (), progress=hook)
    )


def test_a_hook_is_told_of_each_phase_and_of_each_confirmed_bucket() -> None:
    told: list[Progress] = []

    push(fakes.house(2), told.append)

    assert [now.phase for now in told] == PHASES + ["transfer"] * 4 + AFTERWARDS
    counts = [(now.bytes_done, now.bucket) for now in told if now.phase == "transfer"]
    assert counts == [(0, 0), (8, 1), (16, 2), (24, 3), (32, 4)]
    assert {(now.bytes_total, now.buckets) for now in told[2:]} == {(32, 4)}
    assert (told[0].bytes_total, told[0].buckets) == (0, 0)


def test_a_hook_that_does_not_return_is_left_behind(caplog: pytest.LogCaptureFixture) -> None:
    home = fakes.house(1)
    release = threading.Event()

    with caplog.at_level(logging.WARNING, "weight_update"):
        report = push(home, lambda _: release.wait(60))
    release.set()

    assert report.version == 1
    assert "no return within 1 s" in caplog.text


@pytest.mark.parametrize("good_calls", [0, 8])
def test_a_hook_that_raises_is_warned_of_once_and_changes_nothing(
    good_calls: int, caplog: pytest.LogCaptureFixture
) -> None:
    home = fakes.house(2)
    calls = []

    def hook(now: Progress) -> None:
        calls.append(now)
        if len(calls) > good_calls:
            raise ZeroDivisionError("a broken bar")

    with caplog.at_level(logging.WARNING, "weight_update"):
        report = push(home, hook)

    assert report.version == 1
    assert not any(engine.paused for engine in home.engines)
    assert len(calls) == good_calls + 1
    # Others log too, some from threads of earlier tests.
    ours = [r.getMessage() for r in caplog.records if r.name == "weight_update"]
    assert ["a broken bar" in message for message in ours] == [True]


def test_a_hook_sees_how_far_a_failed_update_came() -> None:
    home = fakes.house(2)
    home.engines[1].fail("apply", "refuse", after=2)
    told: list[Progress] = []

    with pytest.raises(WeightUpdateError):
        push(home, told.append)

    assert (told[-1].phase, told[-1].bucket, told[-1].bytes_done) == ("transfer", 2, 16)


def test_an_interrupt_inside_a_hook_is_an_interrupt_of_the_update() -> None:
    home = fakes.house(1)

    def hook(now: Progress) -> None:
        if now.phase == "begin":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        push(home, hook)

    assert not home.engines[0].paused
