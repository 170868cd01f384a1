"""Updates in the background: in order, one at a time, and the newest weights win."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from weight_update.update.background import Background

SECONDS = 20


class Pushes:
    """Pushes that wait until the test lets them go, and note that they ran."""

    def __init__(self) -> None:
        self.ran: list[str] = []
        self.gate = threading.Event()

    def push(self, name: str) -> Any:
        def run() -> str:
            self.gate.wait(SECONDS)
            self.ran.append(name)
            return name

        return run


@pytest.fixture
def pushes() -> Pushes:
    return Pushes()


def test_a_push_gives_its_report(pushes: Pushes) -> None:
    pushes.gate.set()

    assert Background().submit(pushes.push("a")).result(SECONDS) == "a"


def test_of_pushes_that_wait_only_the_newest_runs(pushes: Pushes) -> None:
    background = Background()
    running = background.submit(pushes.push("a"))
    waiting_for_running(running)
    waiting = [background.submit(pushes.push(name)) for name in "bcd"]
    pushes.gate.set()

    assert running.result(SECONDS) == "a"
    assert [future.result(SECONDS) for future in waiting] == ["d", "d", "d"]
    assert pushes.ran == ["a", "d"]


def test_a_push_that_fails_does_not_stop_the_next(pushes: Pushes) -> None:
    background = Background()

    def fail() -> Any:
        pushes.gate.wait(SECONDS)
        raise ZeroDivisionError

    failing = background.submit(fail)
    waiting_for_running(failing)
    later = background.submit(pushes.push("b"))
    pushes.gate.set()

    with pytest.raises(ZeroDivisionError):
        failing.result(SECONDS)
    assert later.result(SECONDS) == "b"


def test_cancelling_forgets_the_push_that_waits_and_leaves_the_one_that_runs(
    pushes: Pushes,
) -> None:
    background = Background()
    running = background.submit(pushes.push("a"))
    waiting_for_running(running)
    waiting = background.submit(pushes.push("b"))

    background.cancel()
    pushes.gate.set()

    assert waiting.cancelled()
    assert running.result(SECONDS) == "a"
    assert background.submit(pushes.push("c")).result(SECONDS) == "c"
    assert pushes.ran == ["a", "c"]


def test_cancelling_one_future_of_a_superseded_push_leaves_the_newest_its_own(
    pushes: Pushes,
) -> None:
    background = Background()
    waiting_for_running(background.submit(pushes.push("a")))
    older, newer = background.submit(pushes.push("b")), background.submit(pushes.push("c"))
    assert older.cancel()
    pushes.gate.set()

    assert newer.result(SECONDS) == "c"


def test_finishing_waits_for_what_runs_and_what_waits(pushes: Pushes) -> None:
    background = Background()
    futures = [background.submit(pushes.push(name)) for name in "ab"]
    threading.Timer(0.05, pushes.gate.set).start()

    background.finish(SECONDS)

    assert all(future.done() for future in futures)


def test_a_caller_may_cancel_a_push_that_waits(pushes: Pushes) -> None:
    background = Background()
    waiting_for_running(background.submit(pushes.push("a")))
    assert background.submit(pushes.push("b")).cancel()
    newer = background.submit(pushes.push("c"))
    pushes.gate.set()

    assert newer.result(SECONDS) == "c"
    assert pushes.ran == ["a", "c"]


def waiting_for_running(future: Any) -> None:
    """Poll until a push has begun, so that the next one has to wait."""
    pause = threading.Event()
    for _ in range(SECONDS * 100):
        if future.running():
            return
        pause.wait(0.01)
    raise AssertionError("it never began")
