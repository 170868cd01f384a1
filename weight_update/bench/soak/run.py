"""The soak: update after update under traffic, with faults by chance, and nothing may be lost.

One process is the trainer and has the senders, one has the clients, and each engine is one. After
every update the engines are asked what they hold, and that is compared with the report. What is
measured of each process is compared between an early and a late part of the run.
"""

from __future__ import annotations

import os
import random
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, get_args

import torch

from weight_update import (
    EngineState,
    SGLangWeightSender,
    SGLangWeightSyncScheme,
    UpdateReport,
    WeightUpdateError,
)
from weight_update.bench.machine import describe_machine
from weight_update.bench.soak.checks import (
    Ledger,
    Seen,
    Witness,
    digests_of,
    lies_in,
    proofs,
    unhealed,
)
from weight_update.bench.soak.faults import Trouble, choose, is_dead, revive
from weight_update.bench.soak.models import BASE, PROMPTS, SEEDS, Judge, tiny_model
from weight_update.bench.soak.traffic import Traffic, TrafficJob
from weight_update.bench.soak.vitals import ENOUGH_SAMPLES, Trend, Vitals, trends, vitals_of
from weight_update.options import PAUSE_MODE_VARIABLE, PauseMode
from weight_update.reference_engine import ReferenceEngine

_BUCKET_BYTES = 40_000  # several buckets of the tiny model
_START_SECONDS = 300.0
_OVERRUN_SECONDS = 2.0
_BUSY_OVERRUN_SECONDS = 60.0
_SHUTDOWN_SECONDS = 5.0
_ASYNC_SHARE = 0.2
_FUTURE_SECONDS = 60.0
_TOLD_EVERY = 10
_PROBLEMS_SHOWN = 50
_TRAINER = "the trainer"

Tell = Callable[[str], None]


@dataclass(frozen=True)
class SoakJob:
    """How long, how rough, and with whom.

    Args:
        updates: How many; the first half needs all engines, the second all but one.
        engines: How many, each a process of its own.
        clients: Clients of each engine.
        faults: The chance that something goes wrong around an update.
        seed: What makes the choices repeat; when they strike is up to the machine.
        timeout: Deadline of each update, in seconds.
        busy: Whether the machine does other work, too: then an update may return a minute late,
            and an engine may be too slow to answer while it is settled.
        sample_every: How many updates lie between two looks at memory, threads and descriptors.
    """

    updates: int = 1000
    engines: int = 3
    clients: int = 2
    faults: float = 0.2
    seed: int = 0
    timeout: float = 10.0
    busy: bool = False
    sample_every: int = 10

    def objection(self) -> str | None:
        """Why it cannot run here; None when it can."""
        if not Path("/proc/self/fd").is_dir():
            return "the soak reads /proc, which this system does not have"
        if self.engines < 2:
            return "there must be two engines at least, so that one can fail"
        return None


@dataclass(frozen=True)
class Struck:
    """One update with a trouble in its way.

    Attributes:
        update: Which.
        engine: Index of the engine that was struck.
        trouble: What was done.
        ended: How the update ended.
        restarted: Whether the engine had to be restarted afterwards.
    """

    update: int
    engine: int
    trouble: str
    ended: str
    restarted: bool


@dataclass(frozen=True)
class Sample:
    """What a process held after an update."""

    update: int
    process: str
    pid: int
    vitals: Vitals


@dataclass
class SoakResult:
    """What came of it.

    Attributes:
        job: What was run.
        succeeded: Updates that did.
        seconds: How long all took.
        slowest: The longest update, in seconds.
        struck: Every update that was disturbed.
        samples: Memory, threads and descriptors over time.
        answers: What became of the clients' requests.
        problems: What should not have happened, the first ones in words.
        found: How many problems there were.
    """

    job: SoakJob
    succeeded: int = 0
    seconds: float = 0.0
    slowest: float = 0.0
    struck: list[Struck] = field(default_factory=list)
    samples: list[Sample] = field(default_factory=list)
    answers: dict[str, int] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    found: int = 0

    def problem(self, update: int, text: str) -> None:
        """Notes what should not have happened."""
        self.found += 1
        if len(self.problems) < _PROBLEMS_SHOWN:
            self.problems.append(f"update {update}: {text}")

    @property
    def trends(self) -> list[Trend]:
        """Of the trainer, and of the life of each engine that lasted longest."""
        processes = sorted({sample.process for sample in self.samples})
        return [
            trend
            for name in processes
            for trend in trends(name, self._longest_life(name), peers=self._peers(name))
        ]

    @property
    def ok(self) -> bool:
        """Whether nothing was wrong and nothing grew."""
        return not self.found and all(trend.flat for trend in self.trends)

    def _peers(self, process: str) -> int:
        return self.job.engines if process == _TRAINER else 1

    def _longest_life(self, process: str) -> list[Vitals]:
        lives: dict[int, list[Vitals]] = {}
        for sample in self.samples:
            if sample.process == process:
                lives.setdefault(sample.pid, []).append(sample.vitals)
        return max(lives.values(), key=len)

    def lines(self) -> Iterator[str]:
        """What a reader wants to know of it."""
        failed = self.job.updates - self.succeeded
        yield (
            f"{self.job.updates} updates in {self.seconds:.0f} s, the slowest {self.slowest:.1f} "
            f"s: {len(self.struck)} disturbed, {self.succeeded} succeeded, {failed} failed"
        )
        yield "requests: " + ", ".join(f"{count} {what}" for what, count in self.answers.items())
        for trend in self.trends:
            verdict = "flat" if trend.flat else f"GREW by more than {trend.allowed:g}"
            yield f"{trend.what}: {trend.early:g}, later {trend.late:g}: {verdict}"
        if not self.trends:
            yield f"too short to judge memory, threads and descriptors: {ENOUGH_SAMPLES} samples"
        yield from self.problems
        yield f"{self.found} problems" if self.found else "no problem"

    def to_dict(self) -> dict[str, Any]:
        """As JSON data."""
        return {
            "ok": self.ok,
            "settings": asdict(self.job),
            "updates": self.job.updates,
            "succeeded": self.succeeded,
            "seconds": self.seconds,
            "slowest_seconds": self.slowest,
            "answers": self.answers,
            "faults": [asdict(struck) for struck in self.struck],
            "faults_by_kind": dict(Counter(struck.trouble for struck in self.struck)),
            "trends": [{**asdict(trend), "flat": trend.flat} for trend in self.trends],
            "problems_found": self.found,
            "problems": self.problems,
            "rows": [
                {"update": s.update, "process": s.process, "pid": s.pid, **asdict(s.vitals)}
                for s in self.samples
            ],
        } | describe_machine()


def run_soak(job: SoakJob, tell: Tell) -> SoakResult:
    """Runs all of it.

    Args:
        job: What to run.
        tell: Told how far it is.

    Raises:
        RuntimeError: An engine did not start, or the clients' process ended.
    """
    tell(f"starting {job.engines} reference engines and {job.engines * job.clients} clients")
    with _engines(job) as engines, _environment(), _traffic(job, engines) as traffic:
        soak = _Soak(job, tell, engines, traffic)
        soak.run()
        return soak.result


@contextmanager
def _engines(job: SoakJob) -> Iterator[list[ReferenceEngine]]:
    base = tiny_model(BASE)
    with ExitStack() as started:
        engines = []
        for _ in range(job.engines):
            engines.append(ReferenceEngine(base, wait=False, startup_timeout=_START_SECONDS))
            started.callback(engines[-1].kill)  # a graceful end would wait for the clients
        for engine in engines:
            engine.wait_until_ready()
        yield engines


@contextmanager
def _environment() -> Iterator[None]:
    """The pause mode changes from update to update, by its variable; engines need the cores."""
    before, threads = os.environ.get(PAUSE_MODE_VARIABLE), torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
        os.environ.pop(PAUSE_MODE_VARIABLE, None)
        if before is not None:
            os.environ[PAUSE_MODE_VARIABLE] = before


def _left_out(report: UpdateReport | None) -> bool:
    return report is None or any(o.state is not EngineState.NEW for o in report.engines.values())


def _traffic(job: SoakJob, engines: Sequence[ReferenceEngine]) -> Traffic:
    return Traffic(TrafficJob([e.url for e in engines], job.clients, PROMPTS, job.seed))


class _Soak:
    """One run."""

    def __init__(
        self, job: SoakJob, tell: Tell, engines: list[ReferenceEngine], traffic: Traffic
    ) -> None:
        self._job, self._tell, self._engines, self._traffic = job, tell, engines, traffic
        self._chance = random.Random(job.seed)
        self._judge = Judge()
        self._witness = Witness(self._judge)
        self._ledger = Ledger(self._judge)
        self._policy = tiny_model(BASE)
        self._seed = BASE
        self._mode = "retract"
        self._seen: dict[str, Seen] = {}
        self._failed = self._failed_before = False
        self.result = SoakResult(job)

    def run(self) -> None:
        """All updates, then the last answers."""
        start = time.monotonic()
        half = self._job.updates // 2
        self._look()
        self._phase(range(1, half + 1), "all")
        self._phase(range(half + 1, self._job.updates + 1), len(self._engines) - 1)
        self._judge_answers(self._job.updates, self._traffic.finish())
        self._count_answers()
        self.result.seconds = time.monotonic() - start

    def _phase(self, updates: Sequence[int], quorum: Any) -> None:
        """Some updates by one sender."""
        scheme = SGLangWeightSyncScheme(
            [engine.url for engine in self._engines],
            timeout=self._job.timeout,
            quorum=quorum,
            bucket_bytes=_BUCKET_BYTES,
        )
        sender = scheme.create_sender()
        sender.register_model(self._policy)
        for update in updates:
            self._update(update, sender)
        start = time.monotonic()
        sender.shutdown()
        if time.monotonic() - start > _SHUTDOWN_SECONDS:
            self._problem(updates[-1], f"shutdown() took {time.monotonic() - start:.1f} s")

    # -- one update -------------------------------------------------------------------------

    def _update(self, update: int, sender: SGLangWeightSender) -> None:
        self._train(update)
        struck = self._chance.randrange(len(self._engines))
        disturbed = update > 1 and self._chance.random() < self._job.faults
        trouble = choose(self._chance) if disturbed else None
        engine = self._engines[struck]
        timer = trouble.strike(engine) if trouble else None
        if trouble and trouble.act == "restart":
            self._ledger.killed(engine.url)
            self._look()
        ended = self._push(update, sender, trouble)
        if timer is not None:
            timer.join()
        restarted = self._mend(engine) if trouble else False
        if trouble:
            self.result.struck.append(Struck(update, struck, trouble.name, ended, restarted))
        self._judge_answers(update, self._traffic.take())
        if update % self._job.sample_every == 0:
            self._sample(update)
        if update % _TOLD_EVERY == 0:
            self._tell(self._progress(update))

    def _train(self, update: int) -> None:
        """Other weights than before, in the same module; and the next pause mode."""
        self._seed = self._chance.choice([seed for seed in SEEDS if seed != self._seed])
        self._policy.load_state_dict(self._judge.models[self._seed].state_dict())
        modes = get_args(PauseMode)
        self._mode = modes[update % len(modes)]
        os.environ[PAUSE_MODE_VARIABLE] = self._mode

    def _push(self, update: int, sender: SGLangWeightSender, trouble: Trouble | None) -> str:
        """Updates, and checks what must hold after it; returns how it ended."""
        version, weights = sender.version, digests_of(self._policy)
        start = time.monotonic()
        report, error = self._call(sender)
        self._failed_before, self._failed = self._failed, error is not None or _left_out(report)
        elapsed = time.monotonic() - start
        self._traffic.tell(sender.version)
        self.result.slowest = max(self.result.slowest, elapsed)
        where = f"({trouble.name if trouble else 'undisturbed'}, {self._mode}) "
        for text in (
            *self._late(elapsed),
            *self._changed(weights),
            *self._miscounted(version, report, error),
            *self._untrue(report, trouble, error),
        ):
            self._problem(update, where + text)
        self.result.succeeded += error is None
        return "succeeded" if error is None else f"{type(error).__name__} in {error.phase}"

    def _call(
        self, sender: SGLangWeightSender
    ) -> tuple[UpdateReport | None, WeightUpdateError | None]:
        try:
            if self._chance.random() < _ASYNC_SHARE:
                future = sender.update_weights_async()
                return future.result(self._job.timeout + _FUTURE_SECONDS), None
            return sender.update_weights(), None
        except WeightUpdateError as error:
            return error.report, error

    def _late(self, elapsed: float) -> Iterator[str]:
        overrun = _BUSY_OVERRUN_SECONDS if self._job.busy else _OVERRUN_SECONDS
        if elapsed > self._job.timeout + overrun:
            yield f"returned after {elapsed:.2f} s of {self._job.timeout} s"

    def _changed(self, weights: dict[str, str]) -> Iterator[str]:
        if digests_of(self._policy) != weights:
            yield "the trainer's own weights changed"

    def _miscounted(
        self, version: int, report: UpdateReport | None, error: WeightUpdateError | None
    ) -> Iterator[str]:
        if report is None:
            yield f"an error without a report: {error}"
            return
        counted = error is None or error.phase == "continue"
        expected = self._next_version(version) if counted else version
        if report.version != expected:
            yield f"version {report.version} after {version}, not {expected}: {error}"

    def _next_version(self, version: int) -> int:
        """One more; an engine that shows a label which was never counted is outdone."""
        labels = [seen.label for seen in self._seen.values() if seen.label]
        return 1 + max([version, *(int(label) for label in labels if label.isdecimal())])

    def _untrue(
        self, report: UpdateReport | None, trouble: Trouble | None, error: WeightUpdateError | None
    ) -> Iterator[str]:
        """Compares the report with the engines."""
        before = self._seen
        self._look(report)
        if report is None:
            return
        words = f" [{error or '; '.join(report.warnings)}]"
        for text in lies_in(report, self._seen, before, self._seed, busy=self._job.busy):
            yield text + words
        yield from proofs(self._witness, self._engines, self._seen)
        if trouble is None:
            for text in unhealed(report, self._seen, self._seed):
                yield text + words

    # -- around it --------------------------------------------------------------------------

    def _look(self, report: UpdateReport | None = None) -> None:
        """Sees what every engine is now."""
        self._seen = {
            engine.url: self._witness.look(
                engine, report.engines[engine.url].paused if report else None
            )
            for engine in self._engines
        }
        for url, seen in self._seen.items():
            self._ledger.note(url, seen, self._mode, after_failure=self._failed_before)

    def _mend(self, engine: ReferenceEngine) -> bool:
        """Brings the struck engine back, as it was left; whether it had to be restarted."""
        if is_dead(engine):
            self._ledger.killed(engine.url)
        restarted = revive(engine)
        if restarted:
            self._ledger.killed(engine.url)
        self._look()
        return restarted

    def _problem(self, update: int, text: str) -> None:
        self.result.problem(update, text)
        self._tell(f"update {update}: {text}")

    def _judge_answers(self, update: int, answers: Sequence[Any]) -> None:
        for answer in answers:
            for text in self._ledger.faults_of(answer):
                self._problem(update, text)

    def _count_answers(self) -> None:
        counts = self._ledger.counts
        asked = self._traffic.asked
        self.result.answers = {"asked": asked or 0, **counts}
        if asked != counts["answers"]:
            lost = f"{asked} requests were made and {counts['answers']} answered"
            self._problem(self._job.updates, lost)

    def _sample(self, update: int) -> None:
        pids = {_TRAINER: os.getpid()}
        pids |= {f"engine {index}": engine.pid for index, engine in enumerate(self._engines)}
        for process, pid in pids.items():
            vitals = vitals_of(pid)
            if vitals is not None:
                self.result.samples.append(Sample(update, process, pid, vitals))

    def _progress(self, update: int) -> str:
        result = self.result
        last = next((s for s in reversed(result.samples) if s.process == _TRAINER), None)
        held = (
            f"{last.vitals.rss_bytes / 1e6:.0f} MB, {last.vitals.threads} threads, "
            f"{last.vitals.fds} descriptors; "
            if last
            else ""
        )
        return (
            f"update {update} of {self._job.updates}: {result.succeeded} succeeded, "
            f"{len(result.struck)} disturbed; {held}{self._ledger.counts['answers']} answers, "
            f"{result.found} problems"
        )
