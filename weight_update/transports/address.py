"""Where the rendezvous listens: an address that the engines can reach, bound before it is told."""

from __future__ import annotations

import errno
import ipaddress
import socket
import time
from collections.abc import Sequence
from urllib.parse import urlsplit

from weight_update.errors import ConfigurationError
from weight_update.options import MASTER_ADDRESS_VARIABLE, read_text
from weight_update.waiting import Deadline

# A fixed port may still be held by the group that this process has just given up.
_PORT_SECONDS = 2.0
# Reserved for documentation: no host has it, and the default route leads to it.
_ELSEWHERE = "192.0.2.1"


def choose_address(urls: Sequence[str]) -> str:
    """The local address from which this host routes to the engines.

    An engine on this host is reached over loopback; as soon as one is elsewhere, the address
    of that route is used for all, since this host reaches its own addresses too.

    Args:
        urls: The engines.

    Raises:
        ConfigurationError: A host name does not resolve, or no route leads to it.

    Example:
        >>> choose_address(["http://127.0.0.1:30000"])
        '127.0.0.1'
    """
    routes = [_local_address_towards(url) for url in urls]
    remote = [address for address in routes if not _parsed(address).is_loopback]
    return (remote or routes)[0]


def is_here(url: str) -> bool:
    """Whether an engine is on this host, as far as its URL tells.

    Raises:
        ConfigurationError: A host name does not resolve, or no route leads to it.

    Example:
        >>> is_here("http://127.0.0.1:30000")
        True
    """
    if not has_address(url):
        return False
    ours = _local_address_towards(url)
    return _parsed(ours).is_loopback or ours == _resolve(urlsplit(url).hostname or "")


def has_address(url: str) -> bool:
    """Whether a URL tells where its engine is; the name of a Ray actor does not.

    Example:
        >>> has_address("http://127.0.0.1:30000"), has_address("ray-actor://Engine.0a1b2c3d")
        (True, False)
    """
    return urlsplit(url).scheme in ("http", "https")


def check_address(address: str, said: str = "master_address") -> str:
    """Returns a user's master address if engines could ever reach it.

    Args:
        address: The address.
        said: By what argument or variable it was given.

    Raises:
        ConfigurationError: It is a wildcard or link-local, or does not resolve.

    Example:
        >>> check_address("[::1]")
        '::1'
    """
    bare = address.strip().removeprefix("[").removesuffix("]")
    try:
        numeric = _parsed(_resolve(bare))
    except (OSError, ValueError) as error:
        raise ConfigurationError(f"{said}={address!r} does not resolve: {error}") from error
    if numeric.is_unspecified or numeric.is_link_local or "%" in bare:
        raise ConfigurationError(
            f"{said}={address!r} cannot be reached from another process",
            remedy="name an address of this host on the network of the engines",
        )
    return bare


def read_master_address(argument: str | None) -> str | None:
    """The argument, else the environment's, checked; None when neither is set.

    Raises:
        ConfigurationError: It leads nowhere.

    Example:
        >>> read_master_address("127.0.0.1")
        '127.0.0.1'
    """
    if argument:
        return check_address(argument)
    address = read_text(MASTER_ADDRESS_VARIABLE)
    return check_address(address, MASTER_ADDRESS_VARIABLE) if address else None


def listen(address: str, port: int | None) -> socket.socket:
    """A socket that listens on ``address`` and ``port`` (any free port when None).

    Raises:
        ConfigurationError: The address is not this host's, or the port is taken.
    """
    patience = Deadline(_PORT_SECONDS if port else 0.0)
    while True:
        try:
            return _bound(address, port)
        except OSError as error:
            if patience.expired() or error.errno != errno.EADDRINUSE:
                raise ConfigurationError(
                    f"cannot listen on master_address={address!r}, master_port={port}: {error}",
                    phase="connect",
                    remedy=(
                        "leave master_port=None to take a free port"
                        if error.errno == errno.EADDRINUSE
                        else "name an address of this host, or leave master_address=None"
                    ),
                ) from error
        time.sleep(0.05)


def _bound(address: str, port: int | None) -> socket.socket:
    family = socket.AF_INET6 if ":" in _resolve(address) else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((address, port or 0))
        listener.listen(512)
    except OSError:
        listener.close()
        raise
    return listener


def _local_address_towards(url: str) -> str:
    parts = urlsplit(url)
    host = parts.hostname or ""
    if not has_address(url):
        return _outward_address()
    try:
        target = _resolve(host)
        family = socket.AF_INET6 if ":" in target else socket.AF_INET
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect((target, parts.port or 80))  # a route look-up: nothing is sent
            address: str = probe.getsockname()[0]
    except OSError as error:
        raise ConfigurationError(
            f"no route to {host!r}: {error}", engine=url, phase="connect", remedy="check the URL"
        ) from error
    if _parsed(address).is_link_local:
        raise ConfigurationError(
            f"only a link-local address ({address}) routes to {host!r}",
            engine=url,
            phase="connect",
            remedy="set master_address=",
        )
    return address


def _outward_address() -> str:
    """Where this host goes out from, as others of its network know it; loopback if it cannot."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((_ELSEWHERE, 80))  # a route look-up: nothing is sent
        except OSError:
            return "127.0.0.1"
        address: str = probe.getsockname()[0]
    return address


def _resolve(host: str) -> str:
    return str(socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][4][0])


def _parsed(address: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address:
    return ipaddress.ip_address(address.partition("%")[0])
