"""Real processes, sockets and gloo: a pairwise choice of phases, faults, fleets and options.

The same promises as in ``test_in_process_table.py``; what an engine holds is told by what it
generates.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from tests.integration import kit
from tests.integration.kit import BEGIN, CONTINUE, END, FLUSH, INIT, PAUSE, STAMP, UPDATE
from weight_update import EngineState, UpdateReport, WeightUpdateError
from weight_update.reference_engine import Fault, ReferenceEngine
from weight_update.report import EngineOutcome, Progress

from .pairwise import Row, all_pairs

OLD, NEW, MIXED = EngineState.OLD, EngineState.NEW, EngineState.MIXED
UNREACHABLE = EngineState.UNREACHABLE

SHORT = 3.0  # the deadline where it is waited for
LONG = 60.0
SLACK = 15.0  # 2 s are promised; the rest is for a busy machine
BUCKET_BYTES = 40_000  # a handful of buckets

#: Phase: the route that is struck, and how many calls pass first.
PHASES: dict[str, tuple[str, int]] = {
    "observe": ("/server_info", 0),
    "join": (INIT, 0),
    "pause": (PAUSE, 0),
    "drain": ("/v1/loads", 0),
    "begin": (BEGIN, 0),
    "first bucket": (UPDATE, 0),
    "middle bucket": (UPDATE, 1),
    "last bucket": (UPDATE, -1),
    "end": (END, 0),
    "flush": (FLUSH, 0),
    "verify": ("/weights_checker", 0),
    "stamp": (STAMP, 0),
    "continue": (CONTINUE, 0),
}
BUCKET = ("first bucket", "middle bucket", "last bucket")

#: Fault: kind, when, and where it is of use (None for everywhere).
FAULTS: dict[str, tuple[str, str, tuple[str, ...] | None]] = {
    "refuse": ("refuse", "before_join", None),
    "success_false": ("success_false", "before_join", ("join", "pause", "begin", *BUCKET, "stamp")),
    "non_json": ("non_json", "before_join", None),
    "close": ("close", "before_join", None),
    "close late": (
        "close",
        "before_answer",
        ("pause", "begin", *BUCKET, "end", "stamp", "continue"),
    ),
    "hang": ("hang", "before_join", None),
    "hang late": ("hang", "before_answer", ("join", "pause", "last bucket", "stamp")),
    "slow": ("slow", "before_join", None),
    "torn": ("refuse", "after_load", BUCKET),
    "lie": ("lie", "before_join", BUCKET),
    "die": ("die", "before_join", ("join", "flush")),
    "killed": ("-9", "", ("middle bucket", "last bucket")),
    "stop": ("stop", "before_join", ("pause", "flush", "stamp")),
    "stopped": ("-STOP", "", ("middle bucket", "last bucket")),
}
SIGNALS = {"-9": signal.SIGKILL, "-STOP": signal.SIGSTOP}
# Who confirms a bucket without taking it leaves the others waiting for its part of the wire.
WAITS = ("hang", "stop", "-STOP", "lie")
GONE = ("die", "stop", "-9", "-STOP")

FACTORS = {
    "phase": list(PHASES),
    "fault": list(FAULTS),
    "fleet": ["1", "3", "3, quorum 2"],
    "mode": ["retract", "in_place", "abort"],
    "load_format": ["flattened_bucket", "tensors"],
}


def makes_sense(row: Row) -> bool:
    """Whether the route is called under this mode, and the fault is of use there."""
    _, _, where = FAULTS[row["fault"]]
    flushes_apart = row["mode"] == "retract" or row["phase"] != "flush"
    drains = row["mode"] == "abort" or row["phase"] != "drain"  # of this release
    return flushes_apart and drains and (where is None or row["phase"] in where)


ROWS = all_pairs(FACTORS, makes_sense)


def named(row: Row) -> str:
    """A test id."""
    return "-".join(str(value).replace(" ", "_").replace(",", "") for value in row.values())


class Trial:
    """An update from model A to model B with a fault in its way; the last engine is struck."""

    def __init__(self, row: Row, fleet: list[ReferenceEngine]) -> None:
        self.row = row
        self.engines = fleet[: int(row["fleet"][0])]
        self.struck = self.engines[-1]
        self.kind, self.when, _ = FAULTS[row["fault"]]
        self.waits = self.kind in WAITS
        self.quorum: Any = 2 if "quorum" in row["fleet"] else "all"
        for engine in self.engines:
            kit.relabel(engine, "default")
        self.sender = kit.make_sender(
            self.engines,
            bucket_bytes=BUCKET_BYTES,
            pause_mode=row["mode"],
            load_format=row["load_format"],
            quorum=self.quorum,
        )
        if row["phase"] == "join":
            kit.push(self.engines, kit.llama(0))
            self.buckets = 0
        else:
            self.buckets = self.sender.update_weights(kit.llama(0)).buckets
        self.version = self.sender.version
        self.error: WeightUpdateError | None = None
        self.log = kit.Log(self.struck)

    def run(self) -> None:
        """Pushes model B and checks all that was promised."""
        report = self._push(kit.llama(1))
        kit.wait_for(self._was_struck)
        assert report.version == self.sender.version
        moved = self.sender.version > self.version
        assert moved or self.error is not None
        for engine in self.engines:
            self._check_engine(engine, report.engines[engine.url])
        if self.kind == "slow" or (self.quorum == 2 and not self.waits):
            assert self.error is None, self.error
        self._heal()

    def _push(self, model: Any) -> UpdateReport:
        before = {name: value.clone() for name, value in model.state_dict().items()}
        hook = self._arm()
        limit = (2 * SHORT if self.quorum == 2 else SHORT) if self.waits else LONG
        start = time.monotonic()
        try:
            with kit.timeout_of(self.sender, limit):
                report = self.sender.update_weights(model, progress=hook)
        except WeightUpdateError as error:
            self.error, told = error, error.report
            report = told or pytest.fail(f"no report: {error}")
        elapsed = time.monotonic() - start
        assert elapsed <= SLACK + (limit if self.waits else 0.0), f"{elapsed:.1f} s: {self.error}"
        for name, value in model.state_dict().items():
            assert torch.equal(value, before[name]), f"the trainer's {name} changed"
        return report

    def _target(self) -> tuple[str, int]:
        """The route that is struck, and how many calls pass first."""
        path, after = PHASES[self.row["phase"]]
        return path, self.buckets - 1 if after < 0 else after

    def _was_struck(self) -> bool:
        """Whether the call came that the fault waits for; signals strike by themselves."""
        path, after = self._target()
        return self.kind in SIGNALS or self.log.count(self.struck, path) > after

    def _arm(self) -> Any:
        path, after = self._target()
        if path == FLUSH:  # a call of its own only where the last request's was refused
            kit.make_flush_owed(self.struck, after=self.buckets - 1)
        if self.kind not in SIGNALS:
            fields: dict[str, Any] = {"seconds": 0.3} if self.kind == "slow" else {}
            fields |= {"status": 200} if self.kind == "non_json" else {}
            fields |= {"tensors": 1} if self.when == "after_load" else {}
            kind: Any = self.kind
            when: Any = self.when
            self.struck.inject(Fault(path, kind, when, after=after, times=1, **fields))
            return None

        def strike(now: Progress) -> None:
            if now.phase == "transfer" and now.bucket == after:
                os.kill(self.struck.pid, SIGNALS[self.kind])

        return strike

    def _check_engine(self, engine: ReferenceEngine, outcome: EngineOutcome) -> None:
        words = f"{outcome}; {self.error}"
        gone = engine is self.struck and self.kind in GONE
        if gone or outcome.state is UNREACHABLE:
            assert gone, words
            assert outcome.state is UNREACHABLE, words
            return
        paused = kit.is_paused(engine)
        assert outcome.paused == paused or "may still take effect" in outcome.detail, words
        assert (outcome.state is MIXED) == paused, words
        assert outcome.version in (None, kit.label(engine)), words
        if outcome.state is OLD:
            assert self._served(engine) == kit.tokens_of(0), words
        if outcome.state is NEW:
            assert self._served(engine) == kit.tokens_of(1), words
        if self.error is None and engine is not self.struck and self.kind != "lie":
            # A lie may make another engine look late, and that one be left out.
            assert outcome.state is NEW, words
            assert kit.label(engine) == str(self.sender.version), words

    def _served(self, engine: ReferenceEngine) -> list[int]:
        """What it generates; ``in_place`` is warned to leave the prefixes of older weights."""
        if self.row["mode"] == "in_place":
            engine.call("POST", FLUSH)
        return kit.served(engine)

    def _heal(self) -> None:
        self.struck.process.poll()
        if self.kind in ("die", "-9"):
            self.struck.restart()
        elif self.kind in ("stop", "-STOP"):
            kit.wake(self.struck)
        if self.kind not in ("die", "-9"):
            self.struck.clear_faults()
        version = self.sender.version
        report = self.sender.update_weights(kit.llama(1))
        assert report.version == self.sender.version > version
        for engine in self.engines:
            assert report.engines[engine.url].state is NEW, report
            assert not kit.is_paused(engine)
            assert self._served(engine) == kit.tokens_of(1)
            assert kit.label(engine) == str(report.version)
        self.sender.shutdown()


@pytest.fixture
def revived(fleet: list[ReferenceEngine]) -> Iterator[list[ReferenceEngine]]:
    """The three engines, usable again afterwards."""
    yield fleet
    for engine in fleet:
        kit.revive(engine)


@pytest.mark.parametrize("row", ROWS, ids=named)
def test_whatever_fails_for_real_the_update_neither_hangs_nor_lies(
    row: Row, revived: list[ReferenceEngine], record_property: Any
) -> None:
    record_property("combinations tried on real processes, sockets and gloo", 1)
    Trial(row, revived).run()
