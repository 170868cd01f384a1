"""Engines that fail while a bucket travels, and trainers whose devices are numbered otherwise."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from weight_update.bench.gpu.models import BigModel
from weight_update.bench.gpu.trainer import TrainerProcess
from weight_update.bench.rows import Pair, Row
from weight_update.reference_engine import Fault, ReferenceEngine

_TIMEOUT = 8.0
_GRACE = 2.0  # by which an update may overrun its deadline
_BUCKETS = 4
_ROUTE = "/update_weights_from_distributed"


@dataclass(frozen=True)
class Failing:
    """One way in which an engine fails in the second of four buckets.

    Attributes:
        kind: Of the fault.
        name: What the job is called.
        error: The kind of error that the trainer must get.
        seconds: By when.
    """

    kind: Any
    name: str
    error: str
    seconds: float


FAILURES = (
    Failing("refuse", "the engine refuses mid-bucket", "EngineRejected", 2.0),
    Failing("die", "the engine dies (-9) mid-bucket", "EngineUnreachable", 5.0),
    Failing("stop", "the engine stops (-STOP) mid-bucket", "UpdateTimeout", _TIMEOUT + _GRACE),
)


def failure_rows(
    model: BigModel, engine: ReferenceEngine, device: str, identity: Mapping[str, Any]
) -> Iterator[Row]:
    """Has an engine fail in each way; the trainer, a process of its own, goes on and ends.

    Args:
        model: What the trainer and the engine hold.
        engine: The engine; it is started anew where it has to be.
        device: The trainer's.
        identity: What identifies the run.
    """
    scheme = {"timeout": _TIMEOUT, "bucket_bytes": model.nbytes // _BUCKETS}
    for failing in FAILURES:
        with TrainerProcess(engine.url, model, device, scheme) as trainer:
            yield _failure_row(failing, trainer, engine, {**identity, "settings": scheme})


def _failure_row(
    failing: Failing,
    trainer: TrainerProcess,
    engine: ReferenceEngine,
    identity: Mapping[str, Any],
) -> Row:
    before = trainer.update(seed=1)
    fault = Fault(_ROUTE, failing.kind, when="after_receive", tensors=0, after=1, times=1)
    engine.inject(fault)
    failed = trainer.update(seed=2)
    if failing.kind == "refuse":
        engine.clear_faults()
    else:
        engine.restart()
    after = trainer.update(seed=3)
    exit_seconds = trainer.end()
    return Row(
        failing.name,
        "promised",
        [Pair(failed["seconds"], failing.seconds)],
        aim=1.0,
        broken=list(_broken(failing, failed, after, exit_seconds)),
        correct=bool(before.get("correct")) and bool(after.get("correct")),
        identity={
            **identity,
            "failed": failed,
            "next": after,
            "exit_seconds": exit_seconds,
        },
    )


def _broken(
    failing: Failing,
    failed: Mapping[str, Any],
    after: Mapping[str, Any],
    exit_seconds: float | None,
) -> Iterator[str]:
    if failed["error"] != failing.error:
        yield f"the update ended with {failed['error']} instead of {failing.error}"
    if after["error"] is not None:
        yield f"the next update failed: {after['text']}"
    if exit_seconds is None:
        yield "the trainer's process did not exit"


def renumbered_rows(
    model: BigModel,
    url: str,
    devices: tuple[str, str],
    rounds: int,
    identity: Mapping[str, Any],
) -> Iterator[Row]:
    """Updates from a trainer whose visible devices are turned round, beside one whose are not.

    Args:
        model: What trainer and engine hold.
        url: The engine, on the first GPU of the host.
        devices: The trainer's as this process numbers it, and as the other one does.
        rounds: How often both are measured.
        identity: What identifies the run.
    """
    usual = _updates(TrainerProcess(url, model, devices[0], {}), rounds)
    turned = {"CUDA_VISIBLE_DEVICES": "1,0"}
    renumbered = _updates(TrainerProcess(url, model, devices[1], {}, turned), rounds)
    pairs = [
        Pair(ours["seconds"], theirs["seconds"])
        for ours, theirs in zip(renumbered, usual, strict=True)
    ]
    yield Row(
        f"{model.title}, CUDA_VISIBLE_DEVICES=1,0",
        "devices as they are",
        pairs,
        correct=all(update["correct"] for update in (*usual, *renumbered)),
        identity={
            **identity,
            "settings": {"verify": "off", **turned},
            "route": renumbered[-1]["route"],
        },
    )


def _updates(trainer: TrainerProcess, rounds: int) -> list[dict[str, Any]]:
    with trainer:
        updates = [trainer.update(seed) for seed in range(rounds + 1)][1:]
    failed = next((update for update in updates if update["error"]), None)
    if failed is not None:
        raise RuntimeError(f"a trainer's update failed: {failed['error']}: {failed['text']}")
    return updates
