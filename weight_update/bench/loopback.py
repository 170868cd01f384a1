"""Whole updates into reference engines of this host, beside bare broadcasts of the same bytes."""

from __future__ import annotations

import hashlib
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from importlib import metadata
from typing import Any

import requests
import torch
from transformers.utils import logging as transformers_logging

from weight_update import SGLangWeightSender, SGLangWeightSyncScheme, UpdateReport
from weight_update.bench.bare import BareBroadcasts
from weight_update.bench.machine import PeakMemory, describe_machine
from weight_update.bench.models import ModelShape, change
from weight_update.bench.planning import planning_rows, timed
from weight_update.bench.rows import Pair, Row
from weight_update.bench.torchrl_peer import time_torchrl, torchrl_objection
from weight_update.reference_engine import ReferenceEngine
from weight_update.weights.buckets import DEFAULT_BUCKET_BYTES

GIGABYTE = 1_000_000_000

# Promised for one gigabyte over gloo, by number of tensors: the whole update as a multiple of
# one bare broadcast of all bytes (into one engine, into more), and of one bare broadcast a tensor.
_AIMS = {300: (1.3, 1.5, None), 20_000: (1.6, 2.0, 1 / 3)}
_START_SECONDS = 300.0
_PLANNING_ROUNDS = 15

Tell = Callable[[str], None]


@dataclass(frozen=True)
class LoopbackJobs:
    """What is run.

    Args:
        tensors: Numbers of tensors; each is a model of its own.
        engines: Numbers of engines that one update reaches.
        nbytes: About how large each model is.
        rounds: How often each job is measured.
        device: Where model and engines are: ``cpu`` (gloo), or ``cuda`` (NCCL; the trainer has
            the first GPU and each engine one of the others).
        bucket_bytes: As the scheme's; None for its default.
        against: ``torchrl`` runs TorchRL's own scheme beside the library's.
    """

    tensors: Sequence[int] = (300, 20_000)
    engines: Sequence[int] = (1, 2)
    nbytes: int = GIGABYTE
    rounds: int = 5
    device: str = "cpu"
    bucket_bytes: int | None = None
    against: str | None = None

    def objection(self) -> str | None:
        """Why these jobs cannot run here; None when they can."""
        if self.device not in ("cpu", "cuda"):
            return f"device={self.device!r} is neither cpu nor cuda"
        if self.against not in (None, "torchrl"):
            return f"against={self.against!r} is not a peer; there is torchrl"
        if self.against and self.device == "cpu":
            return "TorchRL's scheme speaks NCCL only: add --device cuda"
        if min(self.tensors) < 12 or min(self.engines) < 1:
            return "a model has at least 12 tensors, and an update reaches at least one engine"
        if self.device == "cuda" and torch.cuda.device_count() <= max(self.engines):
            return (
                f"device='cuda' needs a GPU for the trainer and one for each engine; there are "
                f"{torch.cuda.device_count()}"
            )
        return torchrl_objection() if self.against else None

    def engine_devices(self) -> list[str]:
        """Device of each engine."""
        if self.device == "cpu":
            return ["cpu"] * max(self.engines)
        return [f"cuda:{index + 1}" for index in range(max(self.engines))]

    def trainer_device(self) -> torch.device:
        """Device of the model."""
        return torch.device("cpu" if self.device == "cpu" else "cuda:0")

    def aims(self, tensors: int, engines: int) -> tuple[float | None, float | None]:
        """Promised ratios to one bare broadcast of all bytes, and to one a tensor."""
        promised = self.device == "cpu" and self.nbytes >= GIGABYTE
        one, more, each = _AIMS.get(tensors if promised else 0, (None, None, None))
        return (one if engines == 1 else more), each


def run_loopback(jobs: LoopbackJobs, tell: Tell) -> Iterator[Row]:
    """Runs the jobs; gives each row as soon as it is measured.

    Args:
        jobs: What to run.
        tell: Told what is being done.
    """
    identity = describe_machine()
    for count in jobs.tensors:
        tell(f"{count:,} tensors: building a model of {jobs.nbytes / 1e9:g} GB")
        shape = ModelShape(count, jobs.nbytes)
        model = shape.build(jobs.trainer_device())
        yield from planning_rows(model, _PLANNING_ROUNDS, identity)
        with _engines(model, jobs, tell) as engines:
            for number in jobs.engines:
                yield from _UpdateJob(jobs, count, model, engines[:number], identity, tell).rows()


@contextmanager
def _engines(model: Any, jobs: LoopbackJobs, tell: Tell) -> Iterator[list[ReferenceEngine]]:
    number = len(jobs.engine_devices())
    with ExitStack() as started:
        directory = started.enter_context(_scratch())
        tell(f"starting {number} reference engine{'s' if number > 1 else ''} with it")
        transformers_logging.disable_progress_bar()
        model.save_pretrained(directory)
        engines = [
            started.enter_context(
                ReferenceEngine(
                    directory,
                    device=device,
                    startup_timeout=_START_SECONDS,
                    wait=False,
                    threads=torch.get_num_threads(),
                )
            )
            for device in jobs.engine_devices()
        ]
        for engine in engines:
            engine.wait_until_ready()
        yield engines


def _scratch() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="weight-update-bench-")


@dataclass(frozen=True)
class _UpdateJob:
    """One model into some engines."""

    jobs: LoopbackJobs
    count: int
    model: Any
    engines: Sequence[ReferenceEngine]
    identity: dict[str, Any]
    tell: Tell

    def rows(self) -> Iterator[Row]:
        number = len(self.engines)
        job = f"{self.count:,} tensors, {number} engine{'s' if number > 1 else ''}"
        with self._sender() as sender:
            self.tell(f"{job}: first update")
            extra = self._first_update(sender)
            self.tell(f"{job}: {self.jobs.rounds} rounds")
            flat, each, report = self._rounds(sender)
        correct = self._correct()
        identity = self._identity(report)
        aim, each_aim = self.jobs.aims(self.count, number)
        yield Row(
            job,
            "bare broadcast",
            flat,
            aim=aim,
            extra_memory_bytes=extra,
            allowed_memory_bytes=self._allowed_memory(),
            correct=correct,
            identity=identity,
        )
        yield Row(
            f"{job}, against one broadcast a tensor",
            "bare, one a tensor",
            each,
            aim=each_aim,
            correct=correct,
            identity=identity,
        )
        if self.jobs.against == "torchrl" and number == 1:
            self.tell(f"{job}: TorchRL's own scheme")
            yield self._against_torchrl(job, flat, identity)

    def _against_torchrl(self, job: str, ours: list[Pair], identity: dict[str, Any]) -> Row:
        """TorchRL's updates come after ours, since they need a process of their own."""
        theirs = time_torchrl(ModelShape(self.count, self.jobs.nbytes), self.jobs.rounds)
        pairs = [Pair(a.seconds, b) for a, b in zip(ours, theirs, strict=True)]
        peer = f"TorchRL {metadata.version('torchrl')}"
        return Row(f"{job}, against {peer}", peer, pairs, identity=identity)

    def _sender(self) -> SGLangWeightSender:
        urls = [engine.url for engine in self.engines]
        scheme = SGLangWeightSyncScheme(urls, bucket_bytes=self.jobs.bucket_bytes, verify="off")
        sender = scheme.create_sender()
        sender.register_model(self.model)
        return sender

    def _first_update(self, sender: SGLangWeightSender) -> int | None:
        """Connects before the memory is looked at; returns what the update took above it."""
        sender.init_all_workers_group()
        change(self.model)
        peak = PeakMemory(self.jobs.trainer_device())
        sender.update_weights()
        return peak.above()

    def _rounds(self, sender: SGLangWeightSender) -> tuple[list[Pair], list[Pair], UpdateReport]:
        devices = self.jobs.engine_devices()[: len(self.engines)]
        flat, each = [], []
        with BareBroadcasts([p.detach() for p in self.model.parameters()], devices) as bare:
            bare.flat()
            for _ in range(self.jobs.rounds):
                change(self.model)
                limit = bare.flat()
                seconds, report = _timed_update(sender)
                flat.append(Pair(seconds, limit))
                each.append(Pair(seconds, bare.each()))
        return flat, each, report

    def _correct(self) -> bool:
        expected = digests(self.model)
        return all(engine_digests(engine.url) == expected for engine in self.engines)

    def _allowed_memory(self) -> int:
        sizes: list[int] = [parameter.nbytes for parameter in self.model.parameters()]
        return 2 * min(self._bucket_bytes(), sum(sizes)) + max(sizes)

    def _bucket_bytes(self) -> int:
        default: int = DEFAULT_BUCKET_BYTES[self.jobs.trainer_device().type]
        return self.jobs.bucket_bytes or default

    def _identity(self, report: UpdateReport) -> dict[str, Any]:
        settings = {
            "bytes": report.bytes,
            "tensors": report.tensors,
            "buckets": report.buckets,
            "bucket_bytes": self._bucket_bytes(),
            "engines": len(self.engines),
            "device": self.jobs.device,
            "rounds": self.jobs.rounds,
        }
        return self.identity | {"settings": settings, "seconds_by_phase": report.seconds}


def _timed_update(sender: SGLangWeightSender) -> tuple[float, UpdateReport]:
    reports: list[UpdateReport] = []
    seconds = timed(lambda: reports.append(sender.update_weights()))
    return seconds, reports[0]


def digests(model: Any) -> dict[str, str]:
    """The start of each parameter's SHA-256, as the reference engine makes it."""
    return {
        name: hashlib.sha256(parameter.detach().cpu().view(-1).numpy().data).hexdigest()
        for name, parameter in model.named_parameters()
    }


def engine_digests(url: str) -> dict[str, str]:
    """What a reference engine says of its own parameters."""
    answer = requests.post(f"{url}/weights_checker", json={"action": "checksum"}, timeout=600)
    answer.raise_for_status()
    sums: dict[str, str] = answer.json()["ranks"][0]["checksums"]
    return sums
