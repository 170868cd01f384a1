"""The pause modes, and what each leaves of running requests and of the cache."""

from __future__ import annotations

import time
from contextlib import contextmanager

import pytest
import torch.distributed as dist

pytestmark = pytest.mark.usefixtures("clean")

LONG = 600


def pause(engine, kit, mode):
    return kit.post(engine, "/pause_generation", mode=mode)


def resume(engine, kit):
    return kit.post(engine, "/continue_generation")


@contextmanager
def paused_request(engine, kit, mode):
    """A request of LONG tokens, caught by a pause; gives its future and resumes at the end."""
    with kit.background() as start:
        request = start(engine.generate, kit.PROMPT, max_new_tokens=LONG)
        kit.wait_for(lambda: kit.running(engine) == 1)
        assert pause(engine, kit, mode).status == 200
        try:
            yield request
        finally:
            resume(engine, kit)


def label(engine, kit, version):
    return kit.post(engine, "/update_weight_version", new_version=version, abort_all_requests=False)


def test_abort_ends_the_running_request_and_takes_about_a_second(engine, kit):
    with kit.background() as start:
        request = start(engine.generate, kit.PROMPT, max_new_tokens=3000)
        kit.wait_for(lambda: kit.running(engine) == 1)
        began = time.monotonic()
        pause(engine, kit, "abort")
        assert time.monotonic() - began > 0.9
        assert request.result()["meta_info"]["finish_reason"]["type"] == "abort"
    kit.wait_for(lambda: kit.running(engine) == 0)


@pytest.mark.parametrize("mode", ["abort", "retract", "in_place"])
def test_a_new_request_is_held_until_continue(engine, kit, mode):
    pause(engine, kit, mode)
    with kit.background() as start:
        held = start(engine.generate, kit.PROMPT)
        assert kit.stays_open(held)
        assert kit.running(engine) == 0
        resume(engine, kit)
        assert len(held.result()["output_ids"]) == 16


def test_a_held_request_survives_abort_all(engine, kit):
    pause(engine, kit, "abort")
    with kit.background() as start:
        held = start(engine.generate, kit.PROMPT)
        kit.wait_for(lambda: engine.requests()[-1]["path"] == "/generate")
        kit.post(engine, "/abort_request", abort_all=True)
        resume(engine, kit)
        assert held.result()["meta_info"]["finish_reason"]["type"] == "length"


@pytest.mark.parametrize("mode", ["retract", "in_place"])
def test_the_running_count_is_frozen_while_paused(engine, kit, mode):
    with paused_request(engine, kit, mode) as request:
        assert kit.stays_open(request)
        assert kit.running(engine) == 1


def test_a_retracted_request_finishes_on_the_new_weights(engine, trainer, kit, model_a, model_b):
    with paused_request(engine, kit, "retract") as request:
        assert trainer.update(model_b).status == 200
        assert kit.post(engine, "/flush_cache").status == 200
        label(engine, kit, "b")
        resume(engine, kit)
        answer = request.result()
    meta, tokens = answer["meta_info"], answer["output_ids"]
    assert meta["num_retractions"] == 1
    first, second = meta["weight_versions"]
    assert (first["version"], first["start"]) == ("default", 0)
    assert second == {"version": "b", "start": first["end"], "end": LONG}
    switch = first["end"]
    assert tokens[:switch] == kit.greedy(model_a, kit.PROMPT, switch)
    assert tokens[switch:] == kit.greedy(model_b, kit.PROMPT + tokens[:switch], LONG - switch)


def test_retract_leaves_the_prefix_cache_as_it_is(engine, trainer, kit, model_b):
    with paused_request(engine, kit, "retract") as request:
        trainer.update(model_b)
        resume(engine, kit)
        assert request.result()["meta_info"]["cached_tokens"] >= len(kit.PROMPT)
    fresh = engine.generate(kit.PROMPT, max_new_tokens=24)["output_ids"]
    assert fresh != kit.greedy(model_b, kit.PROMPT, 24)


def test_an_in_place_request_goes_on_with_its_old_keys_and_values(
    engine, trainer, kit, model_a, model_b
):
    with paused_request(engine, kit, "in_place") as request:
        assert trainer.update(model_b).status == 200
        label(engine, kit, "b")
        resume(engine, kit)
        answer = request.result()
    meta, tokens = answer["meta_info"], answer["output_ids"]
    assert meta["num_retractions"] == 0
    switch = meta["weight_versions"][0]["end"]
    assert tokens[:switch] == kit.greedy(model_a, kit.PROMPT, switch)
    recomputed = kit.greedy(model_b, kit.PROMPT + tokens[:switch], LONG - switch)
    assert tokens[switch:] != recomputed


def test_after_in_place_a_fresh_request_meets_the_stale_prefix(engine, trainer, kit, model_b):
    with paused_request(engine, kit, "in_place") as request:
        trainer.update(model_b)
        resume(engine, kit)
        request.result()
    expected = kit.greedy(model_b, kit.PROMPT, 24)
    assert engine.generate(kit.PROMPT, max_new_tokens=24)["output_ids"] != expected
    salted = engine.generate(kit.PROMPT, max_new_tokens=24, extra_key="b")["output_ids"]
    assert salted == expected
    kit.wait_for(lambda: kit.post(engine, "/flush_cache").status == 200)
    assert engine.generate(kit.PROMPT, max_new_tokens=24)["output_ids"] == expected


@pytest.mark.parametrize(("mode", "status"), [("retract", 200), ("in_place", 400)])
def test_a_flush_works_under_retract_and_not_in_place(engine, kit, mode, status):
    with paused_request(engine, kit, mode):
        assert kit.post(engine, "/flush_cache").status == status


def test_a_flush_with_a_timeout_counts_the_queue_even_under_retract(engine, kit):
    with paused_request(engine, kit, "retract"):
        reply = kit.post(engine, "/flush_cache?timeout=0.2")
        assert (reply.status, reply.text) == (400, "Timed out waiting for idle state.")


def test_a_flush_with_a_timeout_waits_for_the_running_request(engine, kit):
    with kit.background() as start:
        request = start(engine.generate, kit.PROMPT, max_new_tokens=200)
        kit.wait_for(lambda: kit.running(engine) == 1)
        assert kit.post(engine, "/flush_cache").status == 400
        assert kit.post(engine, "/flush_cache?timeout=15").status == 200
        assert len(request.result()["output_ids"]) == 200


def test_an_update_that_may_not_flush_says_that_the_weights_are_in(engine, trainer, kit, model_b):
    with paused_request(engine, kit, "in_place"):
        reply = trainer.update(model_b, flush_cache=True, weight_version="b")
        assert reply.status == 400
        assert reply.message.startswith("Weights were updated, but the cache was not flushed")
        assert kit.get(engine, "/model_info").json["weight_version"] == "default"
    meta = engine.generate([1, 2], max_new_tokens=1)["meta_info"]
    assert meta["weight_versions"] == [{"version": "b", "start": 0, "end": 1}]


def test_naming_the_version_aborts_requests_unless_told_not_to(engine, kit):
    with kit.background() as start:
        request = start(engine.generate, kit.PROMPT, max_new_tokens=3000)
        kit.wait_for(lambda: kit.running(engine) == 1)
        label(engine, kit, "kept")
        assert kit.stays_open(request)
        kit.post(engine, "/update_weight_version", new_version="aborted")
        assert request.result()["meta_info"]["finish_reason"]["type"] == "abort"


def test_without_a_pause_an_update_waits_for_running_requests(engine, kit):
    with kit.background() as start:
        request = start(engine.generate, kit.PROMPT, max_new_tokens=3000, rid="long")
        kit.wait_for(lambda: kit.running(engine) == 1)
        begin = start(kit.post, engine, "/begin_weight_update")
        assert kit.stays_open(begin)
        kit.post(engine, "/abort_request", rid="long")
        assert request.result(30)["meta_info"]["finish_reason"]["type"] == "abort"
        assert begin.result(30).status == 200


def test_under_a_pause_continue_waits_for_the_update(engine, trainer, kit, model_b):
    name = "model.norm.weight"
    pause(engine, kit, "retract")
    kit.post(engine, "/begin_weight_update")
    with kit.background() as start:
        update = start(trainer.announce, {name: model_b.get_parameter(name)})
        kit.wait_for(lambda: engine.requests()[-1]["path"].endswith("_distributed"))
        continued = start(resume, engine, kit)
        assert kit.stays_open(continued)
        # The broadcast that the update waits for.
        dist.broadcast(model_b.get_parameter(name).detach(), src=0, group=trainer.group)
        assert update.result().status == 200
        assert continued.result().status == 200


def test_pausing_twice_and_continuing_twice_is_fine(engine, kit):
    for mode in ("retract", "in_place", "abort"):
        reply = pause(engine, kit, mode)
        assert reply.json == {"message": "Generation paused successfully.", "status": "ok"}
    for _ in range(2):
        reply = resume(engine, kit)
        assert reply.json == {"message": "Generation continued successfully.", "status": "ok"}


def test_an_unknown_mode_is_refused(engine, kit):
    reply = pause(engine, kit, "gently")
    assert reply.status == 400
    assert "body.mode" in reply.message


def test_health_says_503_while_paused_and_liveness_routes_do_not(engine, kit):
    assert kit.get(engine, "/health").status == 200
    pause(engine, kit, "in_place")
    statuses = {
        path: kit.get(engine, path).status
        for path in (
            "/health",
            "/health_generate",
            "/ready",
            "/ping",
            "/model_info",
            "/server_info",
        )
    }
    assert statuses == {
        "/health": 503,
        "/health_generate": 503,
        "/ready": 503,
        "/ping": 200,
        "/model_info": 200,
        "/server_info": 200,
    }
