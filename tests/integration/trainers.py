"""Trainers in processes of their own, to be killed, interrupted and outlived.

Run as a script, this file imports the library once and then forks a trainer for each line of
JSON on its standard input; importing it again in each would take seconds.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any


class Trainer:
    """The test's side of one trainer."""

    def __init__(self, pid: int, home: Path) -> None:
        self.pid = pid
        self._home = home

    def output(self) -> str:
        """What it has printed so far, errors included."""
        path = self._home / f"{self.pid}.out"
        return path.read_text() if path.exists() else ""

    def wait_for(self, words: str, seconds: float = 60.0) -> None:
        """Wait until it has printed ``words``."""
        deadline = time.monotonic() + seconds
        while words not in self.output():
            assert time.monotonic() < deadline, self.output()
            time.sleep(0.01)

    def go_on(self) -> None:
        """Let it leave :func:`_pause`."""
        (self._home / f"{self.pid}.go").touch()

    def kill(self, number: int = signal.SIGKILL) -> None:
        """Send it a signal."""
        os.kill(self.pid, number)

    def wait(self, seconds: float) -> int:
        """Wait for its end and return its exit code, negative for a signal."""
        path = self._home / f"{self.pid}.code"
        deadline = time.monotonic() + seconds
        while not path.exists():
            assert time.monotonic() < deadline, f"still running: {self.output()}"
            time.sleep(0.01)
        return int(path.read_text())


class Trainers:
    """Starts trainers; see the functions below for what they can do."""

    def __init__(self, home: Path) -> None:
        self._home = home
        self._process = subprocess.Popen(
            [sys.executable, __file__, str(home)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            bufsize=1,
        )

    def start(self, action: Callable[..., None], **arguments: Any) -> Trainer:
        """Fork a trainer that runs one of this file's functions."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps([action.__name__, arguments]) + "\n")
        return Trainer(int(self._process.stdout.readline()), self._home)

    def stop(self) -> None:
        """End the parent of all trainers."""
        self._process.communicate(timeout=60)


# ---- what trainers do, each in a process of its own


def update_once(url: str, weights: str) -> None:
    """Update, say so, and wait to be told to go on; then end without a word to the engine."""
    report = _sender(url).update_weights(_load(weights))
    print("version", report.version)
    _pause()


def update_and_shut_down_twice(url: str, weights: str) -> None:
    """Update, wait to be told, and shut down properly."""
    sender = _sender(url)
    sender.update_weights(_load(weights))
    print("updated")
    _pause()
    sender.shutdown()
    sender.shutdown()
    print("shut down")


def update_until_interrupted(url: str, weights: str, stalled: bool) -> None:
    """Update and report an interrupt; ``stalled`` trainers never start the broadcast."""
    if stalled:
        _stall()
    try:
        _sender(url).update_weights(_load(weights))
    except KeyboardInterrupt as interrupt:
        print("interrupted", *interrupt.__notes__)


def update_until_told_to_end(url: str, weights: str, phase: str, bucket: int) -> None:
    """Update, and get a SIGTERM when a phase begins or a bucket of it is confirmed."""

    def end(now: Any) -> None:
        if (now.phase, now.bucket) == (phase, bucket):
            os.kill(os.getpid(), signal.SIGTERM)

    _sender(url, bucket_bytes=20_000).update_weights(_load(weights), progress=end)
    print("was not told to end")


def update_pickled(url: str, weights: str, pickled: str) -> None:
    """Update through a sender that another process has pickled."""
    import pickle

    sender = pickle.loads(Path(pickled).read_bytes())
    print("version", sender.update_weights(_load(weights)).version)
    sender.shutdown()


def update_after_fork(url: str, weights: str) -> None:
    """Connect, fork, use the sender in the child, and then in the parent."""
    sender = _sender(url)
    sender.update_weights(_load(weights))
    child = os.fork()
    if child == 0:
        from weight_update import WeightUpdateError

        try:
            print("child updated to", sender.update_weights(_load(weights)).version)
        except WeightUpdateError as error:
            print("child failed:", error)
        sender.shutdown()
        sys.stdout.flush()
        os._exit(0)
    os.waitpid(child, 0)
    print("parent updated to", sender.update_weights(_load(weights)).version)
    sender.shutdown()


def _sender(url: str, **options: Any) -> Any:
    from weight_update import SGLangWeightSyncScheme

    return SGLangWeightSyncScheme(url, timeout=60.0, **options).create_sender()


def _load(path: str) -> Any:
    import torch

    return torch.load(path)


def _stall() -> None:
    from weight_update.transports.process_group import UpdateGroup

    UpdateGroup.broadcast = lambda self, tensors: print("stalled")  # type: ignore[method-assign]
    moving = UpdateGroup.moving
    UpdateGroup.moving = lambda self: moving(self) or True  # type: ignore[method-assign]


def _pause() -> None:
    path = Path(sys.argv[1]) / f"{os.getpid()}.go"
    while not path.exists():
        time.sleep(0.01)


# ---- the parent of all trainers


def _serve(home: Path) -> None:
    import weight_update.schemes.scheme  # noqa: F401 - here once, so that trainers start fast

    for line in iter(sys.stdin.readline, ""):
        action, arguments = json.loads(line)
        pid = os.fork()
        if pid == 0:
            with _own_output(home):
                globals()[action](**arguments)
            return
        print(pid, flush=True)
        threading.Thread(target=_note_end, args=(home, pid), daemon=True).start()


def _note_end(home: Path, pid: int) -> None:
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    part = home / f"{pid}.part"
    part.write_text(str(code))
    part.rename(home / f"{pid}.code")


@contextlib.contextmanager
def _own_output(home: Path) -> Iterator[None]:
    """Print to a file, unbuffered, and leave the parent's pipes alone."""
    file = os.open(home / f"{os.getpid()}.out", os.O_CREAT | os.O_WRONLY | os.O_APPEND)
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.dup2(file, 1)
    os.dup2(file, 2)
    sys.stdout = os.fdopen(1, "w", buffering=1, closefd=False)
    sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)
    yield


if __name__ == "__main__":
    _serve(Path(sys.argv[1]))
