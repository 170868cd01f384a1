"""Injected faults strike where and as often as they say."""

from __future__ import annotations

import os
import signal
import time
from itertools import product
from typing import get_args

import pytest

from weight_update.reference_engine import Fault, ReferenceEngine
from weight_update.reference_engine.faults import KINDS_WHEN, Kind, When

UPDATE = "/update_weights_from_distributed"
PAIRS = list(product(get_args(Kind), get_args(When)))
pytestmark = pytest.mark.usefixtures("clean")

# What a sender sees of each kind: how its call fails, or the status and a part of the body.
SEEN = {
    "refuse": (400, "injected fault"),
    "hang": TimeoutError,
    "die": ConnectionError,
    "stop": TimeoutError,
    "slow": (200, '"success":true'),
    "close": ConnectionError,
    "non_json": (400, "<html>"),
    "success_false": (200, '"success":false'),
    "lie": (200, '"success":true'),
    "drop": (200, '"success":true'),
}


@pytest.fixture
def tensors(model_b):
    return dict(model_b.named_parameters())


@pytest.fixture
def session(engine, kit):
    kit.post(engine, "/begin_weight_update")
    yield
    kit.post(engine, "/end_weight_update")


def test_refuse_answers_at_once_and_receives_nothing(engine, trainer, session, tensors):
    engine.inject(Fault(UPDATE, "refuse", status=500, message="out of luck"))
    reply = trainer.announce(tensors)
    assert (reply.status, reply.json) == (500, {"success": False, "message": "out of luck"})


def test_after_and_times_choose_which_calls_are_harmed(engine, kit):
    engine.inject(Fault("/ping", "refuse", after=1, times=2))
    assert [kit.get(engine, "/ping").status for _ in range(4)] == [200, 400, 400, 200]


def test_cleared_faults_strike_no_more(engine, kit):
    engine.inject(Fault("/ping", "refuse"))
    engine.clear_faults()
    assert kit.get(engine, "/ping").status == 200


def test_hang_never_answers_while_the_rest_lives(engine, trainer, kit, session, tensors):
    engine.inject(Fault(UPDATE, "hang", times=1))
    with pytest.raises(TimeoutError):
        kit.call(engine, "POST", UPDATE, {}, timeout=0.5)
    assert engine.generate(kit.PROMPT)["output_ids"]
    assert engine.requests()[-2]["status"] is None


def test_slow_answers_late_and_truly(engine, kit):
    engine.inject(Fault("/ping", "slow", seconds=0.3, times=1))
    began = time.monotonic()
    assert kit.get(engine, "/ping").status == 200
    assert time.monotonic() - began >= 0.3


def test_close_drops_the_connection_without_a_byte(engine, kit):
    engine.inject(Fault("/ping", "close", times=1))
    with pytest.raises(ConnectionError):
        kit.get(engine, "/ping")


def test_close_before_the_answer_does_the_work_first(engine, kit):
    engine.inject(Fault("/update_weight_version", "close", when="before_answer", times=1))
    with pytest.raises(ConnectionError):
        kit.post(engine, "/update_weight_version", new_version="done")
    assert kit.get(engine, "/model_info").json["weight_version"] == "done"


def test_non_json_answers_a_page(engine, kit):
    engine.inject(Fault("/ping", "non_json", status=502, message="Bad Gateway", times=1))
    reply = kit.get(engine, "/ping")
    assert reply.status == 502
    assert reply.text.startswith("<html>")


def test_success_false_answers_200(engine, trainer, session, tensors):
    engine.inject(Fault(UPDATE, "success_false", message="no", times=1))
    reply = trainer.announce(tensors)
    assert (reply.status, reply.json) == (200, {"success": False, "message": "no"})


def test_lie_answers_success_and_changes_nothing(engine, trainer, kit, session, tensors, model_a):
    engine.inject(Fault(UPDATE, "lie", times=1))
    assert trainer.announce(tensors).json["success"] is True
    assert engine.generate(kit.PROMPT)["output_ids"] == kit.greedy(model_a, kit.PROMPT, 16)


def test_refuse_after_receive_leaves_the_weights_alone(
    engine, trainer, kit, session, tensors, model_a
):
    engine.inject(Fault(UPDATE, "refuse", when="after_receive", message="lost", times=1))
    reply = trainer.send(tensors)
    assert (reply.status, reply.message) == (400, "Failed to receive weights: lost")
    assert engine.generate(kit.PROMPT)["output_ids"] == kit.greedy(model_a, kit.PROMPT, 16)


def test_refuse_after_load_leaves_the_weights_mixed(
    engine, trainer, kit, session, tensors, model_a
):
    engine.inject(Fault(UPDATE, "refuse", when="after_load", tensors=1, message="oops", times=1))
    reply = trainer.send(tensors)
    assert reply.status == 400
    assert "Failed to update parameter online: oops" in reply.message
    first, last = next(iter(tensors)), "lm_head.weight"
    rows = kit.post(engine, "/get_weights_by_name", name=first).json
    assert rows == tensors[first][:100].tolist()
    rows = kit.post(engine, "/get_weights_by_name", name=last).json
    assert rows == model_a.get_parameter(last)[:100].tolist()


NORM, DOWN = "model.norm.weight", "model.layers.0.mlp.down_proj.weight"


def rows(engine, kit, name):
    return kit.post(engine, "/get_weights_by_name", name=name).json


@pytest.mark.parametrize("flat", [False, True], ids=["one by one", "bucket"])
@pytest.mark.parametrize(
    ("names", "dropped"), [((DOWN,), {DOWN}), (None, {NORM, DOWN}), (("nobody",), set())]
)
def test_drop_receives_all_and_loads_all_but_what_it_drops(
    engine, trainer, kit, session, tensors, model_a, flat, names, dropped
):
    tensors[NORM] = tensors[NORM] + 1  # norms of new models are equal
    engine.inject(Fault(UPDATE, "drop", when="after_receive", names=names, times=1))
    assert trainer.send(tensors, flat=flat).json["success"] is True
    for name in (NORM, DOWN):
        held = model_a.get_parameter(name) if name in dropped else tensors[name]
        assert rows(engine, kit, name) == held[:100].tolist()


@pytest.fixture(scope="module")
def harmed(model_a):
    """An engine that the faults in this file may ruin."""
    with ReferenceEngine(model_a, group_timeout=3.0) as engine:
        yield engine


def strike(engine, kit, tensors, fault, *, flat=False):
    """Send one update into a fault; return what the sender sees."""
    trainer = kit.Trainer(engine)
    kit.post(engine, "/begin_weight_update")
    engine.inject(fault)
    silent = fault.kind in ("hang", "stop")
    fields = {"timeout": 2 if silent else 60, "load_format": "flattened_bucket" if flat else None}
    with kit.background() as start:
        reply = start(trainer.announce, tensors, **fields)
        if fault.when != "before_join" or fault.kind == "slow":
            start(trainer.broadcast, tensors, flat=flat)
        error = reply.exception(90)
    if fault.kind == "stop":
        os.kill(engine.pid, signal.SIGCONT)
    return error or (reply.result().status, reply.result().text)


@pytest.mark.parametrize(
    ("kind", "when"), [(kind, when) for kind, when in PAIRS if kind in KINDS_WHEN[when] & {*SEEN}]
)
def test_the_sender_sees_each_kind_of_fault_wherever_it_strikes(harmed, kit, tensors, kind, when):
    seen = strike(harmed, kit, tensors, Fault(UPDATE, kind, when=when, seconds=0.1, times=1))
    if isinstance(SEEN[kind], type):
        assert isinstance(seen, SEEN[kind])
        if kind != "close":
            harmed.restart()
    else:
        status, part = SEEN[kind]
        assert seen[0] == status
        assert part in seen[1]
    kit.post(harmed, "/end_weight_update")


@pytest.mark.parametrize(
    ("kind", "when"), [(kind, when) for kind, when in PAIRS if kind not in KINDS_WHEN[when]]
)
def test_a_kind_that_cannot_strike_then_is_refused_where_it_is_written(kind, when):
    with pytest.raises(ValueError, match="cannot strike"):
        Fault(UPDATE, kind, when=when, tensors=1)


def miscount(taken):
    return Fault(UPDATE, "wrong_count", when="after_receive", tensors=taken, times=1)


@pytest.mark.parametrize("flat", [False, True], ids=["one by one", "bucket"])
def test_an_engine_that_takes_more_waits_until_its_patience_ends(harmed, kit, tensors, flat):
    status, text = strike(harmed, kit, tensors, miscount(len(tensors) + 1), flat=flat)
    assert status == 400
    assert "Failed to receive weights" in text
    kit.post(harmed, "/end_weight_update")


def test_an_engine_that_expects_a_smaller_bucket_dies_of_it(harmed, kit, tensors):
    assert isinstance(strike(harmed, kit, tensors, miscount(3), flat=True), ConnectionError)
    harmed.restart()


def test_an_engine_that_takes_fewer_says_yes_and_leaves_the_trainer_waiting(harmed, kit, tensors):
    trainer = kit.Trainer(harmed)
    kit.post(harmed, "/begin_weight_update")
    harmed.inject(miscount(3))
    with kit.background() as start:
        reply = start(trainer.announce, tensors)
        sent = start(trainer.broadcast, tensors)
        assert reply.result(60).status == 200
        assert kit.stays_open(sent)
        harmed.restart()  # the trainer's broadcast ends with the connection
        assert isinstance(sent.exception(60), RuntimeError)


def test_a_fault_that_makes_no_sense_is_refused_where_it_is_written():
    with pytest.raises(ValueError, match="unknown kind"):
        Fault("/ping", "explode")
    with pytest.raises(ValueError, match="needs tensors"):
        Fault(UPDATE, "wrong_count", when="after_receive")
    with pytest.raises(ValueError, match="only rank 0 answers"):
        Fault("/ping", "refuse", rank=1)
    with pytest.raises(ValueError, match="only 'drop' takes names"):
        Fault(UPDATE, "refuse", names=("a",))
