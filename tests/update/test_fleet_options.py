"""Quorum, versions, turns, and engines that come, go, restart or were paused by somebody."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from typing import Any

import pytest

from tests.faults import truth
from tests.faults.world import NAMES, Strike, World, value_of
from weight_update import ConfigurationError, EngineState, WeightUpdateError
from weight_update.errors import EngineUnreachable
from weight_update.report import Progress
from weight_update.update.planning import Payload
from weight_update.update.push import Push
from weight_update.update.turns import turn
from weight_update.update.updater import Updater
from weight_update.waiting import Deadline
from weight_update.weights.extract import extract_weights

NEW, OLD, MIXED = EngineState.NEW, EngineState.OLD, EngineState.MIXED
UNREACHABLE = EngineState.UNREACHABLE


@pytest.fixture(autouse=True)
def locks_of_its_own(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another run of the tests on this host has engines of the same names."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))


def world(size: int, **options: Any) -> World:
    """A fleet that holds version 1."""
    made = World(size, options=options)
    made.push(1.0)
    return made


def state_of(home: World, index: int) -> EngineState:
    return home.updater.engines[home.fleet[index].url].state


# -- quorum -------------------------------------------------------------------------------


@pytest.mark.parametrize("call", ["pause", "begin", "apply", "end", "stamp"])
@pytest.mark.parametrize("kind", ["refuse", "reset", "hang", "killed"])
def test_survivors_of_a_quorum_get_a_full_push_within_the_same_deadline(
    call: str, kind: Any
) -> None:
    home = world(3, quorum=2)
    home.fleet[1].arm(Strike(call, kind))

    result = truth.push(home, 2.0)

    assert result.error is None
    assert result.seconds <= home.updater.options.timeout + 2
    survivors = (home.fleet[0], home.fleet[2])
    assert [set(engine.fingerprint) for engine in survivors] == [{2.0}] * 2
    assert all(engine.generates and engine.label_shown == "2" for engine in survivors)
    assert home.counted == [1, 2]


def test_who_failed_is_reported_left_out_and_taken_back_by_a_full_push() -> None:
    home = world(3, quorum=2)
    home.fleet[1].arm(Strike("pause", "killed"))

    report = home.push(2.0)
    outcome = report.engines[home.fleet[1].url]
    assert outcome.state is UNREACHABLE
    assert any(home.fleet[1].url in w and "left out" in w for w in report.warnings)
    home.fleet[1].restart()

    assert not list(truth.not_healed(truth.push(home, 3.0)))


def test_an_engine_that_stays_away_is_reported_as_lost_in_every_update() -> None:
    home = world(2, quorum=1)
    home.fleet[1].kill()

    for tag in (2.0, 3.0):
        assert home.push(tag).engines[home.fleet[1].url].state is UNREACHABLE


def test_an_update_fails_when_fewer_than_the_quorum_are_left() -> None:
    home = world(3, quorum=2)
    for engine in home.fleet[1:]:
        engine.kill()

    with pytest.raises(EngineUnreachable):
        home.push(2.0)

    assert home.updater.version == 1
    assert home.fleet[0].generates


def test_a_quorum_larger_than_the_fleet_is_refused_before_anything_is_paused() -> None:
    home = World(2, options={"quorum": 3})

    with pytest.raises(ConfigurationError, match="there are only 2"):
        home.push(1.0)

    assert not any("pause" in engine.calls for engine in home.fleet)


def test_a_partial_push_does_not_take_an_engine_back_that_missed_an_update() -> None:
    home = world(2, quorum=1)
    home.fleet[1].arm(Strike("pause", "refuse"))
    home.push(2.0)
    missed = home.fleet[1].fingerprint

    truth.push(home, 3.0, ["a"], whole=False)

    assert home.fleet[1].fingerprint == missed
    assert not list(truth.not_healed(truth.push(home, 4.0)))


# -- versions -----------------------------------------------------------------------------


def test_a_given_initial_version_wins_over_the_labels() -> None:
    home = World(2, options={"initial_version": 7})
    home.fleet[0].label_shown = "41"

    assert home.push(1.0).version == 8
    assert {engine.label_shown for engine in home.fleet} == {"8"}


# -- turns --------------------------------------------------------------------------------


def during_the_pause(home: World, act: Any) -> None:
    """Runs an update that calls `act` once, while its engines are paused."""
    calls: list[Any] = [act]

    def hook(now: Progress) -> None:
        if now.phase == "drain" and calls:
            calls.pop()()

    weights = extract_weights({name: value_of(2.0) for name in NAMES})
    home.updater.update(Push(lambda: Payload(weights), lambda _: (), progress=hook))


def test_a_second_sender_of_a_busy_engine_is_refused_at_once_if_it_wants() -> None:
    home = world(1)
    home.options["when_busy"] = "refuse"
    other = home.make_updater([home.fleet[0].url])
    caught: list[WeightUpdateError] = []

    def push() -> None:
        with pytest.raises(WeightUpdateError, match="busy") as failure:
            home.push(3.0, updater=other)
        caught.append(failure.value)

    during_the_pause(home, push)

    assert caught[0].engine == home.fleet[0].url
    assert caught[0].report is not None
    assert home.fleet[0].calls.count("pause") == 2


def test_a_second_sender_waits_for_its_turn() -> None:
    home = World(1, threads=True)
    home.push(1.0)
    other = home.make_updater([home.fleet[0].url])
    second = threading.Thread(target=lambda: home.push(3.0, updater=other), daemon=True)

    during_the_pause(home, second.start)
    second.join(30)

    assert not second.is_alive()
    assert set(home.fleet[0].fingerprint) == {3.0}
    assert home.fleet[0].label_shown == "3"


def test_an_update_that_waited_for_another_of_its_sender_counts_on_from_it() -> None:
    home = World(1, threads=True, options={"initial_version": 7})
    home.push(1.0)
    versions: list[int] = []
    second = threading.Thread(target=lambda: versions.append(home.push(3.0).version), daemon=True)

    during_the_pause(home, second.start)
    second.join(30)

    assert versions == [10]
    assert home.fleet[0].label_shown == "10"


def test_two_senders_on_one_engine_never_interleave() -> None:
    home = World(2, threads=True, options={"timeout": 10_000.0})
    senders = [home.updater, home.make_updater([engine.url for engine in home.fleet])]

    def push_often(sender: Updater, tag: float) -> None:
        for index in range(4):
            home.push(tag + index, updater=sender)

    threads = [
        threading.Thread(target=push_often, args=(sender, 10.0 * index), daemon=True)
        for index, sender in enumerate(senders, 1)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)

    assert not any(thread.is_alive() for thread in threads)
    for engine in home.fleet:
        steps = [call for call in engine.calls if call in ("pause", "resume")]
        assert steps == ["pause", "resume"] * 8
        assert engine.label_shown == "8"


HOLDER = """
import sys, tempfile, time
tempfile.tempdir = sys.argv[2]
from weight_update.update.turns import turn
from weight_update.waiting import Deadline
with turn([sys.argv[1]], "wait", Deadline(5)):
    print("held", flush=True)
    time.sleep(600)
"""


def test_the_kernel_frees_the_turn_of_a_process_that_died() -> None:
    url = "http://127.0.0.1:30000"
    command = [sys.executable, "-c", HOLDER, url, tempfile.gettempdir()]
    root = str(Path(__file__).parents[2])
    environment = {**os.environ, "PYTHONPATH": root}
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=environment) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"held\n"
        busy = turn(["http://localhost:30000/"], "refuse", Deadline(5))
        with pytest.raises(WeightUpdateError, match="busy"), busy:
            pass
        holder.kill()
        holder.wait(20)

    with turn([url], "refuse", Deadline(5)):
        pass


# -- engines that come and go -------------------------------------------------------------


def test_a_recovery_waits_for_who_is_just_starting_again() -> None:
    home = world(2)
    lost = home.fleet[1]
    lost.kill()
    sleep = home.time.advance

    def come_back_later(seconds: float) -> None:
        sleep(seconds)
        if home.time.now > 20 and not lost.alive:
            lost.restart()

    home.updater._clock = type(home.time.clock)(lambda: home.time.now, come_back_later)

    home.updater.await_return()

    assert lost.alive
    assert home.time.now <= home.updater.options.timeout / 2
    assert not list(truth.not_healed(truth.push(home, 2.0)))


def test_a_recovery_gives_up_waiting_at_half_the_time() -> None:
    home = world(2)
    home.fleet[1].kill()

    home.updater.await_return()

    assert home.time.now <= home.updater.options.timeout / 2 + 2


def test_only_an_engine_that_is_added_is_inspected() -> None:
    home = world(2)
    added = home.make_engine()

    home.updater.add_engine(added.url)
    assert not list(truth.not_healed(truth.push(home, 2.0)))

    assert [engine.calls.count("inspect") for engine in home.fleet] == [1, 1, 1]
    assert [engine.calls.count("join") for engine in home.fleet] == [2, 2, 1]


def test_removing_an_engine_inspects_nobody_and_has_it_leave() -> None:
    home = world(3)
    gone = home.fleet[1]

    home.updater.remove_engine(gone.url)
    assert not list(truth.not_healed(truth.push(home, 2.0)))

    assert gone.url not in home.updater.engines
    assert not gone.groups_joined
    assert set(gone.fingerprint) == {1.0}
    assert [engine.calls.count("inspect") for engine in home.fleet] == [1, 1]


@pytest.mark.parametrize("url", ["http://engine0:1", "http://nobody:1"])
def test_the_fleet_cannot_lose_its_last_engine_nor_one_it_has_not(url: str) -> None:
    home = world(1)

    with pytest.raises(ConfigurationError):
        home.updater.remove_engine(url)

    assert list(home.updater.engines) == ["http://engine0:1"]


def test_an_engine_cannot_be_added_twice() -> None:
    home = world(1)

    with pytest.raises(ConfigurationError, match="already"):
        home.updater.add_engine(home.fleet[0].url)


# -- what somebody else did ---------------------------------------------------------------


def test_an_engine_that_somebody_else_paused_is_not_resumed_by_a_failure() -> None:
    home = world(2)
    home.fleet[0].paused = True
    home.fleet[1].arm(Strike("begin", "refuse"))

    result = truth.push(home, 2.0)

    assert home.fleet[0].paused
    assert result.report is not None
    assert result.report.engines[home.fleet[0].url].paused
    assert not home.fleet[1].paused
    assert not list(truth.not_healed(truth.push(home, 3.0)))


def test_a_restart_is_noticed_although_the_label_is_the_same() -> None:
    home = world(2)
    home.fleet[0].restart()
    home.fleet[0].label_shown = "1"

    assert not list(truth.not_healed(truth.push(home, 2.0)))

    assert [engine.calls.count("inspect") for engine in home.fleet] == [2, 1]
    assert len(home.groups) == 2


# -- interrupts ---------------------------------------------------------------------------

STEPS = ("pause", "drain", "begin", "transfer", "end", "flush", "verify", "stamp", "count")


@pytest.mark.parametrize("phase", [*STEPS, "continue"])
@pytest.mark.parametrize("interrupt", [KeyboardInterrupt, SystemExit])
def test_an_interrupt_as_a_phase_begins_leaves_a_known_state(
    phase: str, interrupt: type[BaseException]
) -> None:
    home = world(2)

    def hook(now: Progress) -> None:
        if now.phase == phase:
            raise interrupt

    weights = extract_weights({name: value_of(2.0) for name in NAMES})
    with pytest.raises(interrupt) as raised:
        home.updater.update(Push(lambda: Payload(weights), lambda _: (), progress=hook))

    for engine in home.fleet:
        outcome = home.updater.engines[engine.url]
        assert str(outcome.state) in raised.value.__notes__[0]
        assert outcome.paused == engine.paused is False
        assert outcome.version in (None, engine.label_shown)
        assert set(engine.fingerprint) == {2.0 if outcome.state is NEW else 1.0}
    assert not list(truth.not_healed(truth.push(home, 3.0)))
