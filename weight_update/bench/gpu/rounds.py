"""Rounds of one job: new values, the limit, a whole update, and a look at what arrived."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from weight_update import SGLangWeightSender, SGLangWeightSyncScheme, UpdateReport
from weight_update.bench.gpu.look import look_at, sums_of
from weight_update.bench.machine import PeakMemory
from weight_update.bench.rows import Pair, median_pair

_FIRST_SEED = 1000


@dataclass(frozen=True)
class Round:
    """One update beside its limit.

    Attributes:
        seconds: The whole ``update_weights()`` call.
        limit_seconds: What it is compared with.
        report: What the update reported.
        correct: Whether the engine has exactly the trainer's values, where its parameters were.
    """

    seconds: float
    limit_seconds: float
    report: UpdateReport
    correct: bool

    @property
    def whole(self) -> Pair:
        """The whole call."""
        return Pair(self.seconds, self.limit_seconds)

    @property
    def transfer(self) -> Pair:
        """The transfer phase alone."""
        return Pair(self.report.seconds["transfer"], self.limit_seconds)


@dataclass(frozen=True)
class Memory:
    """What updates took above the models, in bytes; None where the system does not tell.

    Attributes:
        trainer: The most that the trainer's tensors took during an update.
        engine: The most that the engine's took.
        device: What the GPU of the trainer has less of after the updates: buffers that are
            kept, memory for communication and the like, of all its processes.
    """

    trainer: int | None
    engine: int | None
    device: int | None


@dataclass(frozen=True)
class Measured:
    """All rounds of a job."""

    rounds: Sequence[Round]
    memory: Memory

    @property
    def correct(self) -> bool:
        """Whether every round was."""
        return all(round.correct for round in self.rounds)

    def identity(self) -> dict[str, Any]:
        """How the median round went."""
        median = median_pair([round.whole for round in self.rounds])
        report = next(round.report for round in self.rounds if round.whole == median)
        return {
            "seconds_by_phase": dict(report.seconds),
            "route": str(report.route),
            "requests": report.buckets,
            "tensors": report.tensors,
            "bytes": report.bytes,
            "warnings": list(report.warnings),
            "seconds_of_rounds": [round.seconds for round in self.rounds],
            "device_bytes": self.memory.device,
        }


@dataclass(frozen=True)
class Site:
    """A trainer's model in this process and the engine that it updates.

    Attributes:
        url: The engine.
        device: Where the model is.
        source: What is pushed.
        renew: Gives ``source`` new values, by a seed.
        scheme: Arguments of the scheme.
    """

    url: str
    device: torch.device
    source: Any
    renew: Callable[[int], None]
    scheme: Mapping[str, Any] = field(default_factory=dict)

    @contextmanager
    def sender(self) -> Iterator[SGLangWeightSender]:
        """A sender of the source. It compares nothing itself: engines digest on the CPU."""
        scheme = SGLangWeightSyncScheme(self.url, verify="off", **self.scheme)
        with scheme.create_sender() as sender:
            sender.register_model(lambda: self.source)
            yield sender

    def measure(self, rounds: int, limit: Callable[[], float]) -> Measured:
        """Runs the rounds, after two updates that connect, make buffers and get to know the model.

        Args:
            rounds: How many.
            limit: Measures the limit, right before each update.
        """
        look_at(self.url)  # has the engine make what it needs to look
        free = self._free_bytes()
        with self.sender() as sender:
            sender.init_all_workers_group()
            trainer, engine = self._first(sender)
            sender.update_weights()
            done = [self._round(sender, limit, _FIRST_SEED + index) for index in range(rounds)]
            left = self._free_bytes()
        taken = None if free is None or left is None else free - left
        return Measured(done, Memory(trainer, engine, taken))

    def _first(self, sender: SGLangWeightSender) -> tuple[int | None, int | None]:
        """The first update, and what it took on either side."""
        self.renew(0)
        before = look_at(self.url)
        peak = PeakMemory(self.device)
        sender.update_weights()
        trainer, after = peak.above(), look_at(self.url)
        if before.held_bytes is None or after.peak_bytes is None:
            return trainer, None
        return trainer, after.peak_bytes - before.held_bytes

    def _round(self, sender: SGLangWeightSender, limit: Callable[[], float], seed: int) -> Round:
        places = look_at(self.url).addresses
        self.renew(seed)
        settled(self.device)  # the limit may be measured by another process, on this GPU
        limit_seconds = limit()
        seconds, report = timed_update(sender, self.device)
        found = look_at(self.url)
        correct = found.sums == sums_of(self.source) and found.addresses == places
        return Round(seconds, limit_seconds, report, correct)

    def _free_bytes(self) -> int | None:
        if self.device.type != "cuda":
            return None
        torch.cuda.synchronize(self.device)
        return torch.cuda.mem_get_info(self.device)[0]


def settled(device: torch.device) -> None:
    """Waits until a GPU has done all that this process gave it."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def timed_update(sender: SGLangWeightSender, device: torch.device) -> tuple[float, UpdateReport]:
    """The seconds of one whole update, and its report."""
    settled(device)
    start = time.perf_counter()
    report = sender.update_weights()
    return time.perf_counter() - start, report
