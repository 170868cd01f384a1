"""The parent's side of a trainer in a process of its own."""

from __future__ import annotations

import json
import os
import queue
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from weight_update.bench.gpu.models import BigModel

_START_SECONDS = 180.0
_UPDATE_SECONDS = 120.0
_EXIT_SECONDS = 20.0


class TrainerProcess:
    """A trainer that updates an engine when it is told to.

    Args:
        url: The engine.
        model: What the trainer holds.
        device: Where, as that process numbers its devices.
        scheme: Arguments of the scheme.
        environment: Variables that it gets besides this process's own.
    """

    def __init__(
        self,
        url: str,
        model: BigModel,
        device: str,
        scheme: Mapping[str, Any],
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self._home = tempfile.TemporaryDirectory(prefix="weight-update-bench-")
        self._log = Path(self._home.name) / "trainer.log"
        with self._log.open("w") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "weight_update.bench.gpu.child"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env={**os.environ, **(environment or {})},
                text=True,
                start_new_session=True,
            )
        self._answers: queue.SimpleQueue[dict[str, Any] | None] = queue.SimpleQueue()
        threading.Thread(target=self._listen, daemon=True).start()
        self._tell({"url": url, "model": asdict(model), "device": device, "scheme": dict(scheme)})

    def __enter__(self) -> Self:
        """Waits until the model is there."""
        try:
            self._answer(_START_SECONDS)
        except BaseException:
            self.kill()
            raise
        return self

    def update(self, seed: int) -> dict[str, Any]:
        """Has it update with new values; returns how that went.

        Raises:
            RuntimeError: It ended, or does not come back; the text has the end of its log.
        """
        self._tell({"seed": seed})
        return self._answer(_UPDATE_SECONDS)

    def end(self) -> float | None:
        """Lets it end; returns the seconds that its exit took, or None if it did not come."""
        start = time.perf_counter()
        if self._process.stdin is not None:
            self._process.stdin.close()
        try:
            self._process.wait(_EXIT_SECONDS)
        except subprocess.TimeoutExpired:
            return None
        return time.perf_counter() - start

    def kill(self) -> None:
        """Ends it at once."""
        self._process.kill()
        self._process.wait()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Ends it."""
        self.kill()
        self._home.cleanup()

    def _tell(self, value: dict[str, Any]) -> None:
        if self._process.stdin is None:
            return
        try:
            self._process.stdin.write(json.dumps(value) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError as error:
            raise RuntimeError(f"a trainer ended: {self._said()}") from error

    def _listen(self) -> None:
        for line in self._process.stdout or ():
            if line.startswith("{"):  # native libraries print there too
                self._answers.put(json.loads(line))
        self._answers.put(None)

    def _answer(self, seconds: float) -> dict[str, Any]:
        try:
            answer = self._answers.get(timeout=seconds)
        except queue.Empty:
            raise RuntimeError(f"a trainer said nothing for {seconds:.0f} s") from None
        if answer is None:
            raise RuntimeError(f"a trainer ended: {self._said()}")
        return answer

    def _said(self) -> str:
        return self._log.read_text(errors="replace")[-2000:]
