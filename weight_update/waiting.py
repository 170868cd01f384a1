"""Deadlines and daemon threads: every wait of the library is bounded through these two."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextvars import copy_context
from dataclasses import dataclass
from functools import partial
from itertools import repeat
from queue import Empty, SimpleQueue
from traceback import clear_frames
from typing import TypeVar

T = TypeVar("T")

_IDLE_SECONDS = 10.0


@dataclass(frozen=True)
class Clock:
    """Where time comes from; tests bring a clock of their own.

    Attributes:
        now: Monotonic seconds.
        sleep: Lets some seconds pass.
    """

    now: Callable[[], float] = time.monotonic
    sleep: Callable[[float], None] = time.sleep


class Deadline:
    """A moment that several waits share.

    Args:
        seconds: Time from now until the deadline.
        clock: Where time comes from.

    Example:
        >>> ticks = iter([0.0, 4.0, 11.0])
        >>> deadline = Deadline(10.0, Clock(now=lambda: next(ticks)))
        >>> deadline.remaining()
        6.0
        >>> deadline.expired()
        True
    """

    def __init__(self, seconds: float, clock: Clock | None = None) -> None:
        self.seconds = seconds
        self._clock = clock or Clock()
        self._end = self._clock.now() + seconds

    def remaining(self) -> float:
        """Seconds left, never below zero."""
        return max(0.0, self._end - self._clock.now())

    def expired(self) -> bool:
        """Whether no time is left."""
        return self.remaining() <= 0.0

    def at_most(self, seconds: float) -> Deadline:
        """A deadline that ends with this one or after ``seconds``, whichever is sooner."""
        return Deadline(min(seconds, self.remaining()), self._clock)

    def share(self, part: float) -> Deadline:
        """A deadline that takes a part of what is left, so that later steps have the rest."""
        return Deadline(part * self.remaining(), self._clock)

    def afresh(self, seconds: float) -> Deadline:
        """A deadline by the same clock that this one does not bound."""
        return Deadline(seconds, self._clock)

    def sleep(self, seconds: float) -> None:
        """Lets ``seconds`` pass."""
        self._clock.sleep(seconds)

    def outlasts(self, pause: float) -> bool:
        """Lets a pause pass if there is time for it; whether some is left for another try.

        A busy machine sleeps longer than it was told to: who asked before the pause only would try
        again too late, and lose the words of the try before.
        """
        if self.remaining() <= pause:
            return False
        self.sleep(pause)
        return not self.expired()


def retry_pauses() -> Iterator[float]:
    """Seconds between two tries of a call that is refused for a while: short ones first.

    Example:
        >>> from itertools import islice
        >>> list(islice(retry_pauses(), 7))
        [0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 1.0]
    """
    yield from (0.02, 0.05, 0.1, 0.2, 0.5)
    yield from repeat(1.0)


def spawn(call: Callable[..., T], *args: object) -> Future[T]:
    """Runs ``call(*args)`` in a daemon thread of its own.

    Executors join their threads when the interpreter exits, so one stuck request would keep a
    finished trainer alive; a daemon thread cannot. It runs in a copy of the caller's context.

    Raises:
        RuntimeError: The interpreter is being torn down.
    """
    _refuse_after_the_end()
    future: Future[T] = Future()
    run = copy_context().run
    threading.Thread(target=run, args=(_settle, future, call, args), daemon=True).start()
    return future


def hand_over(call: Callable[..., T], *args: object) -> Future[T]:
    """As :func:`spawn`, in a thread that did such a call before, if one is idle.

    To wake a thread takes a fifth of what a new one takes. Only for calls that leave nothing behind
    in their thread: none of the caller's own code, which may set a device or a mode of torch.
    """
    _refuse_after_the_end()
    future: Future[T] = Future()
    _idle.put(partial(copy_context().run, _settle, future, call, args))
    return future


class _IdleThreads:
    """Daemon threads between two jobs; one that waits for too long ends."""

    def __init__(self) -> None:
        self._waiting: list[SimpleQueue[Callable[[], object]]] = []

    def put(self, job: Callable[[], object]) -> None:
        """Wakes a thread, or starts one."""
        try:
            inbox = self._waiting.pop()
        except IndexError:
            inbox = SimpleQueue()
            threading.Thread(target=self._serve, args=(inbox,), daemon=True).start()
        inbox.put(job)

    def forget(self) -> None:
        """A fork has none of its parent's threads."""
        self._waiting.clear()

    def _serve(self, inbox: SimpleQueue[Callable[[], object]]) -> None:
        job: Callable[[], object] | None = inbox.get()
        while job is not None:
            job()
            job = None  # it holds what it was called with
            self._waiting.append(inbox)
            job = self._next(inbox)

    def _next(self, inbox: SimpleQueue[Callable[[], object]]) -> Callable[[], object] | None:
        try:
            return inbox.get(timeout=_IDLE_SECONDS)
        except Empty:
            pass
        try:
            self._waiting.remove(inbox)
        except ValueError:  # taken at this very moment: its job is on the way
            return inbox.get()
        return None


_idle = _IdleThreads()
os.register_at_fork(after_in_child=_idle.forget)


def _refuse_after_the_end() -> None:
    # No thread of Python's runs any more then, and who starts one waits for it for ever.
    if sys.is_finalizing():
        raise RuntimeError("the interpreter is being torn down")


def _settle(future: Future[T], call: Callable[..., T], args: tuple[object, ...]) -> None:
    try:
        future.set_result(call(*args))
    except BaseException as error:  # noqa: BLE001 - the waiter re-raises it
        clear_frames(error.__traceback__)  # an error that is kept would keep a bucket's memory
        future.set_exception(error)
    finally:
        del future, call, args  # an error refers to this frame
