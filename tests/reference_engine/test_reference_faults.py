"""Injected faults strike where and as often as they say."""

from __future__ import annotations

import time

import pytest

from weight_update.reference_engine import Fault

UPDATE = "/update_weights_from_distributed"
pytestmark = pytest.mark.usefixtures("clean")


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


def test_a_fault_that_makes_no_sense_is_refused_where_it_is_written():
    with pytest.raises(ValueError, match="unknown kind"):
        Fault("/ping", "explode")
    with pytest.raises(ValueError, match="cannot strike"):
        Fault("/ping", "non_json", when="after_load")
