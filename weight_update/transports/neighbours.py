"""Processes of one host: whether two share it, and whether one has ended."""

from __future__ import annotations

import os
import select
import socket
import weakref
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any


@cache
def this_host() -> str:
    """Equal on processes that see each other: of one host, and not in containers of their own."""
    parts = [socket.gethostname()]
    with suppress(OSError):
        parts.append(Path("/proc/sys/kernel/random/boot_id").read_text().strip())
        parts.append(os.readlink("/proc/self/ns/pid"))
    return " ".join(parts)


class Neighbour:
    """Another process of this host.

    Args:
        process: Its number.

    Example:
        >>> Neighbour(os.getpid()).ended()
        False
    """

    def __init__(self, process: int) -> None:
        self._gone = False
        self._watched: int | None = None
        opening: Any = getattr(os, "pidfd_open", None)  # Linux only
        try:
            self._watched = None if opening is None else opening(process)
        except ProcessLookupError:
            self._gone = True
        except OSError:
            return  # a sandbox that forbids it: the deadline ends what a death would have
        if self._watched is not None:
            weakref.finalize(self, os.close, self._watched)

    def ended(self) -> bool:
        """Whether it has surely ended; one whose parent has not noticed yet has, too."""
        if self._watched is not None and not self._gone:
            poll = select.poll()
            poll.register(self._watched, select.POLLIN)
            self._gone = bool(poll.poll(0))
        return self._gone
