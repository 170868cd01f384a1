"""What both servers of a mixed fleet hold, and whether they generate, when one of them fails.

A reference engine and a fake vLLM, over real HTTP and gloo. In every row: who may generate does so
as its state says; nothing mixed is resumed; and the next full push heals both.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import suppress

import pytest

from tests.integration import kit
from tests.integration.mixed import Server, fleet_of, is_paused, label, llama, serves
from tests.vllm_fake import FakeVLLM
from weight_update import EngineState, SGLangWeightSender, UpdateReport, WeightUpdateError
from weight_update.reference_engine import Fault, ReferenceEngine

from . import rows as routes
from .rows import GONE, MIXED, NEW, OLD, SHORT, SLACK, Row

TABLE = [
    # Before anything was applied, both go on as they were.
    Row(routes.INIT, "refuse", "before", OLD, OLD),
    Row(routes.INIT, "hang", "before", OLD, OLD),
    Row(kit.INIT, "refuse", "before_join", OLD, OLD, struck="sglang"),
    Row(kit.INIT, "hang", "before_join", OLD, OLD, struck="sglang"),
    Row(routes.PAUSE, "refuse", "before", OLD, OLD),
    Row(kit.PAUSE, "refuse", "before_join", OLD, OLD, struck="sglang"),
    Row(kit.PAUSE, "stop", "before_join", GONE, OLD, struck="sglang"),
    Row(routes.START, "close", "after", OLD, OLD),
    Row(kit.BEGIN, "close", "before_answer", OLD, OLD, struck="sglang"),
    # Once weights came, nobody generates with half of them.
    Row(routes.UPDATE, "slow", "before", NEW, NEW, after=1),
    Row(kit.UPDATE, "slow", "before_join", NEW, NEW, after=1, struck="sglang"),
    Row(routes.UPDATE, "torn", "before", MIXED, MIXED, after=1),
    Row(routes.UPDATE, "hang", "inside", MIXED, MIXED, after=1),
    Row(routes.UPDATE, "die", "before", GONE, MIXED, after=1),
    Row(routes.UPDATE, "stop", "before", GONE, MIXED, after=1),
    Row(kit.UPDATE, "refuse", "before_join", MIXED, MIXED, after=1, struck="sglang"),
    Row(kit.UPDATE, "close", "before_join", MIXED, MIXED, after=1, struck="sglang"),
    Row(kit.UPDATE, "hang", "before_join", MIXED, MIXED, after=1, struck="sglang"),
    Row(kit.UPDATE, "die", "after_receive", GONE, MIXED, after=1, struck="sglang"),
    Row(kit.UPDATE, "stop", "before_join", GONE, MIXED, after=1, struck="sglang"),
    # All came to both, and only the end is missing.
    Row(routes.FINISH, "refuse", "before", NEW, NEW),
    Row(kit.END, "refuse", "before_join", NEW, NEW, struck="sglang"),
    Row(routes.STAMP, "refuse", "before", NEW, NEW),
    Row(kit.STAMP, "refuse", "before_join", NEW, NEW, struck="sglang"),
    Row(routes.RESUME, "close", "after", NEW, NEW),
    Row(kit.CONTINUE, "stop", "before_join", GONE, NEW, struck="sglang"),
]


@pytest.fixture(scope="module")
def started() -> Iterator[list[Server]]:
    servers: list[Server] = [ReferenceEngine(llama(0), wait=False), FakeVLLM()]
    yield servers
    for server in servers:
        server.stop()


@pytest.fixture
def pair(started: list[Server]) -> Iterator[list[Server]]:
    """An SGLang and a vLLM, put right again afterwards."""
    sglang, vllm = started
    assert isinstance(sglang, ReferenceEngine)
    assert isinstance(vllm, FakeVLLM)
    sglang.wait_until_ready()
    if not vllm.alive:
        vllm.restart()
    yield started
    kit.revive(sglang)
    with suppress(ProcessLookupError):
        vllm.thaw()
    if vllm.alive:
        vllm.clear()


@pytest.fixture
def sender(pair: list[Server]) -> Iterator[SGLangWeightSender]:
    """Brought the old weights to both already."""
    with fleet_of(pair).create_sender() as made:
        made.update_weights(llama(0))
        yield made


def strike(pair: list[Server], row: Row) -> Server:
    """Has the struck server fail; returns it."""
    sglang, vllm = pair
    if row.struck == "vllm":
        vllm.inject(row.path, row.kind, when=row.when, after=row.after)  # type: ignore[call-arg,arg-type]
        return vllm
    sglang.inject(Fault(row.path, row.kind, when=row.when, after=row.after, times=1))  # type: ignore[arg-type,call-arg]
    return sglang


def push(sender: SGLangWeightSender, limit: float) -> UpdateReport:
    """Pushes the new weights within a limit, and returns what the report says."""
    start = time.monotonic()
    report: UpdateReport | None
    try:
        with kit.timeout_of(sender, limit):
            report = sender.update_weights(llama(1))
    except WeightUpdateError as error:
        report = error.report
    assert report is not None
    assert time.monotonic() - start < limit + SLACK
    return report


def check(report: UpdateReport, server: Server, expected: EngineState) -> None:
    """A server is in the state that it should be in, and behaves as the report says."""
    outcome = report.engines[server.url]
    assert outcome.state is expected, report
    if expected is GONE:
        return
    assert is_paused(server) == (expected is MIXED), report
    assert outcome.version in (None, label(server)), report
    if expected is not MIXED:
        assert serves(server, expected), report


def revive(server: Server) -> None:
    """A server that is dead or frozen is there again; nothing else is done to it."""
    if isinstance(server, ReferenceEngine):
        if server.process.poll() is None:
            kit.wake(server)
            server.clear_faults()
        else:
            server.restart()
        return
    if not server.alive:
        server.restart()
    server.thaw()
    server.clear()


@pytest.mark.parametrize("row", TABLE, ids=str)
def test_each_server_is_known_and_the_next_push_heals(
    row: Row, sender: SGLangWeightSender, pair: list[Server]
) -> None:
    if row.path in (routes.INIT, kit.INIT):
        group = sender._transport._updater.group
        assert group is not None
        group.give_up()
    struck = strike(pair, row)
    (other,) = (server for server in pair if server is not struck)

    report = push(sender, row.limit)
    if row.when == "inside" and isinstance(struck, FakeVLLM):
        struck.clear()  # until then it answers nothing

    check(report, struck, row.state)
    check(report, other, row.other)

    revive(struck)
    healed = sender.update_weights(llama(1))
    for server in pair:
        assert healed.engines[server.url].state is NEW
        assert serves(server, NEW)
        assert label(server) == str(healed.version)


@pytest.mark.parametrize("struck", ["sglang", "vllm"])
def test_a_quorum_brings_the_other_kind_up_to_date_at_once(struck: str, pair: list[Server]) -> None:
    """Whoever dies in mid-bucket leaves the other mixed no longer than a new group takes."""
    with fleet_of(pair, quorum=1).create_sender() as sender:
        sender.update_weights(llama(0))
        dies = {
            "vllm": (routes.UPDATE, "die", "before"),
            "sglang": (kit.UPDATE, "die", "after_receive"),
        }
        dead = strike(pair, Row(*dies[struck], GONE, NEW, after=1, struck=struck))
        (other,) = (server for server in pair if server is not dead)

        report = sender.update_weights(llama(1))

        assert report.engines[dead.url].state is GONE
        check(report, other, NEW)
        assert label(other) == str(report.version)

        revive(dead)
        again = sender.update_weights(llama(1))
        assert again.engines[dead.url].state is NEW
        assert all(serves(server, NEW) for server in pair)


def test_the_server_that_hangs_is_named_and_not_the_one_that_waits_for_it(
    sender: SGLangWeightSender, pair: list[Server]
) -> None:
    pair[1].inject(routes.UPDATE, "hang", when="inside", after=1)  # type: ignore[call-arg]

    with kit.timeout_of(sender, SHORT), pytest.raises(WeightUpdateError) as caught:
        sender.update_weights(llama(1))

    assert caught.value.engine == pair[1].url
