"""Who counts updates: collectors whose policy version moves once an update, and never twice."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

from weight_update.collectors.self_counting import moved_by, self_counting
from weight_update.waiting import spawn

# Engines wait, paused, while collectors count.
_COUNT_SECONDS = 5.0


class Remote(Protocol):
    """Whoever counts for a collector in other processes: its workers, or actors."""

    def count(self, version: int, seconds: float) -> list[str]:
        """Has all of them count, and waits ``seconds`` for it; returns what went wrong."""

    def close(self) -> None:
        """They count no more."""


@dataclass(frozen=True)
class _Counted:
    """A collector that counts.

    Attributes:
        collector: As it was registered.
        here: Whether its own ``increment_version()`` is called, in this process.
        remote: Who counts elsewhere; frames carry the numbers of those.
    """

    collector: Any
    here: bool
    remote: Remote | None


class Counters:
    """The collectors that count the updates of one sender, each once."""

    def __init__(self) -> None:
        self._counted: list[_Counted] = []

    def join(self, collector: Any, remote: Remote | None, *, here: bool = True) -> None:
        """Has a collector count that is not known yet, and those elsewhere that count for it."""
        known = self._counted
        self._counted = [*known, _Counted(collector, here and not is_handle(collector), remote)]

    def clear(self) -> None:
        """Nobody counts any more."""
        counted, self._counted = self._counted, []
        for one in counted:
            if one.remote is not None:
                one.remote.close()

    def for_caller(self) -> Callable[[int], list[str]]:
        """:meth:`count` for an update that the caller asks for now.

        A collector in whose own update the caller runs is left out: it counts by itself.
        """
        themselves = self_counting() if self._counted else []
        return lambda version: self.count(version, themselves)

    def count(self, version: int, themselves: Sequence[Any] = ()) -> list[str]:
        """Counts in threads: a collector that hangs must not keep others from counting.

        Collectors that share a tracker count once: it is its number that frames carry.

        Args:
            version: The version that the engines have now.
            themselves: Collectors that count without being told.

        Returns:
            What went wrong, in words.
        """
        calls = [*self._calls_elsewhere(version), *self._calls_here(themselves)]
        running = [(who, spawn(call)) for who, call in calls]
        wait([call for _, call in running], timeout=_COUNT_SECONDS)
        return [text for who, call in running for text in _troubles_of(who, call, version)]

    def _calls_here(self, themselves: Sequence[Any]) -> Iterator[tuple[str, Callable[[], Any]]]:
        moved = [moved_by(collector) for collector in themselves]
        for collector in (one.collector for one in self._counted if one.here):
            moves = moved_by(collector)
            if not any(moves is other for other in moved):
                moved.append(moves)
                yield f"{type(collector).__name__}.increment_version()", collector.increment_version

    def _calls_elsewhere(self, version: int) -> Iterator[tuple[str, Callable[[], Any]]]:
        # Less time than this waits, so that they can say who was late.
        for one in self._counted:
            if one.remote is not None:
                who = f"what makes the frames of {type(one.collector).__name__}"
                yield who, partial(one.remote.count, version, 0.8 * _COUNT_SECONDS)

    def __contains__(self, collector: object) -> bool:
        return any(
            one.collector is collector or (is_handle(collector) and one.collector == collector)
            for one in self._counted
        )


def is_handle(collector: object) -> bool:
    """Whether it stands for an actor; two handles of one are equal, and not the same object."""
    return callable(getattr(getattr(collector, "increment_version", None), "remote", None))


def _troubles_of(who: str, call: Future[Any], version: int) -> list[str]:
    if not call.done():
        return [f"{who} did not return within {_COUNT_SECONDS:.0f} s at version {version}"]
    error = call.exception()
    if error is not None:
        return [f"{who} failed ({type(error).__name__}: {error}) at version {version}"]
    told = call.result()
    return told if isinstance(told, list) else []
