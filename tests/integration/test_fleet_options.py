"""Quorum, turns, engines that come and go, and SIGTERM, on real processes and sockets."""

from __future__ import annotations

import os
import signal
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from weight_update import ConfigurationError, EngineState, WeightUpdateError
from weight_update.reference_engine import Fault, ReferenceEngine
from weight_update.report import Progress

from . import kit, trainers
from .kit import BEGIN, CONTINUE, INIT, PAUSE, UPDATE
from .trainers import Trainers

NEW, UNREACHABLE = EngineState.NEW, EngineState.UNREACHABLE


def check_serving(engines: list[ReferenceEngine], seed: int, version: int) -> None:
    for engine in engines:
        assert not kit.is_paused(engine)
        assert kit.served(engine) == kit.tokens_of(seed)
        assert kit.label(engine) == str(version)


# -- quorum -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "fault",
    [
        Fault(PAUSE, "refuse", times=1),
        Fault(BEGIN, "close", times=1),
        Fault(UPDATE, "refuse", times=1),
        Fault(UPDATE, "refuse", "after_load", times=1, tensors=3),
    ],
    ids=lambda fault: f"{fault.path[1:]}-{fault.kind}-{fault.when}",
)
def test_the_survivors_of_a_quorum_serve_and_the_other_one_is_taken_back(
    fault: Fault, three: list[ReferenceEngine]
) -> None:
    """C22: a refusal of one engine costs the others nothing but a new group."""
    with kit.make_sender(three, quorum=2) as sender:
        sender.update_weights(kit.llama(0))
        three[1].inject(fault)

        report = sender.update_weights(kit.llama(1))
        check_serving([three[0], three[2]], 1, report.version)
        assert report.engines[three[1].url].state is not NEW
        assert any(three[1].url in warning for warning in report.warnings)

        healed = sender.update_weights(kit.llama(1))
        check_serving(three, 1, healed.version)


def test_an_engine_killed_at_a_bucket_is_left_out_and_recovered_after_its_restart(
    three: list[ReferenceEngine],
) -> None:
    """C22: `recover` waits for the engine that is starting meanwhile."""
    with kit.make_sender(three, quorum=2, bucket_bytes=20_000) as sender:
        sender.update_weights(kit.llama(0))

        def kill(now: Progress) -> None:
            if (now.phase, now.bucket) == ("transfer", 1):
                os.kill(three[2].pid, signal.SIGKILL)

        report = sender.update_weights(kit.llama(1), progress=kill)
        check_serving(three[:2], 1, report.version)
        assert report.engines[three[2].url].state is UNREACHABLE

        restarting = threading.Thread(target=three[2].restart)
        restarting.start()
        model = kit.llama(1)
        healed = sender.recover(model)
        restarting.join(60)
        check_serving(three, 1, healed.version)


def test_a_quorum_larger_than_the_fleet_is_refused_and_nothing_is_paused(
    engine: ReferenceEngine,
) -> None:
    log = kit.Log(engine)
    with kit.make_sender(engine, quorum=2) as sender, pytest.raises(ConfigurationError):
        sender.update_weights(kit.llama(1))
    assert log.count(engine, PAUSE) == 0


# -- versions and turns -------------------------------------------------------------------


def test_a_resumed_run_gives_its_number_and_the_labels_follow(engine: ReferenceEngine) -> None:
    kit.relabel(engine, "41")
    with kit.make_sender(engine, initial_version=7) as sender:
        assert sender.version == 7
        assert sender.update_weights(kit.llama(1)).version == 8
    check_serving([engine], 1, 8)


def test_two_senders_of_one_engine_take_turns(engine: ReferenceEngine) -> None:
    """Each update is whole: nobody begins while the other's is open."""
    kit.relabel(engine, "default")
    log = kit.Log(engine)
    with (
        kit.make_sender(engine) as one,
        kit.make_sender(engine) as other,
        ThreadPoolExecutor(2) as pool,
    ):

        def push_often(sender: Any) -> None:
            for _ in range(3):
                sender.update_weights(kit.llama(1))

        for future in [pool.submit(push_often, sender) for sender in (one, other)]:
            future.result(120)

    steps = [r["path"] for r in log.records(engine) if r["path"] in (PAUSE, CONTINUE)]
    assert steps == [PAUSE, CONTINUE] * 6
    check_serving([engine], 1, 6)


def test_a_sender_that_will_not_wait_is_refused_while_another_one_updates(
    engine: ReferenceEngine,
) -> None:
    caught: list[WeightUpdateError] = []
    with kit.make_sender(engine) as one, kit.make_sender(engine, when_busy="refuse") as other:

        def push_too(now: Progress) -> None:
            if now.phase == "begin":
                with pytest.raises(WeightUpdateError, match="busy") as failure:
                    other.update_weights(kit.llama(0))
                caught.append(failure.value)

        report = one.update_weights(kit.llama(1), progress=push_too)
        assert caught[0].engine == engine.url
        check_serving([engine], 1, report.version)


# -- engines that come and go -------------------------------------------------------------


def test_an_engine_is_added_and_another_removed_between_updates(
    three: list[ReferenceEngine],
) -> None:
    for engine in three:
        kit.relabel(engine, "default")
    with kit.make_sender(three[:2]) as sender:
        sender.update_weights(kit.llama(0))
        log = kit.Log(*three)
        sender.add_engine(three[2].url)
        check_serving(three, 1, sender.update_weights(kit.llama(1)).version)
        assert [log.count(engine, INIT) for engine in three] == [1, 1, 1]

        sender.remove_engine(three[0].url)
        report = sender.update_weights(kit.llama(0))
        assert list(report.engines) == [engine.url for engine in three[1:]]
        check_serving(three[1:], 0, report.version)
        check_serving(three[:1], 1, report.version - 1)


def test_an_engine_that_somebody_paused_is_left_so_by_a_failure_and_freed_by_a_push(
    engine: ReferenceEngine,
) -> None:
    kit.push(engine, kit.llama(0))
    engine.call("POST", PAUSE, {"mode": "retract"})
    engine.inject(Fault(BEGIN, "refuse", times=1))
    with kit.make_sender(engine) as sender:
        with pytest.raises(WeightUpdateError) as failure:
            sender.update_weights(kit.llama(1))
        assert kit.is_paused(engine)
        assert failure.value.report is not None
        assert failure.value.report.engines[engine.url].paused
        check_serving([engine], 1, sender.update_weights(kit.llama(1)).version)


# -- SIGTERM ------------------------------------------------------------------------------

TOLD_IN = [
    ("pause", 0, "old"),
    ("drain", 0, "old"),
    ("begin", 0, "old"),
    ("transfer", 1, "mixed"),
    ("end", -1, "new"),
    ("flush", -1, "new"),
    ("verify", -1, "new"),
    ("stamp", -1, "new"),
    ("continue", -1, "new"),
]


@pytest.mark.parametrize(("phase", "bucket", "state"), TOLD_IN, ids=[each[0] for each in TOLD_IN])
def test_a_trainer_that_is_told_to_end_settles_its_engine_in_every_phase(
    phase: str,
    bucket: int,
    state: str,
    engine: ReferenceEngine,
    workplace: Trainers,
    weights_b: str,
) -> None:
    """C47: exit 143, and the engine serves one model, unless its weights are mixed."""
    kit.push(engine, kit.llama(0))
    with kit.make_sender(engine, bucket_bytes=20_000) as sender:
        buckets = sender.update_weights(kit.llama(0)).buckets
    trainer = workplace.start(
        trainers.update_until_told_to_end,
        url=engine.url,
        weights=weights_b,
        phase=phase,
        bucket=buckets if bucket < 0 else bucket,
    )

    assert trainer.wait(60) == 128 + signal.SIGTERM, trainer.output()

    # The signal comes a moment after it was sent: by then more of the update may be done.
    if state == "mixed" and kit.is_paused(engine):
        return
    assert not kit.is_paused(engine)
    served = kit.served(engine)
    assert served in (kit.tokens_of(0), kit.tokens_of(1))
    if state == "new":
        assert served == kit.tokens_of(1)
