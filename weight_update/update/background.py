"""Updates in the background: one at a time, in order, and the newest weights win."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from contextvars import Context

from weight_update.report import UpdateReport
from weight_update.waiting import spawn

Push = Callable[[], UpdateReport]


class Background:
    """Runs pushes one after the other in a thread of their own.

    At most one waits: a newer one takes its place, and its future. So a trainer that is faster
    than the engines never builds up a queue, and versions stay in order.

    Example:
        >>> background = Background()
        >>> background.submit(lambda: "a report").result()
        'a report'
    """

    def __init__(self) -> None:
        self._changing = threading.Lock()
        self._next: tuple[Push, Future[UpdateReport]] | None = None
        self._works = False

    def submit(self, push: Push) -> Future[UpdateReport]:
        """Has ``push`` run once the one that runs now has ended.

        Returns:
            The future of its report. A push that was waiting is not run any more; whoever holds
            its future gets this one's report.
        """
        with self._changing:
            waiting = self._next[1] if self._next is not None else None
            reusable = waiting is not None and not waiting.cancelled()
            future = waiting if waiting is not None and reusable else Future()
            self._next = (push, future)
            if not self._works:
                self._works = True
                # A context of its own: a hook that submits is no part of what it submits.
                Context().run(spawn, self._work)
            return future

    def cancel(self) -> None:
        """Forgets the push that waits; one that runs is left to end."""
        with self._changing:
            waiting, self._next = self._next, None
        if waiting is not None:
            waiting[1].cancel()

    def _work(self) -> None:
        while (job := self._take()) is not None:
            push, future = job
            if not future.set_running_or_notify_cancel():
                continue
            try:
                future.set_result(push())
            except BaseException as error:  # noqa: BLE001 - whoever holds the future gets it
                future.set_exception(error)

    def _take(self) -> tuple[Push, Future[UpdateReport]] | None:
        with self._changing:
            job, self._next = self._next, None
            self._works = job is not None
            return job
