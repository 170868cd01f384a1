"""What can be done before engines stand still is done before, and both times are told."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from weight_update.facts import NameCheck
from weight_update.update.planning import Payload
from weight_update.update.push import Push
from weight_update.weights.cargo import Cargo
from weight_update.weights.specs import TensorSpec, Weight

from . import fakes
from .fakes import FakeEngine, FakePacker, House, house

BEFORE = ("inspect", "join", "format", "read", "pack", "check_names")


def traced(monkeypatch: pytest.MonkeyPatch) -> tuple[House, list[str]]:
    """A fleet of one whose engine, packer and weights write down what they are asked."""
    events: list[str] = []
    enter, pack, choose = FakeEngine._enter, FakePacker.pack, FakePacker.format

    def entered(self: FakeEngine, call: str) -> None:
        events.append(call)
        enter(self, call)

    def packed(self: FakePacker, bucket: Any) -> Cargo:
        events.append("pack")
        return pack(self, bucket)

    def chosen(self: FakePacker, *given: Any) -> Any:
        events.append("format")
        return choose(self, *given)

    def compared(*_: Any) -> NameCheck:
        events.append("check_names")
        return NameCheck()

    monkeypatch.setattr(FakeEngine, "_enter", entered)
    monkeypatch.setattr(FakeEngine, "check_names", compared)
    monkeypatch.setattr(FakePacker, "pack", packed)
    monkeypatch.setattr(FakePacker, "format", chosen)
    return house(1), events


def push(home: House, events: list[str]) -> Any:
    def read() -> torch.Tensor:
        events.append("read")
        return torch.zeros(2)

    cpu = torch.device("cpu")
    weights = [Weight(TensorSpec(name, torch.float32, (2,)), cpu, read) for name in "abc"]
    return home.updater.update(Push(lambda: Payload(weights), lambda _: []))


@pytest.mark.parametrize("step", BEFORE)
def test_a_step_that_needs_no_pause_comes_before_it(
    step: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    home, events = traced(monkeypatch)

    push(home, events)

    assert step in events[: events.index("pause")]


def test_only_the_first_bucket_is_read_before_the_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    home, events = traced(monkeypatch)

    push(home, events)

    assert events[: events.index("pause")].count("read") == 1
    assert events.count("read") == 3


def test_the_report_tells_the_whole_time_and_how_long_engines_stood_still() -> None:
    report = house(1).push()

    within = ("pause", "drain", "begin", "transfer", "end", "flush", "verify", "stamp", "continue")
    paused, total = report.seconds["paused"], report.seconds["total"]
    assert sum(report.seconds[phase] for phase in within) <= paused < total
    assert report.seconds["plan"] + report.seconds["connect"] + paused <= total
    assert f"paused {1e3 * paused:.0f} ms" in report.headline


def test_the_pause_of_the_trial_is_no_part_of_the_updates(monkeypatch: pytest.MonkeyPatch) -> None:
    home = house(1)
    home.updater.connect(fakes.torch.device("cpu"))
    slow = 0.3

    def rehearse(*given: Any) -> None:
        fakes.Deadline(1.0).sleep(slow)

    wire = home.updater._wire
    monkeypatch.setattr(wire, "_try", rehearse)
    monkeypatch.setattr("weight_update.update.ways.Course.is_tried", True)
    wire.drop()

    report = home.push()

    assert report.seconds["connect"] >= slow
    assert report.seconds["paused"] + report.seconds["connect"] <= report.seconds["total"]
