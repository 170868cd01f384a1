"""What vLLM servers hold, and whether they may generate, after each thing that can go wrong.

The servers are fakes with vLLM's traps, over real HTTP and gloo; what one holds is told by what it
generates. Whatever the table says of a state, four things hold in every row: a server that may
generate generates what its state says; none that is mixed is resumed; the next full push heals
all; and every update that succeeds has written its number.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.vllm_fake import FakeVLLM, checkpoint, signature
from weight_update import (
    ConfigurationError,
    EngineRejected,
    EngineState,
    UpdateReport,
    WeightUpdateError,
)
from weight_update.delivery.delivery import Delivery
from weight_update.delivery.vllm import VLLMDeployment
from weight_update.options import UpdateOptions

from .rows import (
    FINISH,
    FLUSH,
    GONE,
    INIT,
    MIXED,
    NEW,
    OLD,
    PAUSE,
    RESUME,
    SLACK,
    STAMP,
    START,
    UPDATE,
    Row,
)

TEXTS = {OLD: signature(checkpoint(0)), NEW: signature(checkpoint(1))}

BUCKET_BYTES = 2_000  # three buckets

TABLE = [
    # Before anything was applied, all go on as they were.
    Row(INIT, "refuse", "before", OLD, OLD),
    Row(INIT, "close", "before", OLD, OLD),
    Row(INIT, "hang", "before", OLD, OLD),
    Row(INIT, "die", "before", GONE, OLD),
    Row(PAUSE, "refuse", "before", OLD, OLD),
    Row(PAUSE, "close", "before", OLD, OLD),
    Row(PAUSE, "close", "after", OLD, OLD),
    Row(PAUSE, "hang", "before", OLD, OLD),
    Row(PAUSE, "stop", "before", GONE, OLD),
    # An update that was opened is undone: an empty one puts the old weights back.
    Row(START, "refuse", "before", OLD, OLD),
    Row(START, "refuse", "after", OLD, OLD),
    Row(START, "close", "before", OLD, OLD),
    Row(START, "close", "after", OLD, OLD),
    Row(START, "hang", "before", OLD, OLD),
    Row(START, "die", "after", GONE, OLD),
    # Once weights came, those that were loaded stay.
    Row(UPDATE, "slow", "before", NEW, NEW, after=1),
    Row(UPDATE, "refuse", "before", MIXED, MIXED),
    Row(UPDATE, "torn", "before", MIXED, MIXED),
    Row(UPDATE, "torn", "before", MIXED, MIXED, after=1),
    Row(UPDATE, "close", "before", MIXED, MIXED, after=1),
    Row(UPDATE, "close", "after", MIXED, MIXED, after=1),
    Row(UPDATE, "hang", "inside", MIXED, MIXED, after=1),
    Row(UPDATE, "die", "before", GONE, MIXED, after=1),
    Row(UPDATE, "stop", "before", GONE, MIXED, after=1),
    # All came, and only the end is missing.
    Row(FINISH, "refuse", "before", NEW, NEW),
    Row(FINISH, "refuse", "after", NEW, NEW),
    Row(FINISH, "close", "before", NEW, NEW),
    Row(FINISH, "close", "after", NEW, NEW),
    Row(FINISH, "hang", "before", NEW, NEW),
    Row(FINISH, "die", "before", GONE, NEW),
    Row(FLUSH, "refuse", "before", NEW, NEW),
    Row(FLUSH, "close", "before", NEW, NEW),
    Row(FLUSH, "die", "before", GONE, NEW),
    Row(STAMP, "refuse", "before", NEW, NEW),
    Row(STAMP, "close", "after", NEW, NEW),
    Row(STAMP, "hang", "before", NEW, NEW),
    Row(RESUME, "refuse", "before", NEW, NEW),
    Row(RESUME, "close", "after", NEW, NEW),
    Row(RESUME, "stop", "before", GONE, NEW),
]


@pytest.fixture(scope="module")
def servers() -> Iterator[list[FakeVLLM]]:
    started = [FakeVLLM(), FakeVLLM()]
    yield started
    for server in started:
        server.stop()


@pytest.fixture
def fleet(servers: list[FakeVLLM]) -> Iterator[list[FakeVLLM]]:
    """Two servers, whole and on the old weights; the second is the one that is struck."""
    for server in servers:
        if not server.alive:
            server.restart()
    yield servers
    for server in servers:
        with suppress(ProcessLookupError):
            server.thaw()
        if server.alive:
            server.clear()


@pytest.fixture
def delivery(fleet: list[FakeVLLM]) -> Iterator[Delivery]:
    """Brought the old weights to both already, and numbers from there."""
    urls = [server.url for server in fleet]
    options = UpdateOptions(pause_mode="retract", timeout=60.0, bucket_bytes=BUCKET_BYTES)
    made = Delivery(urls, options, VLLMDeployment)
    made.update(lambda: checkpoint(0), whole=True)
    yield made
    made.shutdown()


class Trial:
    """An update from the old weights to the new ones, with a fault in its way."""

    def __init__(self, delivery: Delivery, fleet: list[FakeVLLM]) -> None:
        self.delivery, self.fleet, self.struck = delivery, fleet, fleet[-1]
        self.version = delivery.version
        self.error: WeightUpdateError | None = None

    def run(self, row: Row) -> UpdateReport:
        """Pushes the new weights, and returns what the report says."""
        if row.path == INIT:
            self._drop_group()
        self.struck.inject(row.path, row.kind, when=row.when, after=row.after)
        start = time.monotonic()
        try:
            with options_of(self.delivery, timeout=row.limit):
                report = self.delivery.update(lambda: checkpoint(1), whole=True)
        except WeightUpdateError as error:
            self.error, report = error, error.report
        assert time.monotonic() - start < row.limit + SLACK
        assert report is not None
        return report

    def _drop_group(self) -> None:
        group = self.delivery._updater.group
        assert group is not None
        group.give_up()

    def check(self, report: UpdateReport, server: FakeVLLM, expected: EngineState) -> None:
        """A server is in the state that it should be in, and behaves as the report says."""
        outcome = report.engines[server.url]
        words = f"{outcome}; {self.error}"
        assert outcome.state is expected, words
        if expected is GONE:
            return
        assert server.paused == (expected is MIXED), words
        assert outcome.paused == server.paused or "may still take effect" in outcome.detail, words
        assert outcome.version in (None, server.label), words
        if expected is not MIXED:
            assert server.served() == TEXTS[expected], words
        else:
            assert after_last(server, UPDATE).count(RESUME) == 0, words

    def heal(self) -> None:
        """The next full push makes all whole."""
        if not self.struck.alive:
            self.struck.restart()
        self.struck.thaw()
        self.struck.clear()
        report = self.delivery.update(lambda: checkpoint(1), whole=True)
        assert report.version == self.delivery.version > self.version
        for server in self.fleet:
            assert report.engines[server.url].state is NEW
            assert not server.paused
            assert server.served() == TEXTS[NEW]
            assert server.label == str(report.version)


def after_last(server: FakeVLLM, path: str) -> list[str]:
    """The routes that were called since a route was called last."""
    paths = server.paths()
    return paths[len(paths) - paths[::-1].index(path) :]


def wait_for(condition: Callable[[], object], seconds: float = 30.0) -> None:
    """Polls until a condition is true."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it never came true"
        time.sleep(0.01)


@contextmanager
def options_of(delivery: Delivery, **changed: Any) -> Iterator[None]:
    """Gives a delivery other options for one update."""
    updater = delivery._updater
    options = updater.options
    updater.options = updater._attempts._options = replace(options, **changed)
    try:
        yield
    finally:
        updater.options = updater._attempts._options = options


@pytest.mark.parametrize("row", TABLE, ids=str)
def test_each_fault_leaves_the_state_that_is_told_and_the_next_push_heals(
    row: Row, delivery: Delivery, fleet: list[FakeVLLM], record_property: Any
) -> None:
    record_property("combinations tried on a vLLM of our own making", 1)
    trial = Trial(delivery, fleet)

    report = trial.run(row)

    assert (trial.error is None) == (row.kind == "slow")
    if row.when == "inside":
        trial.struck.clear()  # until then it answers nothing of its core
    trial.check(report, fleet[0], row.other)
    trial.check(report, trial.struck, row.state)
    trial.heal()


def test_a_name_that_no_server_has_holds_them_until_the_next_push(
    delivery: Delivery, fleet: list[FakeVLLM]
) -> None:
    trial = Trial(delivery, fleet)
    bad = {**checkpoint(1), "model.layers.9.norm.weight": torch.ones(8)}

    with pytest.raises(EngineRejected, match="There is no module or parameter named") as caught:
        delivery.update(lambda: bad, whole=True)

    assert caught.value.report is not None
    for server in fleet:
        trial.check(caught.value.report, server, MIXED)
    trial.heal()


def test_a_server_whose_update_cannot_be_undone_is_not_resumed_even_when_asked_to(
    delivery: Delivery, fleet: list[FakeVLLM]
) -> None:
    trial = Trial(delivery, fleet)
    trial.struck.inject(UPDATE, "torn")
    trial.struck.inject(FINISH, "refuse", times=10)
    with options_of(delivery, on_failure="resume"), pytest.raises(EngineRejected):
        delivery.update(lambda: checkpoint(1), whole=True)

    assert trial.struck.paused
    assert not trial.struck.dead
    assert not fleet[0].paused
    trial.heal()


def test_an_update_that_another_trainer_left_open_is_closed(
    delivery: Delivery, fleet: list[FakeVLLM]
) -> None:
    fleet[1].call("POST", PAUSE)
    fleet[1].call("POST", START)

    report = delivery.update(lambda: checkpoint(1), whole=True)

    assert report.engines[fleet[1].url].state is NEW
    assert [server.served() for server in fleet] == [TEXTS[NEW]] * 2


def test_some_weights_do_not_close_what_another_trainer_left_open(
    delivery: Delivery, fleet: list[FakeVLLM]
) -> None:
    some = {"lm_head.weight": checkpoint(1)["lm_head.weight"]}
    fleet[1].call("POST", PAUSE)
    fleet[1].call("POST", START)

    with pytest.raises(WeightUpdateError):
        delivery.update(lambda: some, whole=False)

    assert fleet[1].paused
    delivery.update(lambda: checkpoint(1), whole=True)
    assert [server.served() for server in fleet] == [TEXTS[NEW]] * 2


def test_part_of_a_fused_module_is_refused_before_anything_is_paused(
    delivery: Delivery, fleet: list[FakeVLLM]
) -> None:
    name = "model.layers.0.self_attn.q_proj.weight"
    before = [server.paths().count(PAUSE) for server in fleet]

    with pytest.raises(ConfigurationError, match="q_proj"):
        delivery.update(lambda: {name: checkpoint(1)[name]}, whole=False)

    assert [server.paths().count(PAUSE) for server in fleet] == before


@pytest.mark.parametrize("release", ["0.27.1", "0.32.0"])
def test_a_server_that_comes_back_as_another_release_is_met_anew(
    release: str, delivery: Delivery, fleet: list[FakeVLLM]
) -> None:
    fleet[1].restart(release)

    report = delivery.update(lambda: checkpoint(1), whole=True)

    assert report.engines[fleet[1].url].state is NEW
    assert [server.served() for server in fleet] == [TEXTS[NEW]] * 2
    assert [server.label for server in fleet] == [str(report.version)] * 2


def test_a_request_that_is_frozen_goes_on_without_a_prefix_of_older_weights(
    delivery: Delivery, fleet: list[FakeVLLM]
) -> None:
    with ThreadPoolExecutor() as pool:
        running = pool.submit(fleet[0].served, until_frozen=True)
        wait_for(lambda: fleet[0].running)
        delivery.update(lambda: checkpoint(1), whole=True)
        assert running.result(60) == TEXTS[NEW]
