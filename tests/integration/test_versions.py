"""Version numbers: where they start, when they move, and who hears of it."""

from __future__ import annotations

import logging
import time
from typing import Any

import pytest
from torchrl.envs.llm.transforms.policy_version import PolicyVersion

from weight_update import ConfigurationError, EngineRejected
from weight_update.reference_engine import Fault, ReferenceEngine

from . import kit
from .kit import CONTINUE, STAMP, UPDATE


class Timed(kit.Collector):
    """Remembers when it counted."""

    def __init__(self) -> None:
        super().__init__()
        self.times: list[float] = []

    def increment_version(self) -> None:
        super().increment_version()
        self.times.append(time.time())


class Broken:
    """A collector whose workers are gone."""

    def increment_version(self) -> None:
        raise RuntimeError("worker is gone")


@pytest.mark.parametrize(
    ("shown", "expected"),
    [("default", 1), ("7", 8), ("0", 1), ("step-9", 1), ("v2", 1)],
)
def test_the_first_version_follows_the_label_that_the_engine_shows(
    shown: str, expected: int, engine: ReferenceEngine
) -> None:
    """C24: a trainer that starts again goes on from a numeric label."""
    kit.relabel(engine, shown)
    with kit.make_sender(engine) as sender:
        assert sender.update_weights(kit.llama(1)).version == expected
    assert kit.label(engine) == str(expected)


def test_a_fleet_goes_on_from_its_highest_label(three: list[ReferenceEngine]) -> None:
    for engine, shown in zip(three, ("default", "12", "3"), strict=True):
        kit.relabel(engine, shown)
    with kit.make_sender(three) as sender:
        assert sender.update_weights(kit.llama(1)).version == 13
    assert [kit.label(engine) for engine in three] == ["13"] * 3


def test_collectors_count_only_updates_that_reached_every_engine(
    three: list[ReferenceEngine],
) -> None:
    """C07: three updates, the second fails: both collectors see 1, 1, 2."""
    for engine in three:
        kit.relabel(engine, "default")
    first, second = kit.Collector(), kit.Collector()
    seen = []
    with kit.make_sender(three) as sender:
        sender.register_model(kit.llama(1))
        sender.register_collector(first)
        sender.register_collector(second)
        for failing in (False, True, False):
            if failing:
                three[1].inject(Fault(UPDATE, "refuse", times=1))
                with pytest.raises(EngineRejected):
                    sender.update_weights()
            else:
                sender.update_weights()
            seen.append((first.version, second.version, sender.version))
            assert {kit.label(e) for e in three} == {str(first.version)}
    assert seen == [(1, 1, 1), (1, 1, 1), (2, 2, 2)]


def test_collectors_move_by_their_own_steps_from_wherever_they_were(
    engine: ReferenceEngine,
) -> None:
    number, name = PolicyVersion("int"), PolicyVersion("uuid")
    number.version = 40
    with kit.make_sender(engine) as sender:
        for collector in (number, name):
            sender.register_collector(collector)
        for _ in range(2):
            sender.update_weights(kit.llama(1))
    assert number.version == 42
    assert len({change.new_version for change in name.version_history}) == 3


def test_collectors_count_before_any_engine_continues(three: list[ReferenceEngine]) -> None:
    """No sample of the new weights carries the old number."""
    collector = Timed()
    log = kit.Log(*three)
    with kit.make_sender(three) as sender:
        sender.register_collector(collector)
        sender.update_weights(kit.llama(1))
    (counted,) = collector.times
    for engine in three:
        assert log.records(engine, STAMP)[0]["t1"] <= counted
        assert counted <= log.records(engine, CONTINUE)[0]["t0"]


def test_a_collector_that_raises_does_not_stop_another_and_is_reported(
    engine: ReferenceEngine, caplog: pytest.LogCaptureFixture
) -> None:
    """C07: the engine has the weights, so the update stands."""
    collector = kit.Collector()
    with kit.make_sender(engine) as sender, caplog.at_level(logging.WARNING, "weight_update"):
        sender.register_collector(Broken())
        sender.register_collector(collector)
        report = sender.update_weights(kit.llama(1))
    assert collector.version == 1
    (warning,) = report.warnings
    assert "Broken.increment_version() failed" in warning
    assert "worker is gone" in warning
    assert warning in caplog.text
    assert kit.served(engine) == kit.tokens_of(1)


def test_a_collector_registered_twice_counts_once(engine: ReferenceEngine) -> None:
    collector = kit.Collector()
    with kit.make_sender(engine) as sender:
        sender.register_collector(collector)
        sender.register_collector(collector)
        sender.update_weights(kit.llama(1))
    assert collector.version == 1


def test_what_cannot_count_is_no_collector(engine: ReferenceEngine) -> None:
    sender = kit.make_sender(engine)
    with pytest.raises(ConfigurationError, match="increment_version"):
        sender.register_collector(object())


def test_a_version_is_not_counted_twice_when_only_the_resume_failed(
    engine: ReferenceEngine,
) -> None:
    """Every engine has everything, so it counts, once."""
    collector = kit.Collector()
    engine.inject(Fault(CONTINUE, "refuse", times=1))
    with kit.make_sender(engine) as sender:
        sender.register_collector(collector)
        with pytest.raises(EngineRejected):
            sender.update_weights(kit.llama(1))
    assert collector.version == 1


def spans(answer: dict[str, Any]) -> list[str]:
    """The versions that made a request's tokens, in order."""
    return [span["version"] for span in answer["meta_info"]["weight_versions"]]


def test_tokens_carry_the_version_that_the_report_names(engine: ReferenceEngine) -> None:
    with kit.make_sender(engine) as sender:
        for _ in range(2):
            report = sender.update_weights(kit.llama(1))
            assert spans(engine.generate(kit.PROMPT, 4)) == [str(report.version)]
