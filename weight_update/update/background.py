"""Updates in the background: one at a time, in order, and the newest weights win."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, wait
from contextvars import Context

from weight_update.report import UpdateReport
from weight_update.waiting import spawn

Push = Callable[[], UpdateReport]


class Background:
    """Runs pushes one after the other in a thread of their own.

    At most one waits: a newer one takes its place. So a trainer that is faster
    than the engines never builds up a queue, and versions stay in order.

    Example:
        >>> background = Background()
        >>> background.submit(lambda: "a report").result()
        'a report'
    """

    def __init__(self) -> None:
        self._changing = threading.Lock()
        self._next: Push | None = None
        self._waiting: list[Future[UpdateReport]] = []
        self._running: list[Future[UpdateReport]] = []
        self._works = False

    def submit(self, push: Push) -> Future[UpdateReport]:
        """Has ``push`` run once the one that runs now has ended.

        Returns:
            The future of its report. A push that was waiting is not run any more; its future
            gets this one's report.
        """
        with self._changing:
            future: Future[UpdateReport] = Future()
            self._next = push
            self._waiting.append(future)
            if not self._works:
                self._works = True
                # A context of its own: a hook that submits is no part of what it submits.
                Context().run(spawn, self._work)
            return future

    def cancel(self) -> None:
        """Forgets the push that waits; one that runs is left to end."""
        with self._changing:
            waiting, self._waiting, self._next = self._waiting, [], None
        for future in waiting:
            future.cancel()

    def finish(self, seconds: float) -> None:
        """Waits for what runs and what waits, for at most ``seconds``."""
        with self._changing:
            futures = [*self._running, *self._waiting]
        wait(futures, timeout=seconds)

    def _work(self) -> None:
        while (push := self._take()) is not None:
            futures = [f for f in self._running if f.set_running_or_notify_cancel()]
            if not futures:
                continue
            try:
                report = push()
            except BaseException as error:  # noqa: BLE001 - whoever holds the future gets it
                for future in futures:
                    future.set_exception(error)
            else:
                for future in futures:
                    future.set_result(report)

    def _take(self) -> Push | None:
        with self._changing:
            push, self._next = self._next, None
            self._running, self._waiting = self._waiting, []
            self._works = push is not None
            return push
