"""Deadlines and daemon threads: every wait of the library is bounded through these two."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

T = TypeVar("T")


class Deadline:
    """A moment that several waits share.

    Args:
        seconds: Time from now until the deadline.
        clock: Source of monotonic seconds.

    Example:
        >>> ticks = iter([0.0, 4.0, 11.0])
        >>> deadline = Deadline(10.0, clock=lambda: next(ticks))
        >>> deadline.remaining()
        6.0
        >>> deadline.expired()
        True
    """

    def __init__(self, seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        self.seconds = seconds
        self._clock = clock
        self._end = clock() + seconds

    def remaining(self) -> float:
        """Seconds left, never below zero."""
        return max(0.0, self._end - self._clock())

    def expired(self) -> bool:
        """Whether no time is left."""
        return self.remaining() <= 0.0

    def at_most(self, seconds: float) -> Deadline:
        """A deadline that ends with this one or after ``seconds``, whichever is sooner."""
        return Deadline(min(seconds, self.remaining()), self._clock)


def spawn(call: Callable[..., T], *args: object) -> Future[T]:
    """Runs ``call(*args)`` in a daemon thread of its own.

    Executors join their threads when the interpreter exits, so one stuck request would keep a
    finished trainer alive; a daemon thread cannot.
    """
    future: Future[T] = Future()
    threading.Thread(target=_settle, args=(future, call, args), daemon=True).start()
    return future


def _settle(future: Future[T], call: Callable[..., T], args: tuple[object, ...]) -> None:
    try:
        future.set_result(call(*args))
    except BaseException as error:  # noqa: BLE001 - the waiter re-raises it
        future.set_exception(error)
