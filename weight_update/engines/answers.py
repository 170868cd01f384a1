"""What an engine answers: as JSON, as text, or as the error that it means."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from io import BytesIO
from typing import Any

import requests
from requests.structures import CaseInsensitiveDict
from requests.utils import get_encoding_from_headers

from weight_update.errors import EngineRejected, Phase
from weight_update.options import HttpOptions

_QUOTED_CHARACTERS = 500


@dataclass(frozen=True)
class Answer:
    """What came back, read whole."""

    status: int
    reason: str
    headers: Iterable[tuple[str, str]]
    data: bytes


class AnswerReader:
    """Reads the answers of one engine, which may repeat a key.

    Args:
        url: The engine, for errors.
        options: The keys that must not be shown.
    """

    def __init__(self, url: str, options: HttpOptions) -> None:
        self._url = url
        self._keys = [key for key in (options.api_key, options.admin_api_key) if key]

    def rejection(self, response: requests.Response, *, phase: Phase) -> EngineRejected:
        """The error that an answer means, with a bounded part of the engine's own words."""
        route = response.request.path_url
        return EngineRejected(
            f"{route} answered {response.status_code}: {self.words(response)}",
            engine=self._url,
            phase=phase,
            remedy=_remedy(response.status_code),
            response=self._without_keys(response),
        )

    def words(self, response: requests.Response) -> str:
        """The engine's own words, less the keys, should it repeat one."""
        return self._scrubbed(_words_of(response))[:_QUOTED_CHARACTERS]

    def _without_keys(self, response: requests.Response) -> requests.Response:
        """A copy that can be kept and pickled: no key that was sent, or that a server repeats."""
        kind = response.headers.get("Content-Type", "")
        data = self._scrubbed(text_of(response)).encode()
        answer = Answer(response.status_code, response.reason, [("Content-Type", kind)], data)
        copy = response_of(answer, response.request.method or "", response.url)
        copy.encoding = "utf-8"
        return copy

    def _scrubbed(self, text: str) -> str:
        for key in self._keys:
            text = text.replace(key, "***")
        return text


def response_of(answer: Answer, method: str, url: str) -> requests.Response:
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


def text_of(response: requests.Response) -> str:
    """The body of an answer as text, whatever encoding it claims to have."""
    return response.content.decode("utf-8", "replace")


def is_there(response: requests.Response) -> bool | None:
    """Whether there is a route, by the answer to ``OPTIONS``; None when that does not tell."""
    if response.status_code == 404:
        return False
    return True if response.status_code in (200, 204, 405) else None


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


def _remedy(status: int) -> str:
    if status in (401, 403):
        return "pass admin_api_key= (control routes) or api_key=, or set WEIGHT_UPDATE_API_KEY"
    if 300 <= status < 400:
        return "redirects are not followed: name the server's final URL"
    return ""
