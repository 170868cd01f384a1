"""Every phase in which an engine is called x every fault x fleets x rules, on model engines.

Thousands of combinations under a clock of the test's own. After each: the call returned within
its deadline, with nothing but a ``WeightUpdateError``; every state that it reported is true; no
engine is paused unless the report says so, and none serves mixed weights; the version moved
exactly if it was counted; and once the fault is gone, the next update heals everything.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from weight_update.report import EngineState

from . import truth
from .at_once import one_thread
from .truth import MIXED, NEW, OLD, Result
from .world import BUCKETS, Kind, ModelEngine, Proof, Strike, World

#: Phase: the call that is struck, and how many of them pass first.
PHASES: dict[str, tuple[str, int]] = {
    "connect": ("inspect", 0),
    "join": ("join", 0),
    "observe": ("observe", 0),
    "pause": ("pause", 0),
    "drain": ("drain", 0),
    "begin": ("begin", 0),
    "first bucket": ("apply", 0),
    "middle bucket": ("apply", 1),
    "last bucket": ("apply", BUCKETS - 1),
    "end": ("end", 0),
    "flush": ("flush", 0),
    "verify": ("prove", 0),
    "stamp": ("stamp", 0),
    "continue": ("resume", 0),
}
CONNECTING = ("connect", "join")
BUCKET = ("first bucket", "middle bucket", "last bucket")
BEFORE_BYTES = (*CONNECTING, "observe", "pause", "drain", "begin")
AFTER_BYTES = ("flush", "verify", "stamp", "continue")

EVERYWHERE: tuple[Kind, ...] = (
    "refuse",
    "refuse_late",
    "reset",
    "reset_late",
    "hang",
    "hang_late",
    "slow",
    "killed",
    "stopped",
    "restarted",
    "restarted_reset",
    "lie",
)
AT_A_BUCKET: tuple[Kind, ...] = ("refuse_partly", "refuse_all")
PROCESS_GONE = ("killed", "stopped", "restarted", "restarted_reset")
ONCE_AND_ALIVE = ("refuse", "refuse_late", "reset", "reset_late", "hang", "hang_late")

OLD_TAG, NEW_TAG, NEXT_TAG = 1.0, 2.0, 3.0

pytestmark = pytest.mark.usefixtures("locks_of_its_own")


@dataclass(frozen=True)
class Combination:
    """One cell of the table."""

    phase: str
    kind: Kind
    size: int
    struck: int
    mode: str
    on_failure: str
    quorum: int | str
    proof: Proof

    @property
    def proves(self) -> bool:
        """Whether the engines can show a lie about a bucket."""
        return self.proof in ("described", "sample") or (self.proof == "twins" and self.size > 1)

    @property
    def regroups(self) -> bool:
        """Whether the engines that are left go on without the one that failed."""
        return self.quorum != "all"


def fleets() -> Iterator[tuple[int, int, int | str]]:
    """Size, which engine is struck, quorum."""
    yield 1, 0, "all"
    for struck in range(3):
        yield 3, struck, "all"
        yield 3, struck, 2


def combinations(phase: str, kind: Kind) -> Iterator[Combination]:
    """All cells of a phase and a fault."""
    rules = itertools.product(("retract", "in_place", "abort"), ("hold", "resume"))
    for (size, struck, quorum), (mode, on_failure) in itertools.product(fleets(), rules):
        for proof in _proofs(phase, kind, size, struck):
            yield Combination(phase, kind, size, struck, mode, on_failure, quorum, proof)


def _proofs(phase: str, kind: Kind, size: int, struck: int) -> tuple[Proof, ...]:
    if kind == "lie" and phase in BUCKET:
        return ("none", "described", "twins", "sample")
    if phase == "verify":
        return ("described", "sample")
    return ("none",) if (size + struck) % 2 else ("described",)


def cells() -> list[tuple[str, Kind]]:
    """Phases and the faults that can strike there."""
    everywhere = list(itertools.product(PHASES, EVERYWHERE))
    return everywhere + list(itertools.product(BUCKET, AT_A_BUCKET))


class Trial:
    """One cell: a fleet on old weights, a fault, a push, and the push after it."""

    def __init__(self, cell: Combination, *, threads: bool = False) -> None:
        self.cell = cell
        self.world = World(
            cell.size,
            cell.proof,
            threads,
            {"pause_mode": cell.mode, "on_failure": cell.on_failure, "quorum": cell.quorum},
        )
        self.engine = self.world.fleet[cell.struck]
        self.struck = False
        self.also: tuple[ModelEngine, Strike] | None = None

    def run(self) -> list[str]:
        """What is wrong; each sentence with the cell in front."""
        self.world.push(OLD_TAG)
        if self.cell.phase in CONNECTING:
            self.world.updater.shutdown()  # the next update connects anew
            for member in self.world.updater.roster.members:
                member.met = False
        call, after = PHASES[self.cell.phase]
        self.engine.arm(Strike(call, self.cell.kind, after))
        if self.also is not None:
            self.also[0].arm(self.also[1])
        result = truth.push(self.world, NEW_TAG)
        self.struck = self.engine.struck > 0
        found = [*truth.troubles(result), *([] if self.also else self._expected(result))]
        found += self._heal()
        return [f"{self.cell}: {trouble}" for trouble in found]

    def _expected(self, result: Result) -> Iterator[str]:
        """What the rule fixes beyond "true": no more doubt than there is reason for."""
        cell, report = self.cell, result.report
        if report is None or not self.engine.struck:
            return
        harmless = cell.kind == "slow" or cell.regroups
        if harmless and result.error is not None:
            yield f"failed: {result.error}"
        if result.error is None or cell.kind in ("lie", "restarted"):
            return  # such an engine may say yes for long
        states = {url: outcome.state for url, outcome in report.engines.items()}
        yield from self._of_the_phase(states)
        yield from self._of_a_bucket(states[self.engine.url])

    def _of_the_phase(self, states: dict[str, EngineState]) -> Iterator[str]:
        """Nothing was sent, or everything: that leaves no doubt about any engine."""
        for url, state in states.items():
            if url == self.engine.url and self.cell.kind not in ONCE_AND_ALIVE:
                continue
            if self.cell.phase in BEFORE_BYTES and state is not OLD:
                yield f"{url}: nothing was sent, but it counts as {state}"
            if self.cell.phase in AFTER_BYTES and state is not NEW:
                yield f"{url}: everything was sent, but it counts as {state}"

    def _of_a_bucket(self, state: EngineState) -> Iterator[str]:
        """A refused first bucket leaves an engine old, one of unknown outcome mixed."""
        cell = self.cell
        if cell.phase == "first bucket" and cell.kind == "refuse" and state is not OLD:
            yield f"a refused first bucket left it {state}"
        doubtful = cell.phase in BUCKET and cell.kind in ("refuse_partly", "hang", "reset")
        if doubtful and state is not MIXED:
            yield f"counts as {state}, not as mixed"

    def _heal(self) -> Iterator[str]:
        resumes = self.cell.on_failure == "resume" or self.cell.kind == "lie"
        for engine in self.world.fleet:
            engine.bring_back()
            if not (resumes or "pause" in engine.lied or truth.unharmed(self.world, engine)):
                yield f"{engine.url}: once it is awake it generates with {engine.fingerprint}"
        yield from truth.not_healed(truth.push(self.world, NEXT_TAG))


def check(cells: Iterable[Combination], count: Callable[[str, object], None], **how: Any) -> None:
    """Runs some cells; shows the first ten troubles of all."""
    trials = [Trial(cell, **how) for cell in cells]
    found = [trouble for trial in trials for trouble in trial.run()]
    count("combinations tried in process", len(trials))
    count("combinations tried in process whose fault struck", sum(t.struck for t in trials))
    assert any(trial.struck for trial in trials), "the fault never struck"
    assert not found, shown(found)


def shown(found: list[str]) -> str:
    """The first ten of many."""
    return f"{len(found)} trouble(s), the first:\n  " + "\n  ".join(found[:10])


@pytest.mark.parametrize(("phase", "kind"), cells(), ids=lambda part: part.replace(" ", "-"))
def test_whatever_fails_the_update_neither_hangs_nor_lies(
    phase: str, kind: Kind, record_property: Any
) -> None:
    with one_thread():
        check(combinations(phase, kind), record_property)


#: Their calls let the clock of all run out while calls in other threads have not begun.
MOVE_THE_CLOCK = ("hang", "hang_late", "stopped")


@pytest.mark.parametrize("phase", PHASES, ids=lambda part: part.replace(" ", "-"))
def test_the_same_holds_when_every_call_runs_in_a_thread_of_its_own(
    phase: str, record_property: Any
) -> None:
    kinds = [kind for where, kind in cells() if where == phase and kind not in MOVE_THE_CLOCK]
    chosen = [
        cell
        for index, kind in enumerate(kinds)
        for cell in itertools.islice(combinations(phase, kind), index % 7, None, 7)
    ]

    check(chosen, record_property, threads=True)


@pytest.mark.parametrize("phase", BUCKET)
@pytest.mark.parametrize("proof", ["described", "twins", "sample"])
def test_a_lie_about_a_bucket_is_caught_where_there_is_something_to_compare_with(
    phase: str, proof: Proof
) -> None:
    chosen = [cell for cell in combinations(phase, "lie") if cell.proof == proof and cell.proves]

    for cell in chosen:
        with one_thread():
            trial = Trial(cell)
            trial.world.push(OLD_TAG)
            trial.engine.arm(Strike(*_lie_at(phase)))
            result = truth.push(trial.world, NEW_TAG)
        assert result.report is not None
        assert result.report.engines[trial.engine.url].state is MIXED, cell
        others = [o.state for u, o in result.report.engines.items() if u != trial.engine.url]
        assert set(others) <= {NEW}, cell


def _lie_at(phase: str) -> tuple[str, Kind, int]:
    call, after = PHASES[phase]
    return call, "lie", after


TWO_PHASES = ("pause", *BUCKET, "end", "flush", "stamp")
TWO_KINDS: tuple[Kind, ...] = ("refuse", "hang_late", "killed", "restarted", "lie")


def two_at_once(phase: str) -> Iterator[tuple[Combination, Combination]]:
    """Cells of two engines of one fleet; the second fault is of any phase.

    Restarts at a flush are left out: where the other engine fails before the flush phase, the
    flush is the last thing that is done to settle this one, and nobody looks afterwards.
    """
    kinds = itertools.product(TWO_KINDS, TWO_PHASES, TWO_KINDS)
    for index, (kind, other_phase, other_kind) in enumerate(kinds):
        if ("flush", "restarted") in ((phase, kind), (other_phase, other_kind)):
            continue
        proof: Proof = "none" if "lie" not in (kind, other_kind) else "described"
        quorum: int | str = 1 if index % 2 else "all"
        rules = ("retract", "hold", quorum, proof)
        yield (
            Combination(phase, kind, 3, 0, *rules),
            Combination(other_phase, other_kind, 3, 2, *rules),
        )


@pytest.mark.parametrize("phase", TWO_PHASES, ids=lambda part: part.replace(" ", "-"))
def test_two_engines_that_fail_in_one_update_are_told_apart(
    phase: str, record_property: Any
) -> None:
    found: list[str] = []
    pairs = list(two_at_once(phase))
    for cell, other in pairs:
        with one_thread():
            trial = Trial(cell)
            call, after = PHASES[other.phase]
            trial.also = (trial.world.fleet[other.struck], Strike(call, other.kind, after))
            found += [f"{other.phase}/{other.kind} and {trouble}" for trouble in trial.run()]

    record_property("combinations tried in process with two faults", len(pairs))
    assert not found, shown(found)
