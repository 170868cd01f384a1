"""The HTTP layer's own state: the pause condition and the lock between requests and updates."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager


class ReadWriteLock:
    """Many generate requests or one update; a waiting update goes before new requests."""

    def __init__(self) -> None:
        self._changed = asyncio.Condition()
        self._writing = False
        self._writers_waiting = 0
        self.readers = 0

    @asynccontextmanager
    async def reading(self) -> AsyncIterator[None]:
        """Hold the lock as one of many."""
        async with self._changed:
            await self._changed.wait_for(lambda: not (self._writing or self._writers_waiting))
            self.readers += 1
        try:
            yield
        finally:
            async with self._changed:
                self.readers -= 1
                self._changed.notify_all()

    @asynccontextmanager
    async def writing(self) -> AsyncIterator[None]:
        """Hold the lock alone."""
        await self._start_writing()
        try:
            yield
        finally:
            async with self._changed:
                self._writing = False
                self._changed.notify_all()

    async def _start_writing(self) -> None:
        async with self._changed:
            self._writers_waiting += 1
            try:
                await self._changed.wait_for(lambda: not (self._writing or self.readers))
                self._writing = True
            finally:
                self._writers_waiting -= 1


class Gate:
    """Holds new requests while paused, and keeps updates apart from running requests."""

    def __init__(self, continue_waits: bool, poll_seconds: float = 1.0) -> None:
        self.paused = False
        self._continue_waits = continue_waits
        self._poll_seconds = poll_seconds
        self._condition = asyncio.Condition()
        self._lock = ReadWriteLock()

    @asynccontextmanager
    async def request(self) -> AsyncIterator[None]:
        """Let one generate request in, as soon as the engine is not paused."""
        async with self._condition:
            await self._condition.wait_for(lambda: not self.paused)
        async with self._lock.reading():
            yield

    @asynccontextmanager
    async def update(self) -> AsyncIterator[bool]:
        """Let one update in, and say whether it runs under a pause.

        Under a pause it holds the pause condition, if ``continue`` is to wait for it. Otherwise
        it waits for all running requests. Which of the two is decided once, on arrival.
        """
        async with self._condition:
            paused = self.paused
            if paused and self._continue_waits:
                yield True
                return
        if paused:
            yield True
            return
        async with self._lock.writing():
            yield False

    async def pause(self, stop_requests: Callable[[], object], drain: bool) -> None:
        """Hold new requests; with ``drain``, repeat ``stop_requests`` until none is in flight."""
        async with self._condition:
            self.paused = True
            stop_requests()
            while drain and self._lock.readers:
                await asyncio.sleep(self._poll_seconds)
                stop_requests()

    async def resume(self, restart: Callable[[], object]) -> None:
        """Let held requests go on."""
        async with self._condition:
            self.paused = False
            restart()
            self._condition.notify_all()

    async def wait_unpaused(self, probe: Callable[[], Awaitable[object]]) -> None:
        """Run ``probe`` as soon as the engine is not paused."""
        async with self._condition:
            await self._condition.wait_for(lambda: not self.paused)
        await probe()
