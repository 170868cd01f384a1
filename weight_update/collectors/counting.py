"""Who counts updates: collectors whose policy version moves once an update, and never twice."""

from __future__ import annotations

from concurrent.futures import Future, wait
from typing import Any

from weight_update.errors import ConfigurationError
from weight_update.waiting import spawn

# Engines wait, paused, while collectors count.
_COUNT_SECONDS = 5.0


class Counters:
    """The collectors that count the updates of one sender, each once."""

    def __init__(self) -> None:
        self._collectors: list[Any] = []

    def add(self, collector: Any) -> None:
        """Has a collector count; one that counts already is left as it is.

        Raises:
            ConfigurationError: It has no ``increment_version``.
        """
        if not callable(getattr(collector, "increment_version", None)):
            raise ConfigurationError(f"{type(collector).__name__} has no increment_version()")
        if not any(known is collector for known in self._collectors):
            self._collectors.append(collector)

    def clear(self) -> None:
        """Nobody counts any more."""
        self._collectors.clear()

    def count(self, version: int) -> list[str]:
        """Counts in threads: a collector that hangs must not keep others from counting.

        Args:
            version: The version that the engines have now.

        Returns:
            What went wrong, in words.
        """
        calls = [(c, spawn(c.increment_version)) for c in self._collectors]
        wait([call for _, call in calls], timeout=_COUNT_SECONDS)
        return [
            f"{type(collector).__name__}.increment_version() {words} at version {version}"
            for collector, call in calls
            if (words := _trouble_of(call))
        ]


def _trouble_of(call: Future[Any]) -> str:
    if not call.done():
        return f"did not return within {_COUNT_SECONDS:.0f} s"
    error = call.exception()
    return "" if error is None else f"failed ({type(error).__name__}: {error})"
