"""The real server killed, stopped and left alone by its trainer: nothing hangs, all heals."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import requests
import torch

from tests.integration.trainers import Trainers
from weight_update import (
    ConfigurationError,
    EngineState,
    EngineUnreachable,
    SGLangWeightSender,
    SGLangWeightSyncScheme,
    UpdateTimeout,
    WeightUpdateError,
)
from weight_update.report import Progress
from weight_update.waiting import spawn

from . import dead_trainer
from .long_request import SECONDS, LongRequest, wait_until
from .models import SEED_A, SEED_B, greedy
from .served import Served, sender_of
from .sglang_server import SGLangServer

pytestmark = pytest.mark.parametrize("served", [("llama", "float32")], indirect=True, ids="-".join)

NORM = "model.norm.weight"
BUCKET_BYTES = 20_000  # a dozen buckets
# A failed update may overrun its deadline by 2 s; the rest is for busy cores.
OVERRUN = 2.0 + 8.0
STOPPED_TIMEOUT = 10.0


@pytest.fixture
def victim(served: Served, spare: SGLangServer) -> Served:
    """The second server, which tests may kill."""
    return replace(served, server=spare)


@pytest.fixture
def put_right(at_a: Served) -> Iterator[None]:
    """Afterwards the shared server runs and has no session open, whatever a test saw."""
    yield
    for route in ("end_weight_update", "continue_generation"):
        post(at_a, route)


def post(served: Served, route: str, seconds: float = 60.0) -> requests.Response:
    return requests.post(f"{served.server.url}/{route}", json={}, timeout=seconds)


@dataclass
class Strike:
    """A progress hook that strikes once, at a moment of an update."""

    moment: Callable[[Progress], bool]
    blow: Callable[[], None]
    struck: list[Progress] = field(default_factory=list)

    def __call__(self, now: Progress) -> None:
        if not self.struck and self.moment(now):
            self.struck.append(now)
            self.blow()


@dataclass(frozen=True)
class Moment:
    """When a server is struck, and the phase in which that is noticed."""

    name: str
    strikes: Callable[[Progress], bool]
    phase: str


MOMENTS = [
    Moment("before the transfer", lambda now: now.phase == "begin", "begin"),
    Moment("during the transfer", lambda now: now.bucket == 2, "transfer"),
    Moment("after the transfer", lambda now: now.phase == "stamp", "stamp"),
]
at_each_moment = pytest.mark.parametrize("moment", MOMENTS, ids=lambda moment: moment.name)


def failed_push(
    sender: SGLangWeightSender, model: Any, strike: Strike, timeout: float
) -> WeightUpdateError:
    """An update that a strike makes fail, in time, and that moves no version."""
    version, start = sender.version, time.monotonic()
    with pytest.raises(WeightUpdateError) as caught:
        sender.update_weights(model, progress=strike)
    assert strike.struck
    assert time.monotonic() - start < timeout + OVERRUN
    assert caught.value.report is not None
    assert sender.version == caught.value.report.version == version
    return caught.value


def heals(sender: SGLangWeightSender, *struck: Served) -> None:
    """The next update reaches every server, and each then serves model B."""
    version = sender.version
    report = sender.update_weights(struck[0].model(SEED_B))
    assert [report.engines[s.server.url].state for s in struck] == [EngineState.NEW] * len(struck)
    assert not any(outcome.paused for outcome in report.engines.values())
    assert report.version > version  # by more than 1 where the label of the failed one landed
    for served in struck:
        assert served.server.label() == str(report.version)
        assert served.serves(SEED_B)


# ---- killed and stopped


@at_each_moment
def test_a_server_that_is_killed_is_told_at_once_and_healed_after_its_restart(
    victim: Served, moment: Moment
) -> None:
    url = victim.server.url
    with sender_of(victim, bucket_bytes=BUCKET_BYTES) as sender:
        sender.update_weights(victim.model(SEED_A))
        strike = Strike(moment.strikes, victim.server.kill)
        error = failed_push(sender, victim.model(SEED_B), strike, timeout=0.0)
        told = error.report.engines[url].state if error.report else None
        known = sender.engines[url].state
        victim.server.restart()

        assert isinstance(error, EngineUnreachable)
        assert (error.phase, error.engine) == (moment.phase, url)
        assert told is known is EngineState.UNREACHABLE
        heals(sender, victim)


@at_each_moment
def test_a_server_that_is_stopped_costs_no_more_than_the_deadline_and_is_healed_when_it_goes_on(
    victim: Served, moment: Moment
) -> None:
    url = victim.server.url
    scheme = SGLangWeightSyncScheme(url, bucket_bytes=BUCKET_BYTES, timeout=STOPPED_TIMEOUT)
    with scheme.create_sender() as sender:
        sender.update_weights(victim.model(SEED_A))
        strike = Strike(moment.strikes, victim.server.freeze)
        try:
            error = failed_push(sender, victim.model(SEED_B), strike, STOPPED_TIMEOUT)
        finally:
            victim.server.thaw()

        assert isinstance(error, UpdateTimeout)
        assert (error.phase, error.engine) == (moment.phase, url)
        assert error.report is not None
        assert error.report.engines[url].state is EngineState.UNREACHABLE
        heals(sender, victim)


def test_a_server_whose_scheduler_alone_dies_in_the_transfer_is_not_taken_for_whole(
    victim: Served,
) -> None:
    """Its HTTP front goes on answering for a while."""
    with sender_of(victim, bucket_bytes=BUCKET_BYTES) as sender:
        sender.update_weights(victim.model(SEED_A))
        strike = Strike(lambda now: now.bucket == 2, victim.server.kill_scheduler)
        error = failed_push(sender, victim.model(SEED_B), strike, timeout=0.0)
        victim.server.restart()

        assert error.phase == "transfer"
        assert error.report is not None
        outcome = error.report.engines[victim.server.url]
        assert outcome.state in (EngineState.UNREACHABLE, EngineState.MIXED)
        heals(sender, victim)


def kill_late(server: SGLangServer) -> None:
    time.sleep(1.0)  # by now it was most likely sent a bucket, which it does not answer
    server.kill()


@pytest.mark.usefixtures("put_right")
def test_when_one_of_two_dies_in_the_transfer_the_other_is_held_and_both_are_healed(
    at_a: Served, victim: Served
) -> None:
    survivor, urls = at_a, [at_a.server.url, victim.server.url]
    deaths: list[Future[None]] = []

    def strike_down() -> None:
        victim.server.freeze()
        deaths.append(spawn(kill_late, victim.server))

    scheme = SGLangWeightSyncScheme(urls, bucket_bytes=BUCKET_BYTES, timeout=60)
    with scheme.create_sender() as sender:
        sender.update_weights(at_a.model(SEED_A))
        strike = Strike(lambda now: now.bucket == 2, strike_down)
        error = failed_push(sender, at_a.model(SEED_B), strike, timeout=0.0)
        generates = survivor.server.is_ready()
        deaths[0].result(SECONDS)
        victim.server.restart()

        assert error.report is not None
        held, dead = (error.report.engines[url] for url in urls)
        assert (error.phase, error.engine) == ("transfer", victim.server.url)
        assert (dead.state, held.state) == (EngineState.UNREACHABLE, EngineState.MIXED)
        assert (held.paused, held.version, generates) == (True, None, False)
        heals(sender, survivor, victim)
    assert survivor.server.is_ready()


# ---- what a dead trainer leaves behind


def is_stuck(served: Served) -> bool:
    """Whether the scheduler, which answers a flush, waits for something else."""
    try:
        post(served, "flush_cache", seconds=3.0)
    except requests.ReadTimeout:
        return True
    return False


def failures_to_receive(served: Served) -> int:
    log = served.server.log_path.read_text(errors="replace")
    return log.count("Failed to receive weights")


@pytest.mark.usefixtures("put_right")
def test_a_server_that_waits_for_a_dead_trainers_tensor_takes_the_next_update(
    at_a: Served, workplace: Trainers
) -> None:
    """Two tensors were declared and one was sent."""
    before, url = failures_to_receive(at_a), at_a.server.url
    with workplace.start(dead_trainer.short_of_a_tensor, url=url) as trainer:
        trainer.wait_for(dead_trainer.STANDS_STILL, SECONDS)
        wait_until(lambda: is_stuck(at_a))
    wait_until(lambda: failures_to_receive(at_a) > before)

    with sender_of(at_a) as sender:
        heals(sender, at_a)


@pytest.mark.usefixtures("put_right")
def test_a_server_that_a_dead_trainer_left_paused_is_resumed_by_the_next_update(
    at_a: Served, workplace: Trainers
) -> None:
    trainer = workplace.start(dead_trainer.after_pause, url=at_a.server.url)
    assert trainer.wait(SECONDS) == -9
    wait_until(lambda: not at_a.server.is_ready())

    with sender_of(at_a) as sender:
        heals(sender, at_a)
    assert at_a.server.is_ready()


@pytest.fixture
def half_updated(at_a: Served, put_right: None, workplace: Trainers) -> Served:
    """The trainer died in mid transfer: two buckets are loaded and its session is open."""
    trainer = workplace.start(dead_trainer.in_transfer, url=at_a.server.url)
    assert trainer.wait(SECONDS) == -9
    wait_until(lambda: not at_a.server.is_ready())
    assert "already open" in post(at_a, "begin_weight_update").text
    return at_a


def test_a_half_updated_server_refuses_a_mapping_and_is_healed_by_another_senders_whole_push(
    half_updated: Served,
) -> None:
    server = half_updated.server
    with sender_of(half_updated) as sender:
        with pytest.raises(ConfigurationError) as caught:
            sender.update_weights({NORM: torch.ones(64)})
        assert caught.value.report is not None
        outcome = caught.value.report.engines[server.url]
    assert outcome.paused
    assert "was found paused" in outcome.detail
    assert not server.is_ready()
    with sender_of(half_updated) as another:
        heals(another, half_updated)
    assert post(half_updated, "end_weight_update").status_code == 400  # no session is open


def test_a_half_updated_server_is_not_resumed_by_a_second_senders_mapping_either(
    half_updated: Served,
) -> None:
    """The first one's refusal closed the session, which told of the dead trainer."""
    for _ in range(2):
        with sender_of(half_updated) as sender, suppress(WeightUpdateError):
            sender.update_weights({NORM: torch.ones(64)})
    assert not half_updated.server.is_ready()


# ---- a prefix that requests share

SHARED = [11, 23, 5, 42, 77, 130, 9, 201, 64, 3, 18, 240, 99, 7, 55, 81]


@pytest.mark.parametrize("later", ["retract", "abort"])
def test_a_prefix_that_in_place_left_stale_is_flushed_by_a_push_under_another_mode(
    at_a: Served, later: Any
) -> None:
    url, fresh = at_a.server.url, [*SHARED, 31]
    expected = greedy(at_a.model(SEED_B), fresh, 24)
    at_a.server.generate([*SHARED, 30], 4)  # leaves the prefix in the cache
    request = LongRequest(url, [*SHARED, 32])
    request.wait_for(8)

    with sender_of(at_a, pause_mode="in_place") as sender:
        report = sender.update_weights(at_a.model(SEED_B))
    stale = at_a.server.generate(fresh, 24)
    with sender_of(at_a, pause_mode=later) as sender:
        flushed = sender.update_weights(at_a.model(SEED_B))
    clean = at_a.server.generate(fresh, 24)
    request.cut()

    (warning,) = report.warnings
    assert "prefixes cached under the old weights may still be served" in warning
    assert url in warning
    assert stale != expected  # what the warning is about
    assert (flushed.warnings, clean) == ((), expected)
