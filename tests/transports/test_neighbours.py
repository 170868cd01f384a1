"""Whether another process of this host has ended."""

from __future__ import annotations

import os
import subprocess
import sys
import time

import pytest

from weight_update.transports.neighbours import Neighbour, this_host

PATIENCE = 30.0

pytestmark = pytest.mark.skipif(not hasattr(os, "pidfd_open"), reason="only Linux tells")


def sleeper() -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)


def test_one_that_was_killed_has_ended_though_its_parent_has_not_noticed() -> None:
    process = sleeper()
    neighbour = Neighbour(process.pid)
    assert not neighbour.ended()

    process.kill()  # and nobody waits for it, yet

    end = time.monotonic() + PATIENCE
    while not neighbour.ended():
        assert time.monotonic() < end
        time.sleep(0.01)
    process.wait()
    assert neighbour.ended()


def test_one_that_is_not_there_has_ended() -> None:
    process = sleeper()
    process.kill()
    process.wait()
    assert Neighbour(process.pid).ended()


def test_watching_keeps_no_file_open_afterwards() -> None:
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(20):
        Neighbour(os.getpid())
    assert len(os.listdir("/proc/self/fd")) <= before + 1


def test_one_that_may_not_be_watched_is_not_said_to_have_ended(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def forbidden(process: int) -> int:
        raise PermissionError

    monkeypatch.setattr(os, "pidfd_open", forbidden)
    assert not Neighbour(os.getpid()).ended()


def test_a_host_is_equal_to_itself_and_told_in_one_line() -> None:
    script = "from weight_update.transports.neighbours import this_host; print(this_host())"
    told = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=True
    )
    assert told.stdout.strip() == this_host()
