"""Details in which the real server was found to differ; `tests/engines/test_parity.py` checks."""

from __future__ import annotations

import pytest
import torch
from transformers import DynamicCache

pytestmark = pytest.mark.usefixtures("clean")

CONTEXT = 4096  # of the tiny models


def generate(engine, kit, input_ids, **sampling):
    params = {"temperature": 0, "max_new_tokens": 8, **sampling}
    return kit.post(engine, "/generate", input_ids=input_ids, sampling_params=params)


def test_a_request_that_wants_no_tokens_gets_none(engine, kit):
    answer = generate(engine, kit, kit.PROMPT, max_new_tokens=0).json
    assert answer["output_ids"] == []
    assert answer["meta_info"]["finish_reason"] == {"type": "length", "length": 0}


def test_stop_tokens_do_not_stop_a_request_that_ignores_its_end(engine, kit, model_a):
    tokens = kit.greedy(model_a, kit.PROMPT, 8)
    stops = [tokens[2]]
    ignoring = generate(engine, kit, kit.PROMPT, stop_token_ids=stops, ignore_eos=True).json
    heeding = generate(engine, kit, kit.PROMPT, stop_token_ids=stops).json
    assert ignoring["output_ids"] == tokens
    assert heeding["output_ids"] == tokens[: tokens.index(stops[0]) + 1]


def test_more_tokens_than_fit_are_refused_if_asked_for_and_cut_if_not(engine, kit):
    prompt = [5] * (CONTEXT - 10)
    reply = generate(engine, kit, prompt, max_new_tokens=11)
    assert (reply.status, list(reply.json)) == (400, ["error"])
    reply = generate(engine, kit, prompt, max_new_tokens=None)
    assert reply.json["meta_info"]["completion_tokens"] == 8  # two positions stay free


def test_a_refused_request_has_the_envelope_of_requests(engine, kit):
    reply = generate(engine, kit, [])
    assert reply.status == 400
    assert isinstance(reply.json["error"]["message"], str)


def test_a_negative_timeout_of_a_flush_is_refused(engine, kit):
    reply = kit.post(engine, "/flush_cache?timeout=-1")
    assert (reply.status, "validation error" in reply.message) == (400, True)


def test_an_id_that_is_nobodys_aborts_nothing_although_others_start_with_it(engine, kit):
    with kit.background() as start:
        request = start(engine.generate, kit.PROMPT, max_new_tokens=300, rid="long-1")
        kit.wait_for(lambda: kit.running(engine) == 1)
        kit.post(engine, "/abort_request", rid="long")
        assert request.result(60)["meta_info"]["finish_reason"]["type"] == "length"


def test_a_request_aborted_in_the_queue_answers_with_less(engine, kit):
    with kit.background() as start:
        request = start(engine.generate, kit.PROMPT, max_new_tokens=2000, rid="queued")
        kit.wait_for(lambda: kit.running(engine) == 1)
        kit.post(engine, "/pause_generation", mode="retract")
        kit.post(engine, "/abort_request", rid="queued")
        answer = request.result(60)
    meta = answer["meta_info"]
    assert meta["finish_reason"] == {"type": "abort", "message": "Abort in waiting queue"}
    assert "num_retractions" not in meta
    # Tokens reach the HTTP layer fifty at a time; the rest is lost with the request.
    assert len(answer["output_ids"]) % 50 == 0
    assert meta["completion_tokens"] == len(answer["output_ids"])


@torch.no_grad()
def continued_on_stale_keys(old, new, prompt, count):
    """The first token from all keys but the last, which is computed anew and then dropped."""
    stale, partly = DynamicCache(), DynamicCache()
    old(input_ids=torch.tensor([prompt]), past_key_values=stale)
    old(input_ids=torch.tensor([prompt[:-1]]), past_key_values=partly)
    tokens = [prompt[-1]]
    for past in [partly, *[stale] * (count - 1)]:
        logits = new(input_ids=torch.tensor([tokens[-1:]]), past_key_values=past).logits
        tokens.append(int(logits[0, -1].argmax()))
    return tokens[1:]


def test_a_prompt_that_is_cached_whole_goes_on_with_the_cached_keys_of_its_last_token(
    engine, trainer, kit, model_a, model_b
):
    generate(engine, kit, kit.PROMPT)
    trainer.update(model_b, flush_cache=False)
    answer = generate(engine, kit, kit.PROMPT).json
    expected = continued_on_stale_keys(model_a, model_b, kit.PROMPT, 8)
    assert answer["output_ids"] == expected
    assert expected != kit.greedy(model_b, kit.PROMPT, 8)
