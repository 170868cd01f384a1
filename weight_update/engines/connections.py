"""Connections to one host, kept between calls."""

from __future__ import annotations

import select
import ssl
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from http.client import HTTPConnection, HTTPResponse, HTTPSConnection, IncompleteRead
from typing import Any, Protocol
from urllib.parse import quote, urlsplit

import requests
from requests.adapters import HTTPAdapter
from requests.utils import DEFAULT_CA_BUNDLE_PATH, get_environ_proxies, select_proxy
from urllib3 import Timeout

from weight_update.engines.answers import Answer
from weight_update.options import HttpOptions

# An update asks three things at once.
_KEPT = 4
_PART_BYTES = 1 << 16
_IN_PATHS = "/%~:@!$&'()*+,;="


@dataclass(frozen=True)
class Limits:
    """Seconds that a connection may take, and then each part of the answer."""

    connect: float
    read: float


@dataclass(frozen=True)
class Request:
    """What is asked of a route.

    Attributes:
        method: HTTP method.
        route: Path below the URL, starting with a slash.
        body: What is sent, if anything.
        headers: Besides those that every request has.
        limits: How long it may take.
    """

    method: str
    route: str
    body: bytes | None = field(repr=False)
    headers: Mapping[str, str] = field(repr=False)  # with a key
    limits: Limits


class NotConnected(Exception):
    """Nobody was reached, and so nothing was sent."""


class Connections(Protocol):
    """Asks routes below one URL; nothing is asked twice, and no redirect is followed."""

    def ask(self, request: Request) -> Answer:
        """Sends one request and reads the whole answer; raises whatever kept it from that."""

    def close(self) -> None:
        """Closes the connections; the next call opens others."""


def connections_to(url: str, options: HttpOptions) -> Connections:
    """Connections by the options' authority, and by a proxy if the options let one in.

    Nothing else is let in from the environment: no netrc entries, which would replace the bearer
    key, and no certificate bundles, which would replace the options'.
    """
    proxies = get_environ_proxies(url) if options.use_proxies else {}
    return Proxied(url, options, proxies) if select_proxy(url, proxies) else Direct(url, options)


class Direct:
    """Asks a host directly, with little more than a socket.

    Of an update of a few tensors most is the processor time of its calls: requests needs 0.4 ms for
    one, urllib3 0.15 ms, this 0.06 ms.
    """

    def __init__(self, url: str, options: HttpOptions) -> None:
        parts = urlsplit(url)
        self._host, self._port = parts.hostname or "", parts.port
        self._base = quote(parts.path.rstrip("/"), safe=_IN_PATHS)
        self._name = _name_of(parts.netloc)
        self._tls = _authority(options) if parts.scheme == "https" else None
        self._idle: list[HTTPConnection] = []

    def ask(self, request: Request) -> Answer:
        """Sends one request and reads the whole answer.

        Raises:
            NotConnected: Nothing was sent.
            OSError: The connection broke; TimeoutError where nothing came in time.
            http.client.HTTPException: What came is no answer.
        """
        connection = self._taken() or self._opened(request.limits.connect)
        try:
            answer, goes_on = self._asked(connection, request)
        except BaseException:
            connection.close()
            raise
        if goes_on and len(self._idle) < _KEPT:
            self._idle.append(connection)
        else:
            connection.close()
        return answer

    def _asked(self, connection: HTTPConnection, request: Request) -> tuple[Answer, bool]:
        """The answer, and whether the connection can be used again."""
        connection.sock.settimeout(request.limits.read)
        # In one piece: the server wakes once.
        connection.sock.sendall(self._encoded(request))
        response = HTTPResponse(connection.sock, method=request.method)
        try:
            response.begin()
            data = _read(response)
        finally:
            response.close()
        answer = Answer(response.status, response.reason, response.getheaders(), data)
        return answer, not response.will_close

    def _encoded(self, request: Request) -> bytes:
        body = request.body or b""
        bare = request.body is None and request.method == "GET"
        sized = {} if bare else {"Content-Length": len(body)}
        named = {"Host": self._name, "Accept-Encoding": "identity", **request.headers, **sized}
        first = f"{request.method} {self._base}{request.route} HTTP/1.1"
        lines = [first, *(f"{k}: {v}" for k, v in named.items())]
        return "\r\n".join([*lines, "", ""]).encode("ascii") + body

    def _taken(self) -> HTTPConnection | None:
        """An idle connection that the server has not closed."""
        while self._idle:
            try:
                connection = self._idle.pop()
            except IndexError:  # another thread took it
                return None
            if not _is_readable(connection.sock):
                return connection
            connection.close()
        return None

    def _opened(self, seconds: float) -> HTTPConnection:
        host, port = self._host, self._port
        connection = (
            HTTPConnection(host, port, timeout=seconds)
            if self._tls is None
            else HTTPSConnection(host, port, timeout=seconds, context=self._tls)
        )
        try:
            connection.connect()
        except (OSError, ValueError) as error:  # a name that is none is a ValueError
            connection.close()
            raise NotConnected(str(error) or type(error).__name__) from error
        return connection

    def close(self) -> None:
        """Closes the connections; the next call opens others."""
        idle, self._idle = self._idle, []
        for connection in idle:
            connection.close()


def _read(response: HTTPResponse) -> bytes:
    """The whole body, bit by bit: memory for all that is announced might be any amount."""
    data = b"".join(iter(partial(response.read, _PART_BYTES), b""))
    if response.length:
        raise IncompleteRead(data, response.length)
    return data


def _is_readable(sock: Any) -> bool:
    """Nothing was asked: what can be read is the end, or nonsense."""
    poll = select.poll()
    poll.register(sock, select.POLLIN)
    return bool(poll.poll(0))


def _name_of(place: str) -> str:
    """Host and port as a header may have them."""
    return place if place.isascii() else place.encode("idna").decode("ascii")


def _authority(options: HttpOptions) -> ssl.SSLContext:
    """What certificates are checked against."""
    if options.tls_verify:
        return ssl.create_default_context(cafile=options.ca_file or DEFAULT_CA_BUNDLE_PATH)
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    return context


class Proxied(HTTPAdapter):
    """Asks by a proxy, of whatever kind requests knows."""

    def __init__(self, url: str, options: HttpOptions, proxies: Mapping[str, str]) -> None:
        super().__init__(pool_maxsize=_KEPT)
        self._url = url
        self._verify = (options.ca_file or True) if options.tls_verify else False
        self._proxies = dict(proxies)

    def ask(self, request: Request) -> Answer:
        """Sends one request and reads the whole answer.

        Raises:
            urllib3.exceptions.HTTPError: There was none.
            requests.RequestException: The proxy's URL leads nowhere.
        """
        asked = requests.Request("GET", f"{self._url}{request.route}").prepare()
        pool: Any = self.get_connection_with_tls_context(asked, self._verify, self._proxies)
        self.cert_verify(pool, self._url, self._verify, None)  # type: ignore[no-untyped-call]
        answer = pool.urlopen(
            request.method,
            self.request_url(asked, self._proxies),
            body=request.body,
            headers=request.headers,
            timeout=Timeout(connect=request.limits.connect, read=request.limits.read),
            retries=False,
            redirect=False,
            assert_same_host=False,
        )
        return Answer(answer.status, answer.reason or "", answer.headers.items(), answer.data)
