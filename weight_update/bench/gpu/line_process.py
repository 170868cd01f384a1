"""A process that is told a line of JSON at a time, and answers each with one."""

from __future__ import annotations

import json
import os
import queue
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

_LOG_CHARACTERS = 2000


class LineProcess:
    """A module of this package that runs in a process of its own.

    Args:
        module: What ``python -m`` is to run.
        name: What errors call it.
        environment: Variables that it gets besides this process's own.
    """

    def __init__(
        self, module: str, name: str, environment: Mapping[str, str] | None = None
    ) -> None:
        self._name = name
        self._home = tempfile.TemporaryDirectory(prefix="weight-update-bench-")
        self._log = Path(self._home.name) / "log"
        with self._log.open("w") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", module],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env={**os.environ, **(environment or {})},
                text=True,
                start_new_session=True,
            )
        self._answers: queue.SimpleQueue[dict[str, Any] | None] = queue.SimpleQueue()
        threading.Thread(target=self._listen, daemon=True).start()

    def ask(self, what: Mapping[str, Any], seconds: float) -> dict[str, Any]:
        """Tells it something; returns its answer.

        Raises:
            RuntimeError: It ended, or does not answer in time; the text has the end of its log.
        """
        with suppress(BrokenPipeError):  # it ended: what it said is read below
            if self._process.stdin is not None:
                self._process.stdin.write(json.dumps(what) + "\n")
                self._process.stdin.flush()
        try:
            answer = self._answers.get(timeout=seconds)
        except queue.Empty:
            raise RuntimeError(f"{self._name} said nothing for {seconds:.0f} s") from None
        if answer is None:
            said = self._log.read_text(errors="replace")[-_LOG_CHARACTERS:]
            raise RuntimeError(f"{self._name} ended: {said}")
        return answer

    def end(self, patience: float) -> bool:
        """Tells it that there is no more; whether it ended in these seconds."""
        with suppress(BrokenPipeError):
            if self._process.stdin is not None:
                self._process.stdin.close()
        try:
            self._process.wait(patience)
        except subprocess.TimeoutExpired:
            return False
        return True

    def kill(self) -> None:
        """Ends it at once, if it has not ended, and removes its files."""
        self._process.kill()
        self._process.wait()
        self._home.cleanup()

    def _listen(self) -> None:
        for line in self._process.stdout or ():
            if line.startswith("{"):  # native libraries print there too
                self._answers.put(json.loads(line))
        self._answers.put(None)
