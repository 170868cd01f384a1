"""Section A of the case list: failures, hangs, and engines that are left paused.

Each case names a class of faults by one example; these are neighbours of the examples that the
integration tests already show.
"""

from __future__ import annotations

import re
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.integration import kit, trainers
from tests.integration.kit import BEGIN, CONTINUE, END, FLUSH, INIT, PAUSE, STAMP, UPDATE
from tests.integration.trainers import Trainers
from weight_update import EngineRejected, EngineUnreachable, UpdateTimeout, WeightUpdateError
from weight_update.engines.sglang.engine import SGLangEngine
from weight_update.reference_engine import Fault, ReferenceEngine

from .trial import MIXED, NEW, OLD, SLACK, Trial, once

LOADS = "/v1/loads"

# ---- C01


REFUSED_BEFORE_JOINING = [
    once(UPDATE, "refuse", status=404, message="no such route here"),
    once(UPDATE, "refuse", status=409, message="the engine is asleep"),
    once(UPDATE, "refuse", status=422, message="dtypes: field required"),
    once(UPDATE, "refuse", status=401, message="who are you"),
    once(UPDATE, "success_false", message="The group is not known"),
]


@pytest.mark.parametrize("fault", REFUSED_BEFORE_JOINING, ids=lambda f: f"{f.kind}-{f.status}")
def test_c01_a_refusal_before_the_broadcast_ends_the_update_at_once(
    fault: Fault, two: list[ReferenceEngine]
) -> None:
    trial = Trial(two)
    two[0].inject(fault)
    started = time.monotonic()
    error = trial.fail()
    assert time.monotonic() - started < SLACK  # far below the deadline of 60 s
    assert isinstance(error, EngineRejected)
    assert (error.engine, error.phase) == (two[0].url, "transfer")
    assert fault.message in str(error)
    refused, other = trial.states(error)
    assert refused is OLD
    assert other in (OLD, NEW)  # it may have had all of it by then
    assert trial.resumes() == [1, 1]
    assert trial.sender.version == trial.version
    trial.heal()
    assert trial.log.count(two[0], INIT) == 1  # in a group that was made anew


@pytest.mark.parametrize("status", [502, 503, 504])
def test_c01_what_a_gateway_says_in_the_engines_place_does_not_prove_it_old(
    status: int, engine: ReferenceEngine
) -> None:
    trial = Trial([engine])
    engine.inject(once(UPDATE, "non_json", status=status, message="Bad Gateway"))
    error = trial.fail()
    assert trial.states(error) == [MIXED]
    assert trial.resumes() == [0]
    trial.heal()


@pytest.mark.parametrize("taken", [1, 5])
def test_c01_tensors_that_were_taken_but_not_loaded_leave_the_engine_old(
    taken: int, engine: ReferenceEngine
) -> None:
    trial = Trial([engine], load_format="tensors")
    engine.inject(once(UPDATE, "refuse", when="after_receive", tensors=taken, message="torn"))
    error = trial.fail()
    assert "Failed to receive weights" in str(error)
    assert trial.states(error) == [OLD]
    assert trial.resumes() == [1]
    trial.heal()


@pytest.mark.parametrize("loaded", [1, 20])
def test_c01_a_load_that_broke_off_leaves_the_engine_mixed_and_paused(
    loaded: int, engine: ReferenceEngine
) -> None:
    trial = Trial([engine])
    engine.inject(once(UPDATE, "refuse", when="after_load", tensors=loaded, message="torn"))
    error = trial.fail()
    assert "partially updated" in str(error)
    assert trial.states(error) == [MIXED]
    assert trial.resumes() == [0]
    trial.heal()


@pytest.mark.parametrize("after", [0, 2])
def test_c01_a_connection_reset_in_any_bucket_leaves_the_outcome_unknown(
    after: int, engine: ReferenceEngine
) -> None:
    trial = Trial([engine], bucket_bytes=20_000)
    engine.inject(once(UPDATE, "close", after=after))
    error = trial.fail()
    assert isinstance(error, EngineUnreachable)
    assert trial.states(error) == [MIXED]
    assert trial.resumes() == [0]
    trial.heal()


def test_c01_a_process_whose_update_failed_can_exit(
    engine: ReferenceEngine, workplace: Trainers, weights_b: str
) -> None:
    engine.inject(once(UPDATE, "refuse", message="not today"))
    trainer = workplace.start(trainers.update_once, url=engine.url, weights=weights_b)
    assert trainer.wait(40) == 1
    assert "not today" in trainer.output()
    assert not kit.is_paused(engine)


# ---- C02


def test_c02_a_pause_that_took_effect_after_the_client_gave_up_is_undone(
    two: list[ReferenceEngine],
) -> None:
    trial = Trial(two)
    two[1].inject(once(PAUSE, "hang", when="before_answer"))
    error = trial.fail(2.0)
    assert (error.engine, error.phase) == (two[1].url, "pause")
    assert trial.states(error) == [OLD, OLD]
    assert trial.resumes() == [1, 1]
    trial.heal()


@pytest.mark.parametrize("mode", ["abort", "retract"])
@pytest.mark.parametrize(
    "fault",
    [Fault(LOADS, "refuse", status=404), Fault(LOADS, "refuse", status=500)],
    ids=["404", "500"],
)
def test_c02_an_idle_poll_that_tells_nothing_leaves_nobody_paused(
    fault: Fault, mode: str, engine: ReferenceEngine
) -> None:
    trial = Trial([engine], pause_mode=mode)
    engine.inject(fault)
    trial.sender.update_weights(kit.llama(1))
    trial.check_new()
    assert trial.resumes() == [1]


def test_c02_an_engine_that_is_never_idle_is_resumed_once(
    two: list[ReferenceEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    trial = Trial(two, pause_mode="abort")
    with monkeypatch.context() as patched:
        patched.setattr("weight_update.engines.sglang.engine.running_requests", lambda _: 3)
        error = trial.fail(2.0)
    assert isinstance(error, UpdateTimeout)
    assert error.phase == "drain"
    assert trial.states(error) == [OLD, OLD]
    assert trial.resumes() == [1, 1]
    trial.heal()


@pytest.mark.parametrize("struck", [0, 1])
def test_c02_each_engine_that_may_be_paused_is_resumed_once_wherever_the_refusal_came(
    struck: int, three: list[ReferenceEngine]
) -> None:
    trial = Trial(three)
    three[struck].inject(once(PAUSE, "refuse", status=503, message="scheduler is busy"))
    error = trial.fail()
    assert error.engine == three[struck].url
    assert trial.states(error) == [OLD] * 3
    assert trial.resumes() == trial.pauses() == [1] * 3
    trial.heal()


def test_c02_the_first_error_is_raised_and_a_resume_that_fails_is_attached_to_it(
    two: list[ReferenceEngine],
) -> None:
    trial = Trial(two)
    two[0].inject(once(BEGIN, "refuse", message="the first error"))
    two[1].inject(Fault(CONTINUE, "refuse", message="cannot go on"))
    error = trial.fail()
    assert "the first error" in str(error).splitlines()[0]
    assert (error.engine, error.phase) == (two[0].url, "begin")
    outcome = error.report.engines[two[1].url]
    assert (outcome.state, outcome.paused) == (OLD, True)
    assert "cannot go on" in str(error)
    two[1].clear_faults()
    trial.heal()


# ---- C25


BUCKETS_OF_FOUR = 30_000


def in_four_buckets(engines: list[ReferenceEngine], **options: Any) -> Trial:
    trial = Trial(engines, bucket_bytes=BUCKETS_OF_FOUR, **options)
    assert trial.sender._transport.plan(kit.llama(1)).nbytes > 3 * BUCKETS_OF_FOUR
    return trial


@pytest.mark.parametrize("after", [1, 2])
def test_c25_an_engine_that_took_some_buckets_is_named_held_and_has_no_version(
    after: int, two: list[ReferenceEngine]
) -> None:
    trial = in_four_buckets(two)
    two[0].inject(once(UPDATE, "refuse", after=after))
    error = trial.fail()
    outcome = error.report.engines[two[0].url]
    assert (outcome.state, outcome.version, outcome.paused) == (MIXED, None, True)
    assert re.search(rf"{two[0].url} mixed \(version unknown, paused\)", str(error))
    assert trial.states(error) == [MIXED, MIXED]  # the other had confirmed as many
    assert trial.resumes() == [0, 0]
    trial.heal()


def test_c25_on_request_it_is_resumed_exactly_once_and_still_called_mixed(
    two: list[ReferenceEngine],
) -> None:
    trial = in_four_buckets(two, on_failure="resume")
    two[1].inject(once(UPDATE, "refuse", after=2))
    error = trial.fail()
    assert trial.states(error) == [MIXED, MIXED]
    assert trial.resumes() == [1, 1]
    assert not error.report.engines[two[1].url].paused
    trial.heal()


@pytest.mark.parametrize("path", [PAUSE, BEGIN, UPDATE])
def test_c25_a_second_failure_before_the_first_bucket_does_not_make_it_clean(
    path: str, engine: ReferenceEngine
) -> None:
    trial = in_four_buckets([engine])
    engine.inject(once(UPDATE, "refuse", after=2))
    trial.fail()
    engine.inject(once(path, "refuse", message="again"))
    error = trial.fail()
    assert "again" in str(error)
    assert trial.states(error) == [MIXED]
    assert error.report.engines[engine.url].paused
    assert trial.resumes() == [0]
    trial.heal()


def test_c25_recover_pushes_all_tensors_and_resumes_what_was_mixed(
    engine: ReferenceEngine,
) -> None:
    trial = in_four_buckets([engine])
    trial.sender.register_model(kit.llama(1))
    engine.inject(once(UPDATE, "refuse", after=1))
    trial.fail()
    report = trial.sender.recover()
    assert report.tensors == len(kit.llama(1).state_dict())
    trial.check_new()


# ---- C50


SLOW_STEPS = {
    INIT: "connect",
    PAUSE: "pause",
    LOADS: "drain",
    BEGIN: "begin",
    UPDATE: "transfer",
    END: "end",
    FLUSH: "flush",
    STAMP: "stamp",
    CONTINUE: "continue",
}
#: What may be asked for once more when a failed update is tidied up: it does no harm twice.
HARMLESS_TWICE = (END, FLUSH, CONTINUE)


@pytest.mark.parametrize("path", SLOW_STEPS)
def test_c50_a_step_slower_than_the_deadline_is_named_and_not_repeated(
    path: str, engine: ReferenceEngine
) -> None:
    """The slow call still takes effect afterwards, and does the next update no harm."""
    trial = Trial([engine], pause_mode="abort" if path == LOADS else "retract")
    if path == INIT:
        trial.sender.shutdown()
    engine.inject(once(path, "slow", seconds=4.0))
    if path == FLUSH:
        kit.make_flush_owed(engine)
    error = trial.fail(1.5)
    assert isinstance(error, UpdateTimeout)
    assert error.phase == SLOW_STEPS[path]
    assert trial.log.count(engine, path) <= (2 if path in HARMLESS_TWICE else 1)
    kit.wait_for(lambda: all(record["t1"] for record in trial.log.records(engine, path)))
    trial.heal()


# ---- C38


def test_c38_a_group_name_that_differs_on_the_two_sides_is_named_in_time(
    engine: ReferenceEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    join = SGLangEngine.join
    with monkeypatch.context() as patched:
        patched.setattr(
            SGLangEngine,
            "join",
            lambda self, **told: join(self, **{**told, "group_name": told["group_name"] + "-x"}),
        )
        sender = kit.make_sender(engine, timeout=2.0)
        log = kit.Log(engine)
        with kit.takes_at_most(2.0 + SLACK), pytest.raises(UpdateTimeout) as caught:
            sender.update_weights(kit.llama(1))
    (told,) = log.bodies(engine, INIT)
    assert told["group_name"].removesuffix("-x") in str(caught.value)
    assert caught.value.phase == "connect"
    sender.shutdown()
    kit.push(engine, kit.llama(1))
    assert kit.served(engine) == kit.tokens_of(1)


def known_groups() -> tuple[int, int, int]:
    world = dist.distributed_c10d._world
    return world.group_count, len(world.pg_map), len(world.pg_names)


@pytest.mark.parametrize("failing", [False, True])
def test_c38_a_default_group_of_the_trainer_is_neither_needed_nor_touched(
    failing: bool, engine: ReferenceEngine
) -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        world, before = dist.group.WORLD, known_groups()
        if failing:
            engine.inject(once(INIT, "refuse"))
            with pytest.raises(WeightUpdateError):
                kit.push(engine, kit.llama(1))
        kit.push(engine, kit.llama(1))
        assert known_groups() == before
        assert dist.group.WORLD is world
        total = torch.ones(1)
        dist.all_reduce(total)
        assert total.item() == 1
    finally:
        dist.destroy_process_group()
    assert kit.served(engine) == kit.tokens_of(1)


# ---- C56


@pytest.mark.skip(
    reason="neither SGLang's routes nor the reference engine show that an engine is asleep: "
    "there is nothing yet that a check before the pause could read"
)
def test_c56_an_engine_that_is_asleep_is_refused_before_the_pause() -> None: ...


def test_c56_a_refusal_of_a_sleeping_engine_leaves_it_as_it_was(engine: ReferenceEngine) -> None:
    """What can be had without such a route: its own words, nothing applied, nobody paused."""
    trial = Trial([engine])
    engine.inject(once(BEGIN, "refuse", message="weights are released: resume memory first"))
    error = trial.fail()
    assert "resume memory first" in str(error)
    assert trial.states(error) == [OLD]
    assert NEW not in trial.states(error)
    trial.heal()
