"""Memory that is released and taken back, with a memory saver and without."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from weight_update.reference_engine import ReferenceEngine

RELEASE, RESUME = "/release_memory_occupation", "/resume_memory_occupation"
WEIGHTS, KV, ALL = ["weights"], ["kv_cache"], ["weights", "kv_cache", "cuda_graph"]


@pytest.fixture
def saving(model_a: Any) -> Iterator[ReferenceEngine]:
    """An engine that really frees what it releases."""
    with ReferenceEngine(model_a, memory_saver=True) as engine:
        yield engine


def cached(engine: ReferenceEngine, kit: Any) -> int:
    return int(engine.generate(kit.PROMPT, 4)["meta_info"]["cached_tokens"])


def served(engine: ReferenceEngine, kit: Any) -> list[int]:
    return list(engine.generate(kit.PROMPT, 8)["output_ids"])


def post(engine: ReferenceEngine, kit: Any, path: str, tags: Any) -> Any:
    reply = kit.post(engine, path, tags=tags)
    return reply.status, reply.json


def test_without_a_saver_everything_works_on(engine, kit, model_a):
    assert post(engine, kit, RELEASE, ALL) == (200, None)
    assert served(engine, kit) == kit.greedy(model_a, kit.PROMPT, 8)
    assert post(engine, kit, RESUME, ALL) == (200, None)


@pytest.mark.parametrize("tags", [None, [], ALL])
def test_no_tags_mean_all(engine, kit, tags):
    post(engine, kit, RELEASE, tags)

    assert [post(engine, kit, RESUME, [tag])[0] for tag in ALL] == [200] * 3


def test_releasing_twice_is_releasing_once(engine, kit):
    post(engine, kit, RELEASE, WEIGHTS)
    post(engine, kit, RELEASE, WEIGHTS)

    assert post(engine, kit, RESUME, WEIGHTS) == (200, None)


def test_the_prefix_cache_goes_with_its_memory(engine, kit):
    served(engine, kit)
    assert cached(engine, kit) > 0

    post(engine, kit, RELEASE, KV)
    post(engine, kit, RESUME, KV)

    assert cached(engine, kit) == 0


@pytest.mark.parametrize("path", [RELEASE, RESUME])
def test_tags_are_a_list_in_a_body(engine, kit, path):
    assert kit.post(engine, path, tags="weights").status == 400
    assert kit.call(engine, "POST", path).status == 400


def test_a_paused_engine_may_have_a_queue(engine, kit):
    with kit.background() as start:
        request = start(engine.generate, kit.PROMPT, 600)
        kit.wait_for(lambda: kit.running(engine) == 1)
        kit.post(engine, "/pause_generation", mode="retract")
        assert post(engine, kit, RELEASE, ALL)[0] == 200
        assert post(engine, kit, RESUME, ALL)[0] == 200
        kit.post(engine, "/continue_generation")
        assert len(request.result()["output_ids"]) == 600


def test_the_start_arguments_show_the_saver(engine, saving, kit):
    shown = [kit.get(one, "/server_info").json["enable_memory_saver"] for one in (engine, saving)]

    assert shown == [False, True]


def test_weights_are_lost_until_an_update_brings_them(saving, kit, model_a, model_b):
    assert served(saving, kit) == kit.greedy(model_a, kit.PROMPT, 8)
    post(saving, kit, RELEASE, ALL)
    post(saving, kit, RESUME, ALL)
    assert served(saving, kit) != kit.greedy(model_a, kit.PROMPT, 8)

    trainer = kit.Trainer(saving)
    kit.post(saving, "/flush_cache")
    trainer.update(model_b)
    trainer.close()

    assert served(saving, kit) == kit.greedy(model_b, kit.PROMPT, 8)


def asked_while_released(engine, kit):
    post(engine, kit, RELEASE, KV)
    served(engine, kit)


def updated_while_released(engine, kit):
    trainer = kit.Trainer(engine)
    post(engine, kit, RELEASE, WEIGHTS)
    kit.post(engine, "/begin_weight_update")
    trainer.announce({})


def released_while_busy(engine, kit):
    with kit.background() as start:
        start(engine.generate, kit.PROMPT, 3000)
        kit.wait_for(lambda: kit.running(engine) == 1)
        post(engine, kit, RELEASE, KV)


def resumed_for_nothing(engine, kit):
    post(engine, kit, RESUME, WEIGHTS)


MISTAKES = [
    (asked_while_released, "kv_cache is not there"),
    (updated_while_released, "weights is not there"),
    (released_while_busy, "should be called only when server is idle"),
    (resumed_for_nothing, "KeyError"),
]


@pytest.mark.parametrize(("mistake", "words"), MISTAKES)
def test_a_mistake_ends_the_engine(saving, kit, mistake, words):
    with pytest.raises(OSError):  # noqa: PT011 - the connection breaks, one way or another
        mistake(saving, kit)

    kit.wait_for(lambda: not kit.alive(saving.pid))
    assert words in saving.log()
