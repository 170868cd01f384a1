"""Section C of the case list: versions, and several servers."""

from __future__ import annotations

import http.client
import json
import os
import random
import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import torch

from tests.integration import kit
from tests.integration.kit import BEGIN, CONTINUE, END, FLUSH, INIT, PAUSE, STAMP, UPDATE
from weight_update import ConfigurationError, SGLangWeightSyncScheme, WeightUpdateError
from weight_update.reference_engine import Fault, ReferenceEngine

from .fake_http import Answer, Asked, FakeServer
from .trial import MIXED, NEW, OLD, UNREACHABLE, Trial, once

# ---- C07


@pytest.mark.parametrize("path", [PAUSE, BEGIN, UPDATE, END, FLUSH, STAMP])
def test_c07_a_failed_update_counts_nowhere_whatever_step_it_failed_in(
    path: str, engine: ReferenceEngine
) -> None:
    trial = Trial([engine])
    collectors = [kit.Collector(), kit.Collector(40)]
    for collector in collectors:
        trial.sender.register_collector(collector)
    start = trial.version
    seen = []
    for failing in (False, True, False):
        if failing:
            engine.inject(Fault(path, "refuse", times=None if path == FLUSH else 1))
            if path == FLUSH:
                kit.make_flush_owed(engine)
            trial.fail(2.0 if path == FLUSH else 60.0)
            engine.clear_faults()
        else:
            trial.sender.update_weights(kit.llama(1))
            trial.check_new()
        seen.append((trial.sender.version - start, *(c.version for c in collectors)))
        if not failing:
            assert kit.label(engine) == str(trial.sender.version)
    assert seen == [(1, 1, 41), (1, 1, 41), (2, 2, 42)]


def test_c07_a_collector_that_raises_is_reported_and_stops_no_other(
    engine: ReferenceEngine,
) -> None:
    class Broken:
        def increment_version(self) -> None:
            raise KeyError("version")

    first, last = kit.Collector(), kit.Collector()
    with kit.make_sender(engine) as sender:
        for collector in (first, Broken(), last):
            sender.register_collector(collector)
        reports = [sender.update_weights(kit.llama(1)) for _ in range(2)]
    assert (first.version, last.version) == (2, 2)
    for report in reports:
        assert any("Broken" in w and "KeyError" in w for w in report.warnings)
    assert kit.label(engine) == str(reports[-1].version)


# ---- C08


def test_c08_an_engine_that_restarted_is_noticed_although_its_label_is_the_same(
    engine: ReferenceEngine,
) -> None:
    """Somebody wrote the label anew: only the start itself tells."""
    trial = Trial([engine])
    shown = kit.label(engine)
    engine.restart()
    kit.relabel(engine, shown)
    log = kit.Log(engine)
    trial.sender.update_weights(kit.llama(1))
    trial.check_new()
    assert log.count(engine, INIT) == 1


def test_c08_an_engine_that_restarted_before_its_first_label_is_noticed(
    engine: ReferenceEngine,
) -> None:
    """Its label was `default` before and is so after."""
    kit.relabel(engine, "default")
    with kit.make_sender(engine) as sender:
        sender.init_all_workers_group()
        engine.restart()
        report = sender.update_weights(kit.llama(1))
        assert report.version == 1
    assert kit.served(engine) == kit.tokens_of(1)


def test_c08_a_partial_push_does_not_make_a_restarted_engine_new(
    engine: ReferenceEngine,
) -> None:
    """C79 too: it lacks everything that earlier pushes brought."""
    trial = Trial([engine])
    trial.sender.update_weights(kit.llama(1))
    engine.restart()
    head = {"lm_head.weight": kit.llama(1).lm_head.weight.detach()}
    with pytest.raises(WeightUpdateError) as caught:
        trial.sender.update_weights(head)
    assert caught.value.report.engines[engine.url].state is not NEW
    trial.heal()


def test_c08_every_engine_of_a_fleet_may_restart_at_once(three: list[ReferenceEngine]) -> None:
    trial = Trial(three)
    for engine in three:
        engine.restart()
    report = trial.sender.update_weights(kit.llama(1))
    assert report.version > trial.version
    trial.check_new()


@pytest.mark.parametrize("path", [BEGIN, END, STAMP])
def test_c08_a_connection_that_breaks_in_mid_update_is_clear_and_a_reconnect_works(
    path: str, engine: ReferenceEngine
) -> None:
    trial = Trial([engine])
    engine.inject(once(path, "die"))
    error = trial.fail()
    assert isinstance(error, ConnectionError)
    assert trial.states(error) == [UNREACHABLE]
    engine.restart()
    trial.heal()


def test_c08_an_engine_added_later_gets_all_tensors_before_it_counts(
    three: list[ReferenceEngine],
) -> None:
    trial = Trial(three[:2])
    kit.push(three[2], kit.llama(0))
    trial.sender.add_engine(three[2].url)
    report = trial.sender.update_weights(kit.llama(1))
    assert set(report.engines) == {engine.url for engine in three}
    trial.engines = three
    trial.check_new()


def test_c08_an_engine_taken_out_is_left_alone(three: list[ReferenceEngine]) -> None:
    trial = Trial(three)
    trial.sender.remove_engine(three[1].url)
    log = kit.Log(*three)
    report = trial.sender.update_weights(kit.llama(1))
    assert set(report.engines) == {three[0].url, three[2].url}
    assert log.count(three[1], PAUSE) == log.count(three[1], UPDATE) == 0
    assert kit.served(three[1]) == kit.tokens_of(0)


# ---- C22


@pytest.mark.parametrize("path", [PAUSE, UPDATE, CONTINUE])
@pytest.mark.parametrize("struck", [0, 1])
def test_c22_when_one_of_three_refuses_the_error_tells_all_three_apart(
    path: str, struck: int, three: list[ReferenceEngine]
) -> None:
    trial = Trial(three)
    three[struck].inject(once(path, "refuse", message="not this one"))
    error = trial.fail()
    lines = str(error).splitlines()
    assert "not this one" in lines[0]
    for engine in three:
        assert sum(line.strip().startswith(engine.url) for line in lines[1:]) == 1
    assert not any(kit.is_paused(engine) for engine in three)
    labels = {kit.label(engine) for engine in three}
    counted = trial.version + (path == CONTINUE)  # there every engine had confirmed everything
    assert trial.sender.version == counted
    assert labels == {str(counted)}
    trial.heal()


@pytest.mark.parametrize("struck", [0, 1])
def test_c22_one_that_dies_in_mid_broadcast_leaves_the_others_known_and_healable(
    struck: int, three: list[ReferenceEngine]
) -> None:
    trial = Trial(three, load_format="tensors")
    three[struck].inject(once(UPDATE, "die", when="after_receive", tensors=4))
    error = trial.fail()
    states = trial.states(error)
    assert states[struck] is UNREACHABLE
    assert trial.sender.version == trial.version
    held = [error.report.engines[e.url].paused for e in three]
    assert [h for i, h in enumerate(held) if i != struck] == [
        s is MIXED for i, s in enumerate(states) if i != struck
    ]
    three[struck].restart()
    trial.heal()


FAILING = [
    once(PAUSE, "refuse"),
    once(BEGIN, "close"),
    once(UPDATE, "refuse"),
    once(UPDATE, "refuse", when="after_load", tensors=3),
    once(END, "success_false"),
    once(STAMP, "refuse", status=500),
]


@pytest.mark.parametrize("fault", FAILING, ids=lambda f: f"{f.path[1:]}-{f.kind}-{f.when}")
def test_c22_with_a_quorum_the_others_are_updated_and_the_failed_one_rejoins(
    fault: Fault, three: list[ReferenceEngine]
) -> None:
    trial = Trial(three, quorum=2)
    three[1].inject(fault)
    report = trial.sender.update_weights(kit.llama(1))
    assert report.version == trial.sender.version > trial.version
    for engine in (three[0], three[2]):
        assert report.engines[engine.url].state is NEW
        assert kit.served(engine) == kit.tokens_of(1)
        assert kit.label(engine) == str(report.version)
    failed = report.engines[three[1].url]
    assert failed.detail
    assert any(three[1].url in warning for warning in report.warnings)
    assert failed.paused == kit.is_paused(three[1])
    if not failed.paused:
        assert failed.state in (OLD, NEW)
        assert kit.served(three[1]) == kit.tokens_of(1 if failed.state is NEW else 0)
    trial.heal()


def test_c22_a_quorum_that_is_missed_is_a_failure(three: list[ReferenceEngine]) -> None:
    trial = Trial(three, quorum=2)
    for engine in three[:2]:
        engine.inject(once(BEGIN, "refuse"))
    error = trial.fail()
    assert trial.sender.version == trial.version
    assert NEW not in trial.states(error)
    trial.heal()


def test_c22_a_quorum_goes_on_without_an_engine_that_died_and_takes_it_back(
    three: list[ReferenceEngine],
) -> None:
    trial = Trial(three, quorum=2)
    os.kill(three[2].pid, signal.SIGKILL)
    three[2].process.wait()
    report = trial.sender.update_weights(kit.llama(1))
    assert report.engines[three[2].url].state is UNREACHABLE
    assert [kit.served(engine) for engine in three[:2]] == [kit.tokens_of(1)] * 2
    three[2].restart()
    trial.heal()


# ---- C23


@contextmanager
def router(workers: Sequence[ReferenceEngine], listed: Any) -> Iterator[FakeServer]:
    """Lists workers, and passes every other call on to one of them by lot."""

    def forward(asked: Asked) -> Answer:
        if asked.path == "/workers":
            return Answer(200, listed) if listed is not None else Answer(404, {})
        place = urlsplit(random.choice(workers).url)
        connection = http.client.HTTPConnection(place.hostname or "", place.port, timeout=60)
        body = None if asked.body is None else json.dumps(asked.body)
        connection.request(asked.method, asked.path, body, {"Content-Type": "application/json"})
        answer = connection.getresponse()
        return Answer(answer.status, answer.read())

    with FakeServer(reply=forward) as server:
        yield server


def rows(workers: Sequence[ReferenceEngine], **more: Any) -> dict[str, Any]:
    return {"workers": [{"url": w.url, "is_healthy": True, **more} for w in workers]}


def test_c23_both_workers_of_a_router_are_updated_with_ranks_of_their_own(
    two: list[ReferenceEngine],
) -> None:
    kit.push(two, kit.llama(0))
    log = kit.Log(*two)
    with router(two, rows(two)) as front:
        scheme = SGLangWeightSyncScheme(front.url, timeout=60.0)
        with scheme.create_sender() as sender:
            sender.update_weights(kit.llama(1))
        body = {"input_ids": kit.PROMPT, "sampling_params": {"max_new_tokens": kit.TOKENS}}
        body["sampling_params"]["temperature"] = 0.0  # type: ignore[index]
        place = urlsplit(front.url)
        connection = http.client.HTTPConnection(place.hostname or "", place.port, timeout=60)
        connection.request("POST", "/generate", json.dumps(body))
        assert json.load(connection.getresponse())["output_ids"] == kit.tokens_of(1)
    for path in (PAUSE, UPDATE, CONTINUE):
        assert [log.count(engine, path) for engine in two] == [1, 1]
    offsets = [log.bodies(engine, INIT)[0]["rank_offset"] for engine in two]
    assert sorted(offsets) == [1, 2]
    assert [kit.served(engine) for engine in two] == [kit.tokens_of(1)] * 2


UNUSABLE_LISTS = {
    "empty": {"workers": []},
    "no urls": {"workers": [{"id": 1}]},
    "not a list": {"workers": {"a": 1}},
    "grpc": {"workers": [{"url": "grpc://10.0.0.1:1"}]},
}


@pytest.mark.parametrize("listed", UNUSABLE_LISTS.values(), ids=UNUSABLE_LISTS.keys())
def test_c23_a_router_whose_workers_cannot_be_read_is_refused_before_any_pause(
    listed: dict[str, Any], two: list[ReferenceEngine]
) -> None:
    log = kit.Log(*two)
    with router(two, listed) as front:
        scheme = SGLangWeightSyncScheme(front.url, timeout=30.0)
        with (
            scheme.create_sender() as sender,
            pytest.raises(ConfigurationError, match="router") as caught,
        ):
            sender.update_weights(kit.llama(1))
        assert caught.value.engine == front.url
        assert front.posted() == []
    assert [log.count(engine, PAUSE) for engine in two] == [0, 0]


def test_c23_a_worker_that_its_router_calls_unhealthy_is_not_missed(
    two: list[ReferenceEngine],
) -> None:
    listed = rows(two)
    listed["workers"][1]["is_healthy"] = False
    with router(two, listed) as front:
        scheme = SGLangWeightSyncScheme(front.url, timeout=30.0)
        with scheme.create_sender() as sender:
            sender.update_weights(kit.llama(1))
    assert [kit.served(engine) for engine in two] == [kit.tokens_of(1)] * 2


# ---- C24


@pytest.mark.parametrize("stale", ["default", "7", "9000"])
def test_c24_a_resumed_run_goes_on_from_its_own_number_whatever_the_engine_shows(
    stale: str, engine: ReferenceEngine, tmp_path: Path
) -> None:
    """The checkpoint is pushed before anything is generated."""
    torch.save(dict(kit.llama(1).state_dict()), tmp_path / "step-40.pt")
    kit.push(engine, kit.llama(0))
    kit.relabel(engine, stale)
    log = kit.Log(engine)
    with kit.make_sender(engine, initial_version=40) as sender:
        assert sender.version == 40
        report = sender.update_weights(torch.load(tmp_path / "step-40.pt"))
        assert report.version == sender.version == 41
        assert log.count(engine, "/generate") == 0
        assert kit.served(engine) == kit.tokens_of(1)
        assert kit.label(engine) == "41"
        assert sender.update_weights(kit.llama(1)).version == 42


def test_c24_a_number_of_the_past_may_be_given_again(engine: ReferenceEngine) -> None:
    """A run that went back to an older checkpoint."""
    kit.relabel(engine, "55")
    with kit.make_sender(engine, initial_version=0) as sender:
        assert sender.update_weights(kit.llama(1)).version == 1
    assert kit.label(engine) == "1"


def test_c24_without_a_number_the_version_never_goes_below_a_label(
    engine: ReferenceEngine,
) -> None:
    with kit.make_sender(engine) as sender:
        sender.update_weights(kit.llama(0))
        kit.relabel(engine, "120")
        assert sender.update_weights(kit.llama(1)).version >= 121
        assert kit.label(engine) == str(sender.version)


# ---- C31


@pytest.mark.parametrize("mode", ["retract", "in_place", "abort"])
def test_c31_no_call_of_any_mode_asks_to_abort_and_the_label_comes_last(
    mode: str, engine: ReferenceEngine
) -> None:
    log = kit.Log(engine)
    with kit.make_sender(engine, pause_mode=mode, bucket_bytes=30_000) as sender:
        report = sender.update_weights(kit.llama(1))
    told = [
        (record["path"], record["json"]["abort_all_requests"])
        for record in log.records(engine)
        if record["path"] in (UPDATE, STAMP)
    ]
    assert told == [(UPDATE, False)] * report.buckets + [(STAMP, False)]
    (stamped,) = log.records(engine, STAMP)
    assert log.records(engine, END)[0]["t1"] <= stamped["t0"]
    assert stamped["t1"] <= log.records(engine, CONTINUE)[0]["t0"]


@pytest.mark.parametrize("path", [UPDATE, END, FLUSH])
def test_c31_a_failed_update_writes_no_label(path: str, two: list[ReferenceEngine]) -> None:
    trial = Trial(two)
    two[0].inject(Fault(path, "refuse"))
    if path == FLUSH:
        kit.make_flush_owed(two[0])
    trial.fail(3.0)
    assert [trial.log.count(engine, STAMP) for engine in two] == [0, 0]
    two[0].clear_faults()
    trial.heal()
