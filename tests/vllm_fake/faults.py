"""What may be made to go wrong in one call of a fake."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

Kind = Literal["refuse", "close", "hang", "slow", "die", "stop", "torn"]
When = Literal["before", "inside", "after"]


@dataclass
class Fault:
    """One thing that goes wrong.

    Attributes:
        path: The route that is struck.
        kind: ``refuse`` (500), ``close`` (no answer), ``hang``, ``slow``, ``die`` (-9), ``stop``
            (-STOP), ``torn`` (an update that fails once it loaded a few tensors).
        when: Before the call does anything, or once it did everything; ``inside`` keeps the core
            busy, so that whoever asks it anything hangs as well.
        after: Calls that pass first.
        times: Calls that are struck.
        seconds: How long ``slow`` takes.
        tensors: How many ``torn`` loads.
    """

    path: str
    kind: Kind
    when: When = "before"
    after: int = 0
    times: int = 1
    seconds: float = 0.3
    tensors: int = 3

    def strikes(self) -> bool:
        """Whether this call is struck; counts it."""
        if self.after:
            self.after -= 1
            return False
        self.times -= 1
        return self.times >= 0


class Refused(RuntimeError):
    """An answer of 500."""


class Closed(RuntimeError):
    """No answer at all."""


class Faults:
    """Those that are still to come."""

    def __init__(self) -> None:
        self._waiting: list[Fault] = []
        self._lock = threading.Lock()
        self._let_go = threading.Event()

    def inject(self, fault: Fault) -> None:
        """Adds one."""
        self._waiting.append(fault)

    def clear(self) -> None:
        """Forgets all, and lets those that hang go on."""
        self._waiting = []
        self._let_go.set()
        self._let_go = threading.Event()

    @contextmanager
    def around(self, path: str) -> Iterator[Fault | None]:
        """Lets a call be struck; yields its fault, for those that act in between."""
        fault = self._due(path)
        if fault is not None and fault.when == "before":
            self._strike(fault)
        yield fault
        if fault is not None and fault.when == "after":
            self._strike(fault)

    def hang(self) -> None:
        """Waits until all is cleared, and answers nothing."""
        self._let_go.wait()
        raise Closed

    def _due(self, path: str) -> Fault | None:
        with self._lock:
            return next((f for f in self._waiting if f.path == path and f.strikes()), None)

    def _strike(self, fault: Fault) -> None:
        if fault.kind == "refuse":
            raise Refused("injected")
        if fault.kind == "close":
            raise Closed
        if fault.kind == "hang":
            self.hang()
        if fault.kind == "slow":
            time.sleep(fault.seconds)
        elif fault.kind in ("die", "stop"):
            strike = signal.SIGKILL if fault.kind == "die" else signal.SIGSTOP
            os.kill(os.getpid(), strike)
