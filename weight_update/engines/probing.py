"""What can be learned of a server without changing anything, whatever engine it is.

All requests are GET or OPTIONS. Not every GET is harmless (``GET /flush_cache`` of SGLang
flushes): those that are sent were read in the engines' sources, and none pauses, flushes, loads or
writes anything.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import requests

from weight_update.engines.answers import AnswerReader, is_there
from weight_update.engines.http import EngineHttp
from weight_update.errors import EngineUnreachable, UpdateTimeout
from weight_update.options import HttpOptions
from weight_update.waiting import Deadline

KeyState = Literal["open", "accepted", "missing", "refused", "forbidden", "unknown"]
Service = Literal["sglang", "vllm", "router", "other"]

_QUICK_SECONDS = 5.0


@dataclass(frozen=True)
class ServerFacts:
    """What a server said of itself.

    Attributes:
        url: Its URL.
        unreachable: Why no answer came; empty when one did.
        advice: What to do about that.
        status: Status of the route that describes its model.
        words: What it said there, if that was no yes.
        redirect: Where it sent us instead, if it did.
        service: What answers there.
        why: What told so.
        busy: What computes did not answer in time, although the server did.
        dead: What computes is gone, although the server answers.
        info: What it says of its configuration, as far as that matters here.
        model: What it says of its model.
        routes: For each probed route whether it is there.
        ordinary_key: How ordinary routes take our key.
        control_key: How control routes take our key.
        ready: Whether it serves, and is not paused; None when it does not say.
        running: Running requests; None when that is not known.
        names: Names of the weights that it holds (fused as it fuses them); None when not known.
        names_unknown: Why they are not.
        lengths: Lengths of some one-dimensional weights, by name.
    """

    url: str
    unreachable: str = ""
    advice: str = ""
    status: int = 200
    words: str = ""
    redirect: str | None = None
    service: Service = "sglang"
    why: str = ""
    busy: bool = False
    dead: bool = False
    info: Mapping[str, Any] = field(default_factory=dict)
    model: Mapping[str, Any] = field(default_factory=dict)
    routes: Mapping[str, bool | None] = field(default_factory=dict)
    ordinary_key: KeyState = "open"
    control_key: KeyState = "open"
    ready: bool | None = None
    running: int | None = None
    names: frozenset[str] | None = None
    names_unknown: str = ""
    lengths: Mapping[str, int] = field(default_factory=dict)


class Asker:
    """Sends the requests of one diagnosis, each for a few seconds at most.

    Args:
        url: The server's URL.
        options: Keys, TLS and proxies.
        seconds: Time for all of it.
    """

    def __init__(self, url: str, options: HttpOptions, seconds: float) -> None:
        self.url = url
        self._keys = bool(options.api_key or options.admin_api_key)
        self._answers = AnswerReader(url, options)
        self._http = EngineHttp(url, options)
        self._keyless = EngineHttp(url, replace(options, api_key=None, admin_api_key=None))
        self._deadline = Deadline(seconds)

    def close(self) -> None:
        """Closes the connections."""
        self._http.close()
        self._keyless.close()

    def words(self, answer: requests.Response) -> str:
        """The server's own words."""
        return self._answers.words(answer)

    def has(self, route: str) -> bool | None:
        """Whether a route is there; None when that cannot be told."""
        return is_there(self._call(self._http, "OPTIONS", route, control=True))

    def get(
        self,
        route: str,
        *,
        control: bool = False,
        body: dict[str, Any] | None = None,
        seconds: float | None = _QUICK_SECONDS,
    ) -> requests.Response:
        """Asks a route; ``seconds=None`` gives it all the time that is left."""
        return self._call(self._http, "GET", route, control=control, body=body, seconds=seconds)

    def either(self, route: str, older: str) -> requests.Response:
        """Asks a route, and its older name where it is not there."""
        answer = self.get(route)
        return self.get(older) if answer.status_code == 404 else answer

    def key_state(self, route: str, answer: requests.Response, *, control: bool) -> KeyState:
        """How a route takes our key, by its answer to it and to none."""
        refused = _refusal(answer, had_key=self._keys)
        if refused is not None:
            return refused
        if answer.status_code in (404, 405) or answer.status_code >= 500:
            return "unknown"
        if not self._keys:
            return "open"
        bare = self._call(self._keyless, "GET", route, control=control)
        return "accepted" if bare.status_code in (401, 403) else "open"

    def _call(
        self,
        http: EngineHttp,
        method: str,
        route: str,
        *,
        control: bool,
        body: dict[str, Any] | None = None,
        seconds: float | None = _QUICK_SECONDS,
    ) -> requests.Response:
        deadline = self._deadline if seconds is None else self._deadline.at_most(seconds)
        return http.call(
            method, route, phase="connect", deadline=deadline, body=body, control=control
        )


def unreachable(url: str, error: EngineUnreachable | UpdateTimeout) -> ServerFacts:
    """A server that gave no answer."""
    return ServerFacts(url, unreachable=error.message, advice=_advice(url, error))


def kept(body: Any, fields: Sequence[str]) -> dict[str, Any]:
    """The fields of an answer that matter; others may be the server's own keys."""
    return {name: body[name] for name in fields if name in body} if isinstance(body, dict) else {}


def _refusal(answer: requests.Response, *, had_key: bool) -> KeyState | None:
    if answer.status_code == 401:
        return "refused" if had_key else "missing"
    return "forbidden" if answer.status_code == 403 else None


def _advice(url: str, error: EngineUnreachable | UpdateTimeout) -> str:
    if "CERTIFICATE_VERIFY_FAILED" in error.message:
        return "name the certificate authority with --ca-file"
    # How a server that speaks TLS ends a plain connection.
    closed = any(words in error.message for words in ("without response", "reset by peer"))
    if closed and url.startswith("http://"):
        return "if the server speaks TLS, write https://; else look at the server's log"
    return error.remedy or "check that the server runs and that its address is right"
