"""HTTP to one engine: keys, TLS, proxies, deadlines, and answers turned into typed errors."""

from __future__ import annotations

import json
import threading
import time
from http.client import HTTPException
from io import BytesIO
from typing import Any

import requests
from requests.structures import CaseInsensitiveDict
from requests.utils import get_encoding_from_headers
from urllib3.exceptions import HTTPError, ReadTimeoutError

from weight_update.engines.connections import Answer, Limits, NotConnected, connections_to
from weight_update.errors import EngineRejected, EngineUnreachable, Phase, UpdateTimeout
from weight_update.options import HttpOptions
from weight_update.waiting import Deadline

_CONNECT_SECONDS = 5.0
# uvicorn closes a connection that was idle for 5 s; a request sent at that very moment fails
# with its outcome unknown, so a connection idle for longer than this is not used again.
_IDLE_SECONDS = 3.0
_QUOTED_CHARACTERS = 500

_JSON = {"Content-Type": "application/json"}

_NO_ANSWER = (NotConnected, OSError, HTTPException, HTTPError, requests.RequestException)

Body = dict[str, Any] | bytes


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
        """Sends one request and returns whatever answer came.

        Args:
            method: HTTP method.
            route: Path, starting with a slash.
            phase: The step of the update, for errors.
            deadline: Bound of the whole call.
            body: JSON body, if any; encoded or not.
            control: Whether the route needs the admin key.
            late: Seconds past the deadline in which an answer is still taken.

        Raises:
            EngineUnreachable: No connection, or it broke.
            UpdateTimeout: No answer before the deadline.
        """
        if deadline.expired():
            raise UpdateTimeout(f"no time left for {route}", engine=self.url, phase=phase)
        self._drop_idle_connections()
        sent, headers = _encoded(body), self._headers(control)
        try:
            answer = self._connections.ask(
                method,
                route,
                sent,
                headers if sent is None else headers | _JSON,
                _limits(deadline, late),
            )
        except _NO_ANSWER as error:
            raise self._no_answer(error, f"{method} {route}", phase, deadline) from error
        except ValueError as error:
            raise self._unreadable(error, f"{method} {route}", phase) from error
        self._last_used = time.monotonic()
        return _shown(answer, method, f"{self.url}{route}")

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

    def rejection(self, response: requests.Response, *, phase: Phase) -> EngineRejected:
        """The error that an answer means, with a bounded part of the engine's own words."""
        route = response.request.path_url
        return EngineRejected(
            f"{route} answered {response.status_code}: {self.words(response)}",
            engine=self.url,
            phase=phase,
            remedy=_remedy(response.status_code),
            response=self._without_keys(response),
        )

    def _without_keys(self, response: requests.Response) -> requests.Response:
        """A copy that can be kept and pickled: no key that was sent, or that a server repeats."""
        copy = requests.Response()
        copy.request = requests.PreparedRequest()
        copy.request.method, copy.request.url = response.request.method, response.url
        copy.request.headers = CaseInsensitiveDict()
        copy.status_code, copy.reason, copy.url = (
            response.status_code,
            response.reason,
            response.url,
        )
        copy.headers["Content-Type"] = response.headers.get("Content-Type", "")
        copy.encoding = "utf-8"
        copy.raw = BytesIO(self._scrubbed(text_of(response)).encode())
        return copy

    def _scrubbed(self, text: str) -> str:
        for key in (self._options.api_key, self._options.admin_api_key):
            text = text.replace(key, "***") if key else text
        return text

    def words(self, response: requests.Response) -> str:
        """The engine's own words, less the keys, should it repeat one."""
        return self._scrubbed(_words_of(response))[:_QUOTED_CHARACTERS]

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


def _shown(answer: Answer, method: str, url: str) -> requests.Response:
    """An answer as requests shows one; nothing that was sent is in it, and so no key."""
    response = requests.Response()
    response.status_code, response.url = answer.status, url
    response.reason = answer.reason
    response.headers = CaseInsensitiveDict(answer.headers)
    response.encoding = get_encoding_from_headers(response.headers)
    response.raw = BytesIO(answer.data)
    response.request = requests.PreparedRequest()
    response.request.method, response.request.url = method, url
    response.request.headers = CaseInsensitiveDict()
    return response


def json_of(response: requests.Response) -> Any:
    """The JSON body of an answer; None when it is something else."""
    try:
        return response.json()
    except (ValueError, RecursionError):
        return None


def _words_of(response: requests.Response) -> str:
    """The message of an answer's envelope, else its body in one line."""
    body = json_of(response)
    if isinstance(body, dict):
        nested = body.get("error")
        inner = nested if isinstance(nested, dict) else body
        keys = ("message", "error", "detail", "error_message")
        message = next((inner[key] for key in keys if inner.get(key)), None)
        if isinstance(message, str) and message:
            return message
    return " ".join(text_of(response).split()) or "(empty body)"


def text_of(response: requests.Response) -> str:
    """The body of an answer as text, whatever encoding it claims to have."""
    return response.content.decode("utf-8", "replace")


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


def _remedy(status: int) -> str:
    if status in (401, 403):
        return "pass admin_api_key= (control routes) or api_key=, or set WEIGHT_UPDATE_API_KEY"
    if 300 <= status < 400:
        return "redirects are not followed: name the server's final URL"
    return ""
