"""Trainers in processes of their own, to be killed, interrupted and outlived.

What one does is a function of this file, or of another module that imports only what trainers need.
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from itertools import count
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from tests import warm

ROOT = Path(__file__).parents[2]


class Trainer:
    """The test's side of one trainer; as a context manager it is killed at the end."""

    def __init__(self, process: subprocess.Popen[bytes], output: Path) -> None:
        self._process = process
        self._output = output

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._process.kill()
        self._process.wait(60)

    @property
    def pid(self) -> int:
        """Of its process."""
        return self._process.pid

    def output(self) -> str:
        """What it has printed so far, errors included."""
        return self._output.read_text()

    def wait_for(self, words: str, seconds: float = 60.0) -> None:
        """Wait until it has printed ``words``."""
        deadline = time.monotonic() + seconds
        while words not in self.output():
            assert time.monotonic() < deadline, self.output()
            time.sleep(0.01)

    def go_on(self) -> None:
        """Let it leave :func:`_pause`."""
        _leave_of(self._output.parent, self.pid).touch()

    def kill(self, number: int = signal.SIGKILL) -> None:
        """Send it a signal."""
        self._process.send_signal(number)

    def wait(self, seconds: float) -> int:
        """Wait for its end and return its exit code, negative for a signal."""
        try:
            return self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"still running: {self.output()}") from None


class Trainers:
    """Starts trainers; see the functions below for what they can do."""

    def __init__(self, home: Path) -> None:
        self._home = home
        self._numbers = count()

    def start(self, action: Callable[..., None], **arguments: Any) -> Trainer:
        """Start a trainer that runs a function, which its module has by its name."""
        order = json.dumps([action.__module__, action.__name__, arguments])
        command = [sys.executable, "-m", "tests.integration.trainers", str(self._home), order]
        output = self._home / f"{next(self._numbers)}.out"
        with output.open("wb") as file:
            process = warm.start(command, cwd=ROOT, stdout=file, stderr=file)
        return Trainer(process, output)


def _leave_of(home: Path, pid: int) -> Path:
    return home / f"{pid}.go"


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
    leave = _leave_of(Path(sys.argv[1]), os.getpid())
    while not leave.exists():
        time.sleep(0.01)


if __name__ == "__main__":
    module, name, arguments = json.loads(sys.argv[2])
    getattr(importlib.import_module(module), name)(**arguments)
