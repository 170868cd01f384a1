"""A fake in a process of its own, as tests hold it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import requests

from tests import warm

from .faults import Fault

_ROOT = Path(__file__).parents[2]
_START_SECONDS = 120.0


class FakeVLLM:
    """One fake server; ``with FakeVLLM() as server: server.url``.

    It is waited for when it is first needed, so that several start at once.

    Args:
        release: The release that it imitates.
        seed: Of the weights that it starts with.
    """

    def __init__(self, release: str = "0.32.0", seed: int = 0) -> None:
        self.release, self.seed = release, seed
        self._port = 0
        self._process = self._start()

    @property
    def url(self) -> str:
        """Base URL; the same after a restart."""
        if not self._listens:
            self._await_start()
        return f"http://127.0.0.1:{self._port}"

    @property
    def pid(self) -> int:
        """Of its process."""
        return self._process.pid

    @property
    def alive(self) -> bool:
        """Whether its process runs."""
        return self._process.poll() is None

    def restart(self, release: str | None = None) -> None:
        """Ends the process and starts another on the same port, on the first weights."""
        self.stop()
        self.release = release or self.release
        self._process = self._start()
        self._await_start()

    def stop(self) -> None:
        """Ends the process."""
        if self.alive:
            self._process.kill()
        self._process.wait(30)
        if self._process.stdout is not None:
            self._process.stdout.close()

    def _start(self) -> Any:
        self._listens = False
        arguments = [str(self._port), self.release, str(self.seed)]
        return warm.start(
            [sys.executable, "-m", "tests.vllm_fake.server", *arguments],
            cwd=_ROOT,
            stdout=subprocess.PIPE,
            text=True,
        )

    def _await_start(self) -> None:
        late = threading.Timer(_START_SECONDS, self._process.kill)
        late.start()
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        late.cancel()
        assert line, "the fake did not start; its standard error says why"
        self._port, self._listens = int(line), True

    # -- what a test does to it ---------------------------------------------------------

    def inject(self, path: str, kind: Any, **more: Any) -> None:
        """Makes a coming call go wrong; see :class:`~tests.vllm_fake.faults.Fault`."""
        self.call("POST", "/__fault__", vars(Fault(path, kind, **more)))

    def clear(self) -> None:
        """Forgets what was to go wrong."""
        self.call("POST", "/__clear__")

    def freeze(self) -> None:
        """Stops the process, as a debugger or a full machine does."""
        os.kill(self.pid, signal.SIGSTOP)

    def thaw(self) -> None:
        """Lets it go on."""
        os.kill(self.pid, signal.SIGCONT)

    # -- what a test sees of it ---------------------------------------------------------

    def call(self, method: str, path: str, body: Any = None, timeout: float = 60) -> Any:
        """A request that must succeed."""
        response = requests.request(method, self.url + path, json=body, timeout=timeout)
        assert response.status_code == 200, f"{path}: {response.status_code} {response.text}"
        return response.json()

    def status(self, method: str, path: str, body: Any = None, timeout: float = 60) -> int:
        """The status of a request."""
        return requests.request(method, self.url + path, json=body, timeout=timeout).status_code

    def log(self) -> list[dict[str, Any]]:
        """What it was asked, in order of arrival."""
        return list(self.call("GET", "/__log__")["log"])

    def paths(self) -> list[str]:
        """The routes of what it was asked by POST, repetitions folded."""
        paths = [entry["path"] for entry in self.log() if entry["method"] == "POST"]
        return [path for i, path in enumerate(paths) if i == 0 or paths[i - 1] != path]

    @property
    def paused(self) -> bool:
        """Whether it holds new requests."""
        return bool(self.call("GET", "/is_paused")["is_paused"])

    @property
    def label(self) -> str:
        """Its version label."""
        return str(self.call("GET", "/weight_info")["weight_version"])

    @property
    def dead(self) -> bool:
        """Whether its engine is gone, though its HTTP answers."""
        return bool(self.call("GET", "/__log__")["dead"])

    @property
    def running(self) -> int:
        """How many requests run or wait."""
        return int(self.call("GET", "/__log__")["running"])

    def served(self, *, until_frozen: bool = False) -> str:
        """What it generates: compare it with :func:`~tests.vllm_fake.signature`.

        Args:
            until_frozen: Whether the request goes on until a pause froze it and ended.
        """
        body = {"model": "m", "prompt": [1, 2, 3], "until_frozen": until_frozen}
        return str(self.call("POST", "/v1/completions", body)["choices"][0]["text"])

    def __enter__(self) -> FakeVLLM:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()
