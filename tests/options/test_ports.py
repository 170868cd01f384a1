"""Ports for servers that start later: none that the system gives away meanwhile."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from weight_update import ports

LINUX_GIVES_AWAY = Path("/proc/sys/net/ipv4/ip_local_port_range")


def test_no_port_is_one_that_the_system_gives_to_whoever_wants_any() -> None:
    """SGLang's own second process once took the port that its server was to listen on."""
    lowest = int(LINUX_GIVES_AWAY.read_text().split()[0]) if LINUX_GIVES_AWAY.exists() else 32_768
    # SGLang 0.5.15 listens 10,000 above too.
    assert all(ports.free_port() + 10_000 < lowest for _ in range(20))


def test_a_port_that_somebody_holds_is_not_given_out(monkeypatch: pytest.MonkeyPatch) -> None:
    port = ports.free_port()
    monkeypatch.setattr(ports, "_PORTS", range(port, port + 1))
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", port))
        holder.listen()
        with pytest.raises(OSError, match=f"no port from {port} to {port} is free"):
            ports.free_port()
    assert ports.free_port() == port
