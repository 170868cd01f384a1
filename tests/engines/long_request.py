"""A request that is in flight for as long as a test wants it to be."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from itertools import count
from typing import Any

import requests

from weight_update.waiting import spawn

from .models import CONTEXT

SECONDS = 120.0
_numbers = count()


def wait_until(condition: Callable[[], bool]) -> None:
    """Poll until the condition holds: a server's state may trail its answer a little."""
    deadline = time.monotonic() + SECONDS
    while not condition():
        assert time.monotonic() < deadline, "the condition never came true"
        time.sleep(0.05)


class LongRequest:
    """A greedy request whose tokens are seen as the server makes them.

    It takes all that fits, which outlasts any update: on a busy machine a server may make
    thousands of tokens before a starved trainer pauses it. :meth:`cut` ends it.
    """

    def __init__(self, url: str, prompt: list[int], tokens: int = CONTEXT - 200) -> None:
        self.prompt = prompt
        self._url = url
        self._rid = f"long-{next(_numbers)}"
        self._wanted = tokens
        self._grown = threading.Condition()
        self._last: dict[str, Any] = {}
        self._stream = spawn(self._read)

    @property
    def tokens(self) -> list[int]:
        """The tokens so far."""
        return list(self._last.get("output_ids", ()))

    def wait_for(self, more: int) -> None:
        """Wait until it has made ``more`` tokens from now on."""
        goal = len(self.tokens) + more
        with self._grown:
            grown = self._grown.wait_for(
                lambda: len(self.tokens) >= goal or self._stream.done(), SECONDS
            )
        assert grown, f"{len(self.tokens)} of {goal} tokens"

    def end(self) -> dict[str, Any]:
        """Wait until it ended, and return its answer."""
        self._stream.result(SECONDS)
        return self._last

    def cut(self) -> dict[str, Any]:
        """Abort it, and return its answer."""
        body = {"rid": self._rid}
        requests.post(f"{self._url}/abort_request", json=body, timeout=SECONDS).raise_for_status()
        return self.end()

    def _read(self) -> None:
        sampling = {"max_new_tokens": self._wanted, "temperature": 0, "ignore_eos": True}
        body = {"input_ids": self.prompt, "sampling_params": sampling, "rid": self._rid}
        with requests.post(
            f"{self._url}/generate", json={**body, "stream": True}, stream=True, timeout=SECONDS
        ) as answer:
            answer.raise_for_status()
            for line in answer.iter_lines():
                if line.startswith(b"data: {"):
                    self._take(json.loads(line.removeprefix(b"data: ")))
        with self._grown:
            self._grown.notify_all()

    def _take(self, answer: dict[str, Any]) -> None:
        with self._grown:
            self._last = answer
            self._grown.notify_all()
