"""HTTP to one engine: keys, TLS, proxies, deadlines, and typed errors where no answer came."""

from __future__ import annotations

import json
import threading
import time
from http.client import HTTPException

import requests
from urllib3.exceptions import HTTPError, ReadTimeoutError

from weight_update.engines.answers import response_of
from weight_update.engines.calls import Body
from weight_update.engines.connections import Limits, NotConnected, Request, connections_to
from weight_update.errors import EngineUnreachable, Phase, UpdateTimeout
from weight_update.options import HttpOptions
from weight_update.waiting import Deadline

_CONNECT_SECONDS = 5.0
# uvicorn closes a connection that was idle for 5 s; a request sent at that very moment fails
# with its outcome unknown, so a connection idle for longer than this is not used again.
_IDLE_SECONDS = 3.0
_QUOTED_CHARACTERS = 500

_JSON = {"Content-Type": "application/json"}

_NO_ANSWER = (NotConnected, OSError, HTTPException, HTTPError, requests.RequestException)


class EngineHttp:
    """Calls routes of one engine.

    Redirects are not followed: they would carry the keys to another host.

    Args:
        url: Base URL of the engine.
        options: Keys, TLS and proxies.
    """

    def __init__(self, url: str, options: HttpOptions) -> None:
        self.url = url
        self._options = options
        self._idle_check = threading.Lock()
        self._last_used = time.monotonic()
        self._connections = connections_to(url, options)

    def call(
        self,
        method: str,
        route: str,
        *,
        phase: Phase,
        deadline: Deadline,
        body: Body | None = None,
        control: bool = True,
        late: float = 0.0,
    ) -> requests.Response:
        """Sends one request and returns whatever answer came; see :class:`Calls`.

        Raises:
            EngineUnreachable: No connection, or it broke.
            UpdateTimeout: No answer before the deadline.
        """
        if deadline.expired():
            raise UpdateTimeout(f"no time left for {route}", engine=self.url, phase=phase)
        self._drop_idle_connections()
        sent, headers = _encoded(body), self._headers(control)
        headers = headers if sent is None else headers | _JSON
        request = Request(method, route, sent, headers, _limits(deadline, late))
        try:
            answer = self._connections.ask(request)
        except _NO_ANSWER as error:
            raise self._no_answer(error, f"{method} {route}", phase, deadline) from error
        except ValueError as error:
            raise self._unreadable(error, f"{method} {route}", phase) from error
        self._last_used = time.monotonic()
        return response_of(answer, method, f"{self.url}{route}")

    def _unreadable(self, error: ValueError, request: str, phase: Phase) -> EngineUnreachable:
        return EngineUnreachable(
            f"{request} got an answer that cannot be read: {error}",
            engine=self.url,
            phase=phase,
            remedy="name the server's final URL",
        )

    def _no_answer(
        self, error: Exception, request: str, phase: Phase, deadline: Deadline
    ) -> EngineUnreachable | UpdateTimeout:
        if isinstance(error, (TimeoutError, ReadTimeoutError)):
            return UpdateTimeout(
                f"no answer to {request} within {deadline.seconds:.1f} s",
                engine=self.url,
                phase=phase,
            )
        return EngineUnreachable(
            f"{request} got no answer: {_cause(error)}",
            engine=self.url,
            phase=phase,
            remedy=_connection_remedy(str(error)),
        )

    def close(self) -> None:
        """Closes the connections."""
        self._connections.close()

    def _headers(self, control: bool) -> dict[str, str]:
        key = self._options.key_for(control=control)
        return {"Authorization": f"Bearer {key}"} if key else {}

    def _drop_idle_connections(self) -> None:
        with self._idle_check:
            idle, self._last_used = time.monotonic() - self._last_used, time.monotonic()
            if idle > _IDLE_SECONDS:
                self._connections.close()


def _limits(deadline: Deadline, late: float) -> Limits:
    remaining = deadline.remaining() + 0.001
    return Limits(connect=min(_CONNECT_SECONDS, remaining), read=remaining + late)


def _encoded(body: Body | None) -> bytes | None:
    return json.dumps(body, allow_nan=False).encode() if isinstance(body, dict) else body


def _cause(error: BaseException) -> str:
    """The innermost reason, without the pool objects that urllib3 wraps around it."""
    while error.args and isinstance(inner := _inner_cause(error), BaseException):
        error = inner
    return (str(error).rpartition(">: ")[2] or type(error).__name__)[:_QUOTED_CHARACTERS]


def _inner_cause(error: BaseException) -> object:
    return getattr(error, "reason", None) or error.args[-1]


def _connection_remedy(text: str) -> str:
    if "WRONG_VERSION_NUMBER" in text:
        return "the server does not speak TLS: write http://"
    return "check that the server runs and that its address is right"
