"""Worker processes that count: a pipe to each, and a thread at its other end.

Frames carry the number of the worker that made them, and a worker's main thread makes frames. So
each worker has a daemon thread that waits at a pipe for a version, counts, and answers. A pipe
tells by itself that its worker is dead.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import suppress
from multiprocessing import context as processes
from multiprocessing.connection import Connection, wait
from threading import Lock
from typing import Any

from weight_update.waiting import Deadline, spawn

Count = Callable[[int], list[str]]
"""Counts a version, and returns what went wrong, in words."""


class Workers:
    """The parent's ends of the pipes to the workers of one collector.

    Args:
        ends: One for each worker.
        owner: What they are workers of, for warnings.
    """

    def __init__(self, ends: Sequence[Connection], owner: str) -> None:
        self._ends = dict(enumerate(ends))
        self._owner = owner
        self._one_at_a_time = Lock()

    def count(self, version: int, seconds: float) -> list[str]:
        """Has all workers count; one that is dead is told of once, and not waited for.

        Args:
            version: The version that the engines have now.
            seconds: How long answers are waited for. A worker that answers later counts then.

        Returns:
            What went wrong, in words.
        """
        with self._one_at_a_time:
            words = {i: "is gone" for i, end in self._ends.items() if not _tell(end, version)}
            words |= self._answers(version, Deadline(seconds), set(self._ends) - set(words))
            for index in [i for i, word in words.items() if word == "is gone"]:
                self._ends.pop(index).close()
            told = sorted(words.items())
            return [f"worker {i} of {self._owner} {word}" for i, word in told if word]

    def close(self) -> None:
        """Ends the threads in the workers."""
        while self._ends:
            self._ends.popitem()[1].close()

    def _answers(self, version: int, deadline: Deadline, waiting: set[int]) -> dict[int, str]:
        words: dict[int, str] = {}
        while waiting:
            ready = wait([self._ends[i] for i in waiting], timeout=deadline.remaining())
            if not ready:
                late = f"did not count version {version} within {deadline.seconds:.0f} s"
                return words | dict.fromkeys(waiting, late)
            for index in [i for i in waiting if self._ends[i] in ready]:
                answer = _hear(self._ends[index], version)
                if answer is not None:
                    words[index] = answer
                    waiting.discard(index)
        return words


class WorkerEnds:
    """The workers' ends of the pipes, which reach the workers with what they are started with.

    Pickled anywhere else they are left out: a pipe belongs to two processes.

    Args:
        ends: One for each worker.
    """

    def __init__(self, ends: Sequence[Connection]) -> None:
        self._ends = list(ends)

    @property
    def all(self) -> list[Connection]:
        """Those that are open."""
        return list(self._ends)

    def take(self, index: int | None) -> Connection | None:
        """The end of one worker, in that worker; the others' are closed.

        Held open here, they would hide the death of another worker.
        """
        taken = None if index is None or index >= len(self._ends) else self._ends.pop(index)
        self.close()
        return taken

    def close(self) -> None:
        """Closes all; in the parent, once the workers were started."""
        while self._ends:
            self._ends.pop().close()

    def __getstate__(self) -> dict[str, Any]:
        starting = processes.get_spawning_popen() is not None
        return {"_ends": list(self._ends) if starting else []}


def pipes(ctx: Any, count: int, owner: str) -> tuple[Workers, WorkerEnds]:
    """Both ends of a pipe to each worker.

    Args:
        ctx: How processes are started: ``multiprocessing``, or one of its contexts.
        count: The number of workers.
        owner: What they are workers of, for warnings.
    """
    pairs = [ctx.Pipe() for _ in range(count)]
    return Workers([ours for ours, _ in pairs], owner), WorkerEnds([theirs for _, theirs in pairs])


def count_at(end: Connection, count: Count) -> Future[None]:
    """Starts the thread of a worker; it ends when the parent closes the pipe, or dies."""
    return spawn(_serve, end, count)


def _serve(end: Connection, count: Count) -> None:
    with suppress(EOFError, OSError), end:
        while True:
            version = end.recv()
            end.send((version, "; ".join(_words_of(count, version))))


def _words_of(count: Count, version: int) -> Iterator[str]:
    try:
        yield from count(version)
    except Exception as error:  # noqa: BLE001 - told to the parent, which warns of it
        yield f"failed ({type(error).__name__}: {error})"


def _tell(end: Connection, version: int) -> bool:
    try:
        end.send(version)
    except OSError:
        return False
    return True


def _hear(end: Connection, version: int) -> str | None:
    """The answer to a version; None when it is a late one to an earlier version."""
    try:
        answered, words = end.recv()
    except (EOFError, OSError):
        return "is gone"
    return str(words) if answered == version else None
