"""Connections of this process, ended from outside of whoever uses them."""

from __future__ import annotations

import os
import socket
import stat
import struct
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

_OPEN_FILES = "/proc/self/fd"


def end_connections(places: Sequence[bytes]) -> None:
    """Ends every TCP connection of this process, one end of which is at one of ``places``.

    Both sides see the connection closed; the file stays open, and is its owner's to close.
    Where the system does not list a process's open files, nothing happens.

    Args:
        places: Socket addresses as the system has them in memory (``sockaddr_in``,
            ``sockaddr_in6``), with anything around them.
    """
    with suppress(OSError):
        for number in map(int, os.listdir(_OPEN_FILES)):
            with suppress(OSError):
                if stat.S_ISSOCK(os.fstat(number).st_mode):
                    _end_if_at(number, places)


def _end_if_at(number: int, places: Sequence[bytes]) -> None:
    with socket.socket(fileno=os.dup(number)) as connection:
        if connection.family not in (socket.AF_INET, socket.AF_INET6):
            return
        ends = (connection.getpeername(), connection.getsockname())
        if any(_in_memory(end) in place for end in ends for place in places):
            connection.shutdown(socket.SHUT_RDWR)


def _in_memory(end: Any) -> bytes:
    """Port and address of an end, as they lie in a ``sockaddr``.

    Example:
        >>> _in_memory(("127.0.0.1", 258)).hex()
        '01027f000001'
    """
    host, port, *_ = end
    if ":" in host:
        return struct.pack("!HI", port, 0) + socket.inet_pton(socket.AF_INET6, host)
    return struct.pack("!H", port) + socket.inet_aton(host)
