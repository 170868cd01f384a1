"""An SGLang server that wants an API key: TorchRL's client sends none."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import requests
from torchrl.modules.llm import AsyncSGLang

from weight_update.engines.answers import AnswerReader, json_of
from weight_update.options import HttpOptions

_ASK_SECONDS = 10.0
_NO_PROXIES = {"http": "", "https": ""}  # one of the environment would get the key
# What TorchRL's client sends where nothing is said; a model may have defaults of its own.
_USUAL = {
    "temperature": 1.0,
    "top_p": 1.0,
    "frequency_penalty": 0.0,
    "presence_penalty": 0.0,
    "repetition_penalty": 1.0,
}


class KeyedSGLang(AsyncSGLang):  # type: ignore[misc]
    """``AsyncSGLang`` of a server that is there, every request of which bears a key.

    :meth:`reach` makes it.

    Args:
        line: Asks the server.
        timeout: Seconds for a response.
        **known: What upstream is told of the server.
    """

    def __init__(self, line: Line, timeout: float, **known: Any) -> None:
        super().__init__(timeout=timeout, **known)
        self._line, self._seconds = line, timeout

    @classmethod
    def reach(cls, server_url: str, key: str, timeout: float = 300.0) -> KeyedSGLang:
        """A client of a server that takes the key.

        Args:
            server_url: Where it is.
            key: The bearer key of its ordinary routes.
            timeout: Seconds for a response.

        Raises:
            EngineRejected: The server refuses the key, or is no SGLang.
            requests.ConnectionError: There is none.
        """
        line = Line(server_url.rstrip("/"), key)
        server = line.ask("GET", "/server_info", seconds=_ASK_SECONDS)
        model = line.ask("GET", "/model_info", seconds=_ASK_SECONDS)
        sizes = {name: server.get(name, 1) for name in ("tp_size", "dp_size")}
        return cls(line, timeout, model_path=model.get("model_path"), **sizes)

    @property
    def server_url(self) -> str:
        """Where it is."""
        return self._line.url

    def generate(
        self,
        *,
        input_ids: Sequence[int],
        sampling_params: Mapping[str, Any],
        return_logprobs: bool = False,
    ) -> dict[str, Any]:
        """One answer to one prompt; what it sends is what upstream would.

        Raises:
            EngineRejected: The server refused, with its words.
        """
        sampling = {**_USUAL, **sampling_params}
        body = {"input_ids": list(input_ids), "sampling_params": sampling}
        wish = {"return_logprob": True} if return_logprobs else {}
        return self._line.ask("POST", "/generate", body | wish, seconds=self._seconds)

    def __repr__(self) -> str:
        return f"{type(self).__name__}(url={self.server_url!r})"


class Line:
    """Asks a server; what it raises has no key in it.

    Args:
        url: The server.
        key: The bearer key.
    """

    def __init__(self, url: str, key: str) -> None:
        self.url, self._key = url, key
        self._answers = AnswerReader(url, HttpOptions(api_key=key))

    def ask(self, method: str, path: str, body: object = None, *, seconds: float) -> dict[str, Any]:
        """What the server answers, as JSON.

        Raises:
            EngineRejected: It refused, or answered something else, with its words.
            requests.RequestException: It did not answer.
        """
        try:
            answer = requests.request(
                method,
                f"{self.url}{path}",
                json=body,
                timeout=seconds,
                auth=self._signed,  # a header alone would give way to a .netrc
                allow_redirects=False,
                proxies=_NO_PROXIES,
            )
        except requests.RequestException as error:
            _forget_key(error.request)
            raise
        _forget_key(answer.request)
        told = json_of(answer)
        if answer.status_code != requests.codes.ok or not isinstance(told, dict):
            raise self._answers.rejection(answer, phase="configure")
        return told

    def _signed(self, request: requests.PreparedRequest) -> requests.PreparedRequest:
        request.headers["Authorization"] = f"Bearer {self._key}"
        return request

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.url!r})"


def _forget_key(request: Any) -> None:
    if request is not None:
        request.headers.pop("Authorization", None)
