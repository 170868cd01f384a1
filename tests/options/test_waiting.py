"""Deadlines and daemon threads."""

from __future__ import annotations

import gc
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import pytest

from weight_update import waiting
from weight_update.waiting import Clock, Deadline, hand_over, spawn


class Hands:
    """A clock that the test moves."""

    def __init__(self) -> None:
        self.time = 100.0
        self.clock = Clock(now=lambda: self.time, sleep=self.move)

    def move(self, seconds: float) -> None:
        self.time += seconds


Start = Callable[..., Future[Any]]
WAYS = pytest.mark.parametrize("start", [spawn, hand_over])


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


@WAYS
def test_a_spawned_call_gives_its_result(start: Start) -> None:
    assert start(max, 3, 5).result(timeout=5) == 5


@pytest.mark.parametrize("kind", [ValueError, KeyboardInterrupt, SystemExit])
def test_a_spawned_call_gives_its_error_whatever_it_is(kind: type[BaseException]) -> None:
    def fail() -> None:
        raise kind("inside")

    with pytest.raises(kind, match="inside"):
        spawn(fail).result(timeout=5)


@WAYS
def test_an_error_that_is_kept_keeps_nothing_that_the_call_had(start: Start) -> None:
    """A refused request had a bucket of gigabytes, and the error outlives the sender."""
    bucket = Bucket()
    freed = weakref.ref(bucket)

    call = start(refuse, bucket)
    error = call.exception(timeout=5)
    del bucket

    wait_for(lambda: freed() is None)
    assert str(error) == "no"


@WAYS
def test_no_error_waits_for_the_garbage_collector(start: Start) -> None:
    gc.disable()
    try:
        call = start(refuse, Bucket())
        freed = weakref.ref(call)
        with pytest.raises(ValueError, match="no"):
            call.result(timeout=5)
        del call
        wait_for(lambda: freed() is None)
    finally:
        gc.enable()


@WAYS
def test_spawned_calls_never_wait_for_each_other(start: Start) -> None:
    release = threading.Event()
    stuck = [start(release.wait) for _ in range(40)]

    assert start(lambda: "free").result(timeout=5) == "free"

    release.set()
    assert all(future.result(timeout=5) for future in stuck)


@WAYS
def test_a_stuck_call_does_not_keep_the_interpreter_alive(start: Start) -> None:
    code = "import time; from weight_update.waiting import {0}; {0}(time.sleep, 600)"
    code = code.format(start.__name__)

    subprocess.run([sys.executable, "-c", code], check=True, timeout=100)


def test_calls_that_are_handed_over_one_after_the_other_share_a_thread() -> None:
    def again() -> bool:
        return threading.get_ident() == first

    first = hand_over(threading.get_ident).result(timeout=5)

    wait_for(lambda: hand_over(again).result(timeout=5))  # it has to be idle first


def test_an_idle_thread_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    threads = waiting._IdleThreads()
    monkeypatch.setattr(waiting, "_IDLE_SECONDS", 0.01)
    ran: list[threading.Thread] = []

    threads.put(lambda: ran.append(threading.current_thread()))

    wait_for(lambda: bool(ran) and not ran[0].is_alive())
    assert threads._waiting == []


def test_every_call_is_done_though_threads_end_at_that_very_moment(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(waiting, "_IDLE_SECONDS", 1e-4)

    for number in range(200):
        assert hand_over(abs, -number).result(timeout=5) == number


def test_a_fork_hands_over_to_threads_of_its_own() -> None:
    code = """
import os
from weight_update.waiting import hand_over
hand_over(os.getpid).result(5)
child = os.fork()
if child == 0:
    os._exit(0 if hand_over(os.getpid).result(5) == os.getpid() else 1)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
"""
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


@pytest.mark.parametrize("name", ["spawn", "hand_over"])
def test_an_interpreter_that_is_torn_down_waits_for_no_thread(name: str) -> None:
    program = f"""
from weight_update.waiting import {name} as start

class Last:
    def __del__(self, start=start):
        start(print)

last = Last()
"""
    ended = subprocess.run(
        [sys.executable, "-c", program], check=False, capture_output=True, text=True, timeout=60
    )
    assert ended.returncode == 0
    assert "the interpreter is being torn down" in ended.stderr
