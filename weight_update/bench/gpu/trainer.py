"""The parent's side of a trainer in a process of its own."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import asdict
from types import TracebackType
from typing import Any, Self

from weight_update.bench.gpu.line_process import LineProcess
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
        self._process = LineProcess("weight_update.bench.gpu.child", "a trainer", environment)
        self._job = {"url": url, "model": asdict(model), "device": device, "scheme": dict(scheme)}

    def __enter__(self) -> Self:
        """Waits until the model is there."""
        try:
            self._process.ask(self._job, _START_SECONDS)
        except BaseException:
            self._process.kill()
            raise
        return self

    def update(self, seed: int) -> dict[str, Any]:
        """Has it update with new values; returns how that went.

        Raises:
            RuntimeError: It ended, or does not come back; the text has the end of its log.
        """
        return self._process.ask({"seed": seed}, _UPDATE_SECONDS)

    def end(self) -> float | None:
        """Lets it end; returns the seconds that its exit took, or None if it did not come."""
        start = time.perf_counter()
        ended = self._process.end(_EXIT_SECONDS)
        return time.perf_counter() - start if ended else None

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Ends it."""
        self._process.kill()
