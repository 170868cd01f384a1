"""Connections of a group that cannot be dropped are ended from outside, and only those."""

from __future__ import annotations

import os
import socket
import struct
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from weight_update.transports.sockets import end_connections

pytestmark = pytest.mark.skipif(not Path("/proc/self/fd").is_dir(), reason="needs /proc")

PATIENCE = 20.0
Connect = Callable[[str], tuple[socket.socket, socket.socket]]


@pytest.fixture
def connect() -> Iterator[Connect]:
    """Makes connections of this process with itself: the calling end and the called one."""
    with ExitStack() as opened:

        def connected(host: str) -> tuple[socket.socket, socket.socket]:
            family = socket.AF_INET6 if ":" in host else socket.AF_INET
            with socket.create_server((host, 0), family=family) as listener:
                caller = opened.enter_context(
                    socket.create_connection(listener.getsockname()[:2], timeout=PATIENCE)
                )
                called = opened.enter_context(listener.accept()[0])
            called.settimeout(PATIENCE)
            return caller, called

        yield connected


def has_ipv6() -> bool:
    try:
        with socket.create_server(("::1", 0), family=socket.AF_INET6):
            return True
    except OSError:
        return False


HOSTS = [
    "127.0.0.1",
    pytest.param("::1", marks=pytest.mark.skipif(not has_ipv6(), reason="no IPv6 loopback")),
]


def place_of(end: tuple[object, ...]) -> bytes:
    """An address as the system has it in memory, among other bytes."""
    host, port = str(end[0]), int(str(end[1]))
    if ":" in host:
        packed = struct.pack("=H", socket.AF_INET6) + struct.pack("!HI", port, 0)
        packed += socket.inet_pton(socket.AF_INET6, host) + bytes(4)
    else:
        packed = struct.pack("=H", socket.AF_INET) + struct.pack("!H", port)
        packed += socket.inet_aton(host) + bytes(8)
    return b"before" + packed + b"after"


def still_carries(one: socket.socket, other: socket.socket) -> bool:
    one.sendall(b"x")
    return other.recv(1) == b"x"


@pytest.mark.parametrize("host", HOSTS)
def test_both_ends_see_a_connection_closed_that_was_called_at_a_place(
    connect: Connect, host: str
) -> None:
    caller, called = connect(host)

    end_connections([place_of(called.getsockname())])

    assert called.recv(1) == b""
    assert caller.recv(1) == b""


def test_any_of_several_places_will_do(connect: Connect) -> None:
    caller, called = connect("127.0.0.1")

    end_connections([b"", place_of(("10.0.0.1", 1)), place_of(called.getsockname())])

    assert caller.recv(1) == b""


@pytest.mark.parametrize("host", HOSTS)
def test_connections_elsewhere_go_on(connect: Connect, host: str) -> None:
    doomed, others = connect(host), connect(host)

    end_connections([place_of(doomed[1].getsockname())])

    assert still_carries(*others)
    assert still_carries(*reversed(others))


def test_without_places_nothing_is_ended(connect: Connect) -> None:
    ends = connect("127.0.0.1")

    end_connections([])

    assert still_carries(*ends)


def test_a_listener_at_the_place_takes_calls_as_before() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        end_connections([place_of(listener.getsockname())])

        with socket.create_connection(listener.getsockname(), timeout=PATIENCE) as caller:
            called = listener.accept()[0]
            with called:
                assert still_carries(caller, called)


def test_sockets_that_are_no_network_connections_are_left_alone(connect: Connect) -> None:
    _, called = connect("127.0.0.1")
    one, other = socket.socketpair()
    with one, other:
        end_connections([place_of(called.getsockname())])

        assert still_carries(one, other)


def test_a_file_stays_its_owners_to_close(connect: Connect) -> None:
    caller, called = connect("127.0.0.1")

    end_connections([place_of(called.getsockname())])

    assert os.fstat(caller.fileno())
    assert os.fstat(called.fileno())


def test_no_file_descriptor_is_left_open(connect: Connect) -> None:
    _, called = connect("127.0.0.1")
    with socket.create_server(("127.0.0.1", 0)) as listener:
        places = [place_of(called.getsockname()), place_of(listener.getsockname())]
        before = open_sockets()

        for _ in range(5):
            end_connections(places)

        end = time.monotonic() + PATIENCE
        while open_sockets() - before and time.monotonic() < end:
            time.sleep(0.01)  # another thread of the tests may open one for a moment
        assert open_sockets() - before == set()


def open_sockets() -> set[tuple[str, str]]:
    links = [(number, f"/proc/self/fd/{number}") for number in os.listdir("/proc/self/fd")]
    return {(number, os.readlink(path)) for number, path in links if is_socket(path)}


def is_socket(path: str) -> bool:
    try:
        return os.readlink(path).startswith("socket:")
    except OSError:
        return False
