"""Ports for servers that other processes start."""

from __future__ import annotations

import socket
from random import SystemRandom

# Below 32,768, from where Linux hands out ports to whoever wants any; above 19,999, where Ray's
# workers end. SGLang 0.5.15 takes the port 10,000 above its own too, and NCCL's is up to 1,000
# above it: all of these stay in between.
_PORTS = range(20_000, 22_500)


def free_port() -> int:
    """A port of the loopback address for a server that starts later, maybe after a minute.

    Nothing holds it meanwhile, so it is none of those that the system gives to connections and
    to sockets without a port of their own: such a one is likely to be gone by then.

    Raises:
        OSError: All of them are taken.

    Example:
        >>> 20_000 <= free_port() < 22_500
        True
    """
    for port in SystemRandom().sample(_PORTS, k=len(_PORTS)):
        if _is_free(port):
            return port
    raise OSError(f"no port from {_PORTS.start} to {_PORTS.stop - 1} is free")


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True
