"""The rendezvous listens where the engines come from, and is owned before it is told (C11)."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from typing import Any

import pytest

from weight_update.errors import ConfigurationError
from weight_update.transports import address as address_module
from weight_update.transports.address import check_address, choose_address, listen


def has_ipv6() -> bool:
    try:
        with socket.create_server(("::1", 0), family=socket.AF_INET6):
            return True
    except OSError:
        return False


needs_ipv6 = pytest.mark.skipif(not has_ipv6(), reason="this host has no IPv6 loopback")


# -- which address -------------------------------------------------------------------------


@pytest.fixture
def network(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """A host with two networks: target address -> the local address that routes there."""
    routes = {
        "127.0.0.1": "127.0.0.1",
        "10.0.0.7": "10.0.0.1",
        "192.168.5.7": "192.168.5.1",
        "fd00::7": "fd00::1",
        "fe80::7": "fe80::1%eth0",
        "127.0.1.1": "127.0.0.1",
    }
    names = {"near": "10.0.0.7", "far": "192.168.5.7", "localhost": "127.0.0.1"}

    class Probe:
        def __init__(self, family: int, kind: int) -> None:
            assert kind == socket.SOCK_DGRAM, "a look-up must send nothing"

        def __enter__(self) -> Probe:
            return self

        def __exit__(self, *error: Any) -> None: ...

        def connect(self, target: tuple[str, int]) -> None:
            if target[0] not in routes:
                raise OSError("Network is unreachable")
            self._local = routes[target[0]]

        def getsockname(self) -> tuple[str, int]:
            return self._local, 1

    def look_up(host: str, *_: Any, **__: Any) -> list[Any]:
        if host in names:
            return [(None, None, None, "", (names[host], 0))]
        if host.replace(".", "").isdigit() or ":" in host:
            return [(None, None, None, "", (host, 0))]
        raise OSError(f"{host} is not known")

    monkeypatch.setattr(socket, "socket", Probe)
    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    monkeypatch.setattr(socket, "gethostname", lambda: pytest.fail("a host name tells nothing"))
    return names


@pytest.mark.usefixtures("network")
@pytest.mark.parametrize(
    ("urls", "chosen"),
    [
        (["http://127.0.0.1:1"], "127.0.0.1"),
        (["http://localhost:1"], "127.0.0.1"),
        (["http://10.0.0.7:1"], "10.0.0.1"),
        (["http://near:1"], "10.0.0.1"),
        (["https://far"], "192.168.5.1"),
        (["http://[fd00::7]:1"], "fd00::1"),
        (["http://127.0.0.1:1", "http://near:1"], "10.0.0.1"),
        (["http://near:1", "http://127.0.0.1:1"], "10.0.0.1"),
    ],
)
def test_the_address_is_the_one_that_routes_to_the_engines(urls: list[str], chosen: str) -> None:
    assert choose_address(urls) == chosen


def test_an_own_host_name_that_resolves_to_loopback_changes_nothing(network) -> None:
    network["me"] = "127.0.1.1"

    assert choose_address(["http://near:1"]) == "10.0.0.1"


@pytest.mark.usefixtures("network")
@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("http://unknown-host:1", "no route to 'unknown-host'"),
        ("http://10.9.9.9:1", "no route to '10.9.9.9'"),
        ("http://[fe80::7]:1", "link-local"),
    ],
)
def test_an_engine_that_cannot_be_reached_is_refused_by_its_url(url: str, words: str) -> None:
    with pytest.raises(ConfigurationError, match=words) as caught:
        choose_address(["http://near:1", url])

    assert caught.value.engine == url
    assert caught.value.phase == "connect"
    assert caught.value.remedy


def test_a_loopback_engine_is_reached_over_loopback_on_this_host() -> None:
    assert choose_address(["http://127.0.0.1:30000"]) == "127.0.0.1"


@needs_ipv6
def test_an_ipv6_loopback_engine_is_reached_over_ipv6() -> None:
    assert choose_address(["http://[::1]:30000"]) == "::1"


# -- what a user may say -------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "taken"),
    [
        ("127.0.0.1", "127.0.0.1"),
        (" 127.0.0.1\n", "127.0.0.1"),
        ("localhost", "localhost"),
        ("10.1.2.3", "10.1.2.3"),
        ("::1", "::1"),
        ("[::1]", "::1"),
        ("fd00::1", "fd00::1"),
    ],
)
def test_an_address_of_the_user_is_taken_as_it_is_without_brackets(given: str, taken: str) -> None:
    assert check_address(given) == taken


@pytest.mark.parametrize(
    "given", ["0.0.0.0", "::", "[::]", "169.254.3.4", "fe80::1", "fe80::1%lo", "[fe80::1%eth0]"]
)
def test_an_address_that_no_other_process_reaches_is_refused(given: str) -> None:
    with pytest.raises(ConfigurationError, match="master_address=") as caught:
        check_address(given)

    assert given in str(caught.value)


def test_the_refusal_of_a_wildcard_says_what_to_name_instead() -> None:
    with pytest.raises(ConfigurationError) as caught:
        check_address("0.0.0.0")

    assert "address of this host" in caught.value.remedy


@pytest.mark.parametrize("given", ["no-such-host.invalid", "1.2.3.4.5", "a b", "http://a"])
def test_an_address_that_does_not_resolve_is_refused(given: str) -> None:
    with pytest.raises(ConfigurationError, match="does not resolve"):
        check_address(given)


# -- listening -----------------------------------------------------------------------------


@pytest.fixture
def taken_port() -> Iterator[int]:
    with socket.create_server(("127.0.0.1", 0)) as other:
        yield other.getsockname()[1]


def test_a_listener_accepts_connections_at_once() -> None:
    with listen("127.0.0.1", None) as listener:
        socket.create_connection(listener.getsockname(), timeout=1).close()


def test_free_ports_differ_while_they_are_held() -> None:
    with listen("127.0.0.1", None) as first, listen("127.0.0.1", None) as second:
        assert first.getsockname()[1] != second.getsockname()[1]


def test_a_port_that_is_asked_for_is_the_one_that_is_bound(taken_port: int) -> None:
    with listen("127.0.0.1", None) as listener:
        port = listener.getsockname()[1]

    with listen("127.0.0.1", port) as again:
        assert again.getsockname()[1] == port


def test_a_port_that_somebody_holds_is_refused_at_once_with_the_way_out(taken_port: int) -> None:
    with pytest.raises(ConfigurationError, match=f"master_port={taken_port}") as caught:
        listen("127.0.0.1", taken_port)

    assert caught.value.phase == "connect"
    assert "master_port=None" in caught.value.remedy


def test_an_address_of_another_host_is_refused() -> None:
    with pytest.raises(ConfigurationError, match=r"master_address='203\.0\.113\.9'"):
        listen("203.0.113.9", None)


@needs_ipv6
def test_an_ipv6_address_is_listened_on_as_ipv6() -> None:
    with listen("::1", None) as listener:
        assert listener.family == socket.AF_INET6
        socket.create_connection(("::1", listener.getsockname()[1]), timeout=1).close()


def test_the_module_imports_no_http() -> None:
    """An address is settled before any engine hears of it."""
    assert not {"requests", "EngineHttp"} & vars(address_module).keys()
