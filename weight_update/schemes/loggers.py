"""Loggers: each gets the numbers of every update, and none can hold one up."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, wait
from dataclasses import dataclass
from typing import Any

from weight_update.delivery.metrics import Standing, metrics_of
from weight_update.errors import ConfigurationError
from weight_update.report import UpdateReport
from weight_update.waiting import Clock, spawn

_log = logging.getLogger("weight_update")

# As a rule a logger has written before update_weights() returns: it is used by one thread at a
# time then, and what was logged can be read.
_PATIENCE_SECONDS = 1.0
_BACKLOG = 1000


@dataclass(frozen=True)
class Start:
    """Where an update began.

    Attributes:
        version: The version that the sender had.
        taken: When the trainer handed the weights over.
    """

    version: int
    taken: float


@dataclass(frozen=True)
class _Entry:
    report: UpdateReport
    standing: Standing


class Loggers:
    """The loggers of a sender or a scheme, and what its updates came to so far.

    Args:
        clock: Where time comes from.
        told: Loggers that are told of the same updates: whoever is among them hears once.
    """

    def __init__(self, clock: Clock | None = None, told: Loggers | None = None) -> None:
        self._now = (clock or Clock()).now
        self._told = told
        self._feeds: list[_Feed] = []
        self._history = History()

    def add(self, logger: Any) -> None:
        """Has a logger written to; one that is known already is left as it is.

        Raises:
            ConfigurationError: It has no ``log_scalar``, or is a class.
        """
        if isinstance(logger, type):
            raise ConfigurationError(f"{logger.__name__} is a class: register a logger of it")
        if not callable(getattr(logger, "log_scalar", None)):
            raise ConfigurationError(
                f"{type(logger).__name__} has no log_scalar()",
                remedy="register one of torchrl.record.loggers, or a post-hook",
            )
        if logger not in self:
            self._feeds.append(_Feed(logger))

    def __contains__(self, logger: object) -> bool:
        return any(feed.logger is logger for feed in self._feeds)

    def settle(self) -> None:
        """Waits until all have written, for a second at most."""
        writing = [feed.writing for feed in self._feeds]
        wait([future for future in writing if future], timeout=_PATIENCE_SECONDS)

    def clear(self) -> None:
        """Forgets all loggers, once they have written; waits for a second at most."""
        self.settle()
        self._feeds = []

    def now(self) -> float:
        """The moment at which an update takes the weights."""
        return self._now()

    def tell(self, report: UpdateReport, start: Start, *, failed: bool) -> None:
        """Has every logger write an update; a slow one is not waited for twice.

        Args:
            report: What it came to.
            start: Where it began.
            failed: Whether it raised.
        """
        entry = _Entry(report, self._history.note(report, start, self._now(), failed))
        feeds = [f for f in self._feeds if self._told is None or f.logger not in self._told]
        writing = [(feed, feed.put(entry)) for feed in feeds]
        _, late = wait([w for feed, w in writing if not feed.late], timeout=_PATIENCE_SECONDS)
        for feed, future in writing:
            if future in late:
                feed.note_late()


class History:
    """Counts what ended how, and remembers when engines got what they serve."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._updates = self._failures = self._version = 0
        self._served: float | None = None

    def note(self, report: UpdateReport, start: Start, now: float, failed: bool) -> Standing:
        """Counts one update.

        An update that raised after the engines had everything (one could not be resumed) moved
        the version: its weights are the ones that are served.
        """
        with self._lock:
            reached = not failed or report.version > max(self._version, start.version)
            self._updates += not failed
            self._failures += failed
            before, self._version = self._served, report.version
            if reached:
                self._served = start.taken
            return Standing(
                updates=self._updates,
                failures=self._failures,
                failed=failed,
                due=report.version if reached else report.version + 1,
                served_seconds=None if self._served is None else now - self._served,
                replaced_seconds=now - before if reached and before is not None else None,
            )


class _Feed:
    """Writes to one logger, in order, from one thread at a time."""

    def __init__(self, logger: Any) -> None:
        self.logger = logger
        self.late = False
        self.writing: Future[None] | None = None
        self._entries: deque[_Entry] = deque(maxlen=_BACKLOG)  # of one that hangs, the newest
        self._lock = threading.Lock()
        self._told: set[str] = set()

    def put(self, entry: _Entry) -> Future[None]:
        with self._lock:
            self._entries.append(entry)
            if self.writing is None:
                self.writing = spawn(self._write_all)
            return self.writing

    def note_late(self) -> None:
        self.late = True
        self._warn(
            f"did not return within {_PATIENCE_SECONDS:.0f} s; updates go on without waiting for it"
        )

    def _write_all(self) -> None:
        while (entry := self._take()) is not None:
            try:
                _write(self.logger, entry)
            except BaseException as error:  # noqa: BLE001 - a full disk must not stop a trainer
                self._warn(f"failed ({type(error).__name__}: {error}); updates go on", error)

    def _take(self) -> _Entry | None:
        with self._lock:
            if self._entries:
                return self._entries.popleft()
            self.writing = None
            return None

    def _warn(self, words: str, error: BaseException | None = None) -> None:
        kind = type(error).__name__
        if kind not in self._told:
            self._told.add(kind)
            _log.warning("logger %s %s", type(self.logger).__name__, words, exc_info=error)


def _write(logger: Any, entry: _Entry) -> None:
    metrics, step = metrics_of(entry.report, entry.standing), entry.report.version
    log_all: Callable[..., Any] | None = getattr(logger, "log_metrics", None)
    if callable(log_all):  # one row, one call where the logger lives elsewhere
        log_all(metrics, step=step)
        return
    for name, value in metrics.items():
        logger.log_scalar(name, value, step=step)
