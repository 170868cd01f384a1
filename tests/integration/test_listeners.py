"""Hooks and loggers of real updates: when they hear, and that the numbers are those of the wire."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from torchrl.record.loggers.csv import CSVLogger

from weight_update import EngineRejected
from weight_update.reference_engine import Fault, ReferenceEngine

from . import kit
from .kit import CONTINUE, UPDATE


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A busy machine writes late: tests read what was logged once it is."""
    monkeypatch.setattr("weight_update.schemes.loggers._PATIENCE_SECONDS", 60.0)


def series(folder: Path, name: str) -> list[tuple[int, float]]:
    rows = (folder / "run" / "scalars" / "weight_update" / f"{name}.csv").read_text().split()
    return [(int(step), float(value)) for step, value in (row.split(",") for row in rows)]


def test_every_engine_generates_again_when_hooks_and_loggers_hear(
    three: list[ReferenceEngine],
) -> None:
    """They may be slow: no engine waits for them."""
    log, heard = kit.Log(*three), []

    class Logger:
        def log_scalar(self, name: str, value: float, step: int) -> None:
            heard.append(time.time())

    with kit.make_sender(three) as sender:
        sender.register_post_hook(lambda: heard.append(time.time()))
        sender.register_logger(Logger())
        sender.update_weights(kit.llama(1))
        kit.wait_for(lambda: len(heard) > 1)
    for engine in three:
        assert log.records(engine, CONTINUE)[0]["t1"] <= heard[0]


def test_what_is_logged_is_what_the_reports_say(
    three: list[ReferenceEngine], tmp_path: Path
) -> None:
    for engine in three:
        kit.relabel(engine, "0")
    with kit.make_sender(three) as sender:
        sender.register_logger(CSVLogger("run", log_dir=str(tmp_path)))
        first = sender.update_weights(kit.llama(1))
        three[1].inject(Fault(UPDATE, "refuse", times=1))
        with pytest.raises(EngineRejected) as caught:
            sender.update_weights(kit.llama(1))
        last = sender.update_weights_async(kit.llama(0)).result(60)
    assert series(tmp_path, "bytes") == [(1, first.bytes), (2, last.bytes)]
    for phase in ("pause", "transfer", "continue", "paused", "total"):
        expected = [(report.version, report.seconds[phase]) for report in (first, last)]
        assert series(tmp_path, f"seconds/{phase}") == expected
    speeds = [(r.version, r.bytes / r.seconds["transfer"] / 1e9) for r in (first, last)]
    assert series(tmp_path, "gigabytes_per_second") == speeds
    states = [outcome.state for outcome in caught.value.report.engines.values()]
    assert series(tmp_path, "engines/old")[1] == (1, states.count("old"))
    assert series(tmp_path, "engines/new") == [(1, 3), (1, states.count("new")), (2, 3)]
    assert series(tmp_path, "staleness/versions") == [(1, 0), (1, 1), (2, 0)]
    assert series(tmp_path, "failed_seconds") == [(1, caught.value.report.seconds["total"])]


def test_an_engine_that_a_quorum_left_behind_shows_as_stale(
    three: list[ReferenceEngine], tmp_path: Path
) -> None:
    for engine in three:
        kit.relabel(engine, "0")
    with kit.make_sender(three, quorum=2) as sender:
        sender.register_logger(CSVLogger("run", log_dir=str(tmp_path)))
        sender.update_weights(kit.llama(1))
        three[2].inject(Fault(kit.PAUSE, "refuse", times=1))
        sender.update_weights(kit.llama(1))
        sender.update_weights(kit.llama(1))
    assert series(tmp_path, "staleness/versions") == [(1, 0), (2, 1), (3, 0)]
    assert series(tmp_path, "engines/new") == [(1, 3), (2, 2), (3, 3)]
    assert series(tmp_path, "failures") == [(1, 0), (2, 0), (3, 0)]
