"""Deadlines and daemon threads."""

from __future__ import annotations

import gc
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable

import pytest

from weight_update.waiting import Clock, Deadline, spawn


class Hands:
    """A clock that the test moves."""

    def __init__(self) -> None:
        self.time = 100.0
        self.clock = Clock(now=lambda: self.time, sleep=self.move)

    def move(self, seconds: float) -> None:
        self.time += seconds


class Bucket:
    """Something large."""


def refuse(_: Bucket) -> None:
    raise ValueError("no")


def wait_for(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < end, "condition never came true"
        time.sleep(0.01)


def test_a_deadline_counts_down_and_never_below_zero() -> None:
    hands = Hands()
    deadline = Deadline(10.0, hands.clock)

    hands.move(4.0)
    assert deadline.remaining() == 6.0
    assert not deadline.expired()

    deadline.sleep(60.0)
    assert deadline.remaining() == 0.0
    assert deadline.expired()


@pytest.mark.parametrize(("seconds", "remaining"), [(2.0, 2.0), (50.0, 6.0), (6.0, 6.0)])
def test_a_part_of_a_deadline_never_outlives_it(seconds: float, remaining: float) -> None:
    hands = Hands()
    deadline = Deadline(10.0, hands.clock)
    hands.move(4.0)

    part = deadline.at_most(seconds)

    assert part.remaining() == remaining


def test_a_share_of_a_deadline_leaves_time_for_later_steps() -> None:
    hands = Hands()
    deadline = Deadline(10.0, hands.clock)
    hands.move(2.0)

    assert deadline.share(0.5).remaining() == 4.0


def test_a_deadline_begun_afresh_outlives_the_one_it_comes_from() -> None:
    hands = Hands()
    deadline = Deadline(10.0, hands.clock)
    hands.move(20.0)

    assert deadline.afresh(3.0).remaining() == 3.0


def test_a_deadline_does_not_follow_the_wall_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    deadline = Deadline(10.0)
    monkeypatch.setattr(time, "time", lambda: 4e9)

    assert 0.0 < deadline.remaining() <= 10.0


def test_a_spawned_call_gives_its_result() -> None:
    assert spawn(max, 3, 5).result(timeout=5) == 5


@pytest.mark.parametrize("kind", [ValueError, KeyboardInterrupt, SystemExit])
def test_a_spawned_call_gives_its_error_whatever_it_is(kind: type[BaseException]) -> None:
    def fail() -> None:
        raise kind("inside")

    with pytest.raises(kind, match="inside"):
        spawn(fail).result(timeout=5)


def test_an_error_that_is_kept_keeps_nothing_that_the_call_had() -> None:
    """A refused request had a bucket of gigabytes, and the error outlives the sender."""
    bucket = Bucket()
    freed = weakref.ref(bucket)

    call = spawn(refuse, bucket)
    error = call.exception(timeout=5)
    del bucket

    wait_for(lambda: freed() is None)
    assert str(error) == "no"


def test_no_error_waits_for_the_garbage_collector() -> None:
    gc.disable()
    try:
        call = spawn(refuse, Bucket())
        freed = weakref.ref(call)
        with pytest.raises(ValueError, match="no"):
            call.result(timeout=5)
        del call
        wait_for(lambda: freed() is None)
    finally:
        gc.enable()


def test_spawned_calls_never_wait_for_each_other() -> None:
    release = threading.Event()
    stuck = [spawn(release.wait) for _ in range(40)]

    assert spawn(lambda: "free").result(timeout=5) == "free"

    release.set()
    assert all(future.result(timeout=5) for future in stuck)


def test_a_stuck_call_does_not_keep_the_interpreter_alive() -> None:
    code = "import time; from weight_update.waiting import spawn; spawn(time.sleep, 600)"

    subprocess.run([sys.executable, "-c", code], check=True, timeout=100)


def test_a_pause_that_lasts_longer_than_asked_leaves_no_time_for_another_try():
    now = [0.0]

    def oversleep(seconds: float) -> None:
        now[0] += seconds + 5.0

    deadline = Deadline(10.0, Clock(lambda: now[0], oversleep))

    assert deadline.outlasts(1.0)
    assert not deadline.outlasts(1.0)
    assert now[0] == 12.0


def test_a_pause_that_would_outlast_the_deadline_is_not_begun():
    slept: list[float] = []
    deadline = Deadline(1.0, Clock(lambda: 0.0, slept.append))

    assert not deadline.outlasts(1.0)
    assert slept == []
