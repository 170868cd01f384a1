"""A trainer in a process of its own, which updates when it is told to.

``python -m weight_update.bench.gpu.child`` is started by :mod:`.trainer`. It reads one JSON object
a line and answers each with one; it ends, as any trainer does, when there are no more.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from weight_update import (
    SGLangWeightSender,
    SGLangWeightSyncScheme,
    UpdateReport,
    WeightUpdateError,
)
from weight_update.bench.gpu.look import look_at, sums_of
from weight_update.bench.gpu.models import BigModel, change
from weight_update.bench.gpu.rounds import settled


@dataclass(frozen=True)
class TrainerJob:
    """What a trainer holds and whom it updates.

    Args:
        url: The engine.
        model: Arguments of :class:`~weight_update.bench.gpu.models.BigModel`.
        device: Where the model is, as this process numbers its devices.
        scheme: Arguments of the scheme.
    """

    url: str
    model: Mapping[str, Any]
    device: str
    scheme: Mapping[str, Any]


class Trainer:
    """Does the job."""

    def __init__(self, job: TrainerJob) -> None:
        self._url = job.url
        self._device = torch.device(job.device)
        self._model = BigModel(**job.model).build(self._device)
        scheme = SGLangWeightSyncScheme(job.url, verify="off", **job.scheme)
        self._sender: SGLangWeightSender = scheme.create_sender()
        self._sender.register_model(self._model)

    def update(self, seed: int) -> dict[str, Any]:
        """Updates with new values; says how long that took, and how it ended."""
        change(self._model, seed)
        settled(self._device)
        start = time.perf_counter()
        try:
            report = self._sender.update_weights()
        except WeightUpdateError as error:
            return self._failure(time.perf_counter() - start, error)
        return self._success(time.perf_counter() - start, report)

    def _success(self, seconds: float, report: UpdateReport) -> dict[str, Any]:
        correct = look_at(self._url).sums == sums_of(self._model)
        return {"seconds": seconds, "error": None, "route": str(report.route), "correct": correct}

    def _failure(self, seconds: float, error: WeightUpdateError) -> dict[str, Any]:
        report = error.report
        states = [] if report is None else [each.state.value for each in report.engines.values()]
        return {
            "seconds": seconds,
            "error": type(error).__name__,
            "phase": error.phase,
            "text": error.message,
            "states": states,
        }

    def end(self) -> None:
        """Gives the group up."""
        self._sender.shutdown()


def main() -> None:
    """Serves the lines of standard input."""
    trainer = Trainer(TrainerJob(**json.loads(sys.stdin.readline())))
    _answer({"ready": True})
    for line in sys.stdin:
        _answer(trainer.update(**json.loads(line)))
    trainer.end()


def _answer(value: dict[str, Any]) -> None:
    print(json.dumps(value), flush=True)


if __name__ == "__main__":
    main()
