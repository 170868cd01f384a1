"""Updates of many engines whose answers come late: does a call wait for another engine's?

Every answer of every engine leaves the same time later, as over a long line. Engines that are
asked side by side then cost that time once for all of them; a call that waits for another
engine's answer costs it once more.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from transformers.utils import logging as transformers_logging

from weight_update import SGLangWeightSender, SGLangWeightSyncScheme, UpdateReport
from weight_update.bench.loopback import digests, engine_digests
from weight_update.bench.machine import describe_machine
from weight_update.bench.models import ModelShape, change
from weight_update.bench.rows import Pair, Row
from weight_update.options import Verify
from weight_update.reference_engine import ReferenceEngine

_TENSORS = 21
# Promised for up to 16 engines: what they take together, as a multiple of what one takes.
_AIM = 1.3
_PROMISED_ENGINES, _PROMISED_LATENCY = 16, 0.05
_START_SECONDS = 300.0
# Starts are mostly imports of torch: more at once would only wait for each other.
_STARTING = 4

Tell = Callable[[str], None]


@dataclass(frozen=True)
class FleetJobs:
    """What is run.

    Args:
        engines: Numbers of engines that one update reaches; each is compared with one engine.
        latency: Seconds by which every answer leaves later.
        nbytes: About how large the model is.
        rounds: How often each job is measured.
        verify: As the scheme's.
    """

    engines: Sequence[int] = (1, 4, 16)
    latency: float = 0.05
    nbytes: int = 1_000_000
    rounds: int = 5
    verify: Verify = "auto"

    def objection(self) -> str | None:
        """Why these jobs cannot run; None when they can.

        Example:
            >>> FleetJobs(engines=(0,)).objection()
            'an update reaches at least one engine'
        """
        if min(self.engines) < 1:
            return "an update reaches at least one engine"
        return None if self.latency > 0 else "without latency nothing can be hidden"

    def aim(self, engines: int) -> float | None:
        """The promised ratio to one engine; None where nothing is promised."""
        promised = 1 < engines <= _PROMISED_ENGINES and self.latency >= _PROMISED_LATENCY
        return _AIM if promised else None


@dataclass(frozen=True)
class Trace:
    """What one update asked of one engine.

    Attributes:
        paths: The routes, in order.
        trips: How many of the requests went out after the answer to another had come.
    """

    paths: tuple[str, ...]
    trips: int

    @classmethod
    def of(cls, requests: Sequence[Mapping[str, Any]]) -> Trace:
        """The trace of some answered requests of a reference engine's log.

        Example:
            >>> times = [("/a", 0.0, 1.0), ("/b", 0.1, 0.9), ("/c", 1.1, 2.0)]
            >>> Trace.of([{"path": path, "t0": t0, "t1": t1} for path, t0, t1 in times]).trips
            2
        """
        trips, answered = 0, 0.0
        for request in sorted(requests, key=lambda request: request["t1"]):
            if request["t0"] >= answered:
                trips, answered = trips + 1, request["t1"]
        return cls(tuple(request["path"] for request in requests), trips)


@dataclass(frozen=True)
class _Update:
    """One update, measured.

    Attributes:
        seconds: The whole call.
        report: What it reports.
        trace: What it asked of the first engine.
        trainer_cpu: Seconds of processor time that the trainer took.
        engines_cpu: Those of all its engines.
    """

    seconds: float
    report: UpdateReport
    trace: Trace
    trainer_cpu: float
    engines_cpu: float


@dataclass
class _Target:
    """A sender, and the engines that it updates."""

    sender: SGLangWeightSender
    engines: Sequence[ReferenceEngine]
    last: _Update = field(init=False)

    def update(self) -> float:
        """Runs one update; returns its seconds."""
        first, pids = self.engines[0], [engine.pid for engine in self.engines]
        asked, engines_cpu = len(first.requests()), _cpu_seconds(pids)
        trainer_cpu, start = time.process_time(), time.perf_counter()
        report = self.sender.update_weights()
        seconds = time.perf_counter() - start
        trainer_cpu = time.process_time() - trainer_cpu
        trace = Trace.of(list(islice(first.requests(), asked, None)))
        engines_cpu = _cpu_seconds(pids) - engines_cpu
        self.last = _Update(seconds, report, trace, trainer_cpu, engines_cpu)
        return seconds


def run_fleet(jobs: FleetJobs, tell: Tell) -> Iterator[Row]:
    """Runs the jobs; gives each row as soon as it is measured.

    Args:
        jobs: What to run.
        tell: Told what is being done.
    """
    model = ModelShape(_TENSORS, jobs.nbytes).build(torch.device("cpu"))
    with _engines(model, jobs, tell) as engines, _target(model, engines[:1], jobs) as one:
        for number in jobs.engines:
            tell(f"{_named(number)}: {jobs.rounds} rounds")
            if number == 1:
                yield _one_engine(model, one, jobs)
                continue
            with _target(model, engines[:number], jobs) as many:
                yield _many_engines(model, one, many, jobs)


def _named(engines: int) -> str:
    return f"{engines} engine{'s' if engines > 1 else ''}"


def _one_engine(model: Any, one: _Target, jobs: FleetJobs) -> Row:
    """One engine beside the mere latency of its answers."""
    pairs = []
    for _ in range(jobs.rounds):
        change(model)
        seconds = one.update()
        pairs.append(Pair(seconds, one.last.trace.trips * jobs.latency))
    return _row(one, pairs, "its answers' latency", model, jobs)


def _many_engines(model: Any, one: _Target, many: _Target, jobs: FleetJobs) -> Row:
    pairs = []
    for _ in range(jobs.rounds):
        change(model)
        limit = one.update()
        change(model)
        pairs.append(Pair(many.update(), limit))
    return _row(many, pairs, "1 engine", model, jobs)


def _row(target: _Target, pairs: list[Pair], limit: str, model: Any, jobs: FleetJobs) -> Row:
    number, expected, last = len(target.engines), digests(model), target.last
    settings = {
        "engines": number,
        "latency": jobs.latency,
        "bytes": last.report.bytes,
        "tensors": last.report.tensors,
        "buckets": last.report.buckets,
        "rounds": jobs.rounds,
        "verify": jobs.verify,
    }
    found = {
        "settings": settings,
        "seconds_by_phase": dict(last.report.seconds),
        "requests": list(last.trace.paths),
        "round_trips": last.trace.trips,
        "cpu_seconds": {"trainer": last.trainer_cpu, "engines": last.engines_cpu},
    }
    return Row(
        f"{_named(number)}, {jobs.latency * 1e3:g} ms on every answer",
        limit,
        pairs,
        aim=jobs.aim(number),
        correct=all(engine_digests(engine.url) == expected for engine in target.engines),
        identity=describe_machine() | found,
    )


@contextmanager
def _target(model: Any, engines: Sequence[ReferenceEngine], jobs: FleetJobs) -> Iterator[_Target]:
    """A sender that is connected, and has updated its engines once."""
    scheme = SGLangWeightSyncScheme([engine.url for engine in engines], verify=jobs.verify)
    with scheme.create_sender() as sender:
        sender.register_model(model)
        sender.update_weights()
        yield _Target(sender, engines)


@contextmanager
def _engines(model: Any, jobs: FleetJobs, tell: Tell) -> Iterator[list[ReferenceEngine]]:
    number = max(jobs.engines)
    tell(f"starting {number} reference engine{'s' if number > 1 else ''}")
    transformers_logging.disable_progress_bar()
    with ExitStack() as started:
        directory = started.enter_context(
            tempfile.TemporaryDirectory(prefix="weight-update-bench-")
        )
        model.save_pretrained(directory)
        engines: list[ReferenceEngine] = []
        for index in range(number):
            if index >= _STARTING:
                engines[index - _STARTING].wait_until_ready()
            engine = ReferenceEngine(
                directory,
                answer_delay=jobs.latency,
                startup_timeout=_START_SECONDS,
                wait=False,
            )
            engines.append(started.enter_context(_stopped(engine)))
        for engine in engines:
            engine.wait_until_ready()
        yield engines


@contextmanager
def _stopped(engine: ReferenceEngine) -> Iterator[ReferenceEngine]:
    """An engine that ends with the block, without being waited for at its start."""
    try:
        yield engine
    finally:
        engine.stop()


def _cpu_seconds(pids: Sequence[int]) -> float:
    """Processor time that some processes of this host have taken.

    Example:
        >>> _cpu_seconds([os.getpid()]) > 0
        True
    """
    ticks = 0
    for pid in pids:
        # The name of the process, in brackets, may hold spaces.
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        ticks += int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK")
