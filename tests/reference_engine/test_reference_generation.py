"""Tokens are those that transformers generates, one prompt at a time or in a batch."""

from __future__ import annotations

import math

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import PreTrainedTokenizerFast

from weight_update.reference_engine import ReferenceEngine


@pytest.fixture(autouse=True)
def empty_cache(engine, kit):
    kit.wait_for(lambda: kit.post(engine, "/flush_cache").status == 200)


def prompts_of(lengths, seed=3):
    random = torch.Generator().manual_seed(seed)
    return [torch.randint(64, (length,), generator=random).tolist() for length in lengths]


def test_greedy_output_equals_transformers(engine, kit, model_a):
    answer = engine.generate(kit.PROMPT, max_new_tokens=200)
    assert answer["output_ids"] == kit.greedy(model_a, kit.PROMPT, 200)
    assert answer["meta_info"]["finish_reason"] == {"type": "length", "length": 200}


@pytest.mark.parametrize("lengths", [[8] * 16, range(1, 17)], ids=["equal", "unequal"])
def test_sixteen_prompts_in_one_batch_equal_transformers(engine, kit, model_a, lengths):
    prompts = prompts_of(lengths)
    answers = engine.generate(prompts, max_new_tokens=32)
    assert [a["output_ids"] for a in answers] == [kit.greedy(model_a, p, 32) for p in prompts]


def test_a_request_that_joins_a_running_batch_equals_transformers(engine, kit, model_a):
    with kit.background() as start:
        first = start(engine.generate, kit.PROMPT, max_new_tokens=3000, rid="long")
        kit.wait_for(lambda: kit.running(engine) == 1)
        second = engine.generate([7, 7, 7], max_new_tokens=30)
        kit.wait_for(lambda: kit.running(engine) == 1)
        kit.post(engine, "/abort_request", rid="long")
        assert second["output_ids"] == kit.greedy(model_a, [7, 7, 7], 30)
        tokens = first.result()["output_ids"]
        assert tokens == kit.greedy(model_a, kit.PROMPT, len(tokens))


def test_a_prompt_seen_before_comes_from_the_prefix_cache(engine, kit, model_a):
    assert engine.generate(kit.PROMPT)["meta_info"]["cached_tokens"] == 0
    again = engine.generate(kit.PROMPT)
    assert again["meta_info"]["cached_tokens"] == len(kit.PROMPT) - 1
    assert again["output_ids"] == kit.greedy(model_a, kit.PROMPT, 16)


def test_a_longer_prompt_reuses_the_part_it_shares(engine, kit, model_a):
    engine.generate(kit.PROMPT)
    longer = [*kit.PROMPT[:6], 1, 1, 1]
    answer = engine.generate(longer)
    assert answer["meta_info"]["cached_tokens"] == 6
    assert answer["output_ids"] == kit.greedy(model_a, longer, 16)


def test_requests_of_another_extra_key_share_no_prefix(engine, kit, model_a):
    def cached(**fields):
        return engine.generate(kit.PROMPT, **fields)["meta_info"]["cached_tokens"]

    known = len(kit.PROMPT) - 1
    keys = [None, "v1", "v2", "v1", "", None]
    assert [cached(extra_key=key) for key in keys] == [0, 0, 0, known, known, known]


def test_each_prompt_of_a_batch_has_its_own_extra_key_or_all_have_one(engine, kit):
    def cached(keys):
        body = {"input_ids": [kit.PROMPT, kit.PROMPT], "sampling_params": {"max_new_tokens": 1}}
        reply = kit.post(engine, "/generate", **body, extra_key=keys)
        return [answer["meta_info"]["cached_tokens"] for answer in reply.json]

    known = len(kit.PROMPT) - 1
    assert cached("v1") == [0, 0]
    assert cached(["v1", "v2"]) == [known, 0]
    assert kit.post(engine, "/generate", input_ids=[[1], [2]], extra_key=["v"]).status == 400
    assert kit.post(engine, "/generate", input_ids=[1, 2], extra_key=["v"]).status == 400


def test_a_flush_empties_the_prefix_cache(engine, kit):
    engine.generate(kit.PROMPT)
    assert kit.get(engine, "/flush_cache").text.startswith("Cache flushed.")
    assert engine.generate(kit.PROMPT)["meta_info"]["cached_tokens"] == 0


def test_a_stop_token_ends_the_output_and_is_part_of_it(engine, kit, model_a):
    expected = kit.greedy(model_a, kit.PROMPT, 24)
    stop = expected[5]
    answer = engine.generate(kit.PROMPT, max_new_tokens=24, stop_token_ids=[stop])
    assert answer["output_ids"] == expected[: expected.index(stop) + 1]
    assert answer["meta_info"]["finish_reason"] == {"type": "stop", "matched": stop}


def test_logprobs_are_those_of_the_chosen_tokens(engine, kit, model_a):
    answer = engine.generate(kit.PROMPT, max_new_tokens=4, return_logprob=True)
    tokens = answer["output_ids"]
    logits = model_a(torch.tensor([kit.PROMPT + tokens])).logits[0, len(kit.PROMPT) - 1 : -1]
    expected = logits.log_softmax(-1).gather(1, torch.tensor(tokens)[:, None]).flatten().tolist()
    entries = answer["meta_info"]["output_token_logprobs"]
    assert [entry[1:] for entry in entries] == [[token, None] for token in tokens]
    assert all(math.isclose(e[0], x, abs_tol=1e-4) for e, x in zip(entries, expected, strict=True))


def test_a_seed_makes_sampling_repeatable(engine, kit):
    def sample(seed):
        return engine.generate(kit.PROMPT, temperature=1.0, seed=seed)["output_ids"]

    assert sample(1) == sample(1)
    assert sample(1) != sample(2)


def test_a_tiny_top_p_is_greedy(engine, kit, model_a):
    answer = engine.generate(kit.PROMPT, temperature=1.0, top_p=1e-6)
    assert answer["output_ids"] == kit.greedy(model_a, kit.PROMPT, 16)


@pytest.mark.parametrize(
    "body",
    [
        {"input_ids": []},
        {"input_ids": [64]},
        {"input_ids": [1] * 5000},
        {"input_ids": [1], "sampling_params": {"top_k": 5}},
        {"input_ids": [1], "sampling_params": {"temperature": -1}},
        {"input_ids": [1], "stream": True},
        {"text": "no tokenizer here"},
        {},
    ],
    ids=lambda body: str(body)[:40],
)
def test_what_it_cannot_serve_is_refused(engine, kit, body):
    assert kit.post(engine, "/generate", **body).status == 400


def test_an_aborted_request_ends_with_200_and_what_it_has(engine, kit, model_a):
    with kit.background() as start:
        request = start(engine.generate, kit.PROMPT, max_new_tokens=3000, rid="mine-1")
        kit.wait_for(lambda: kit.running(engine) == 1)
        assert kit.post(engine, "/abort_request", rid="mine-1").text == ""
        answer = request.result()
    assert answer["meta_info"]["finish_reason"]["type"] == "abort"
    assert answer["meta_info"]["id"] == "mine-1"
    tokens = answer["output_ids"]
    assert 0 < len(tokens) < 3000
    assert tokens == kit.greedy(model_a, kit.PROMPT, len(tokens))


def test_text_goes_through_the_models_tokenizer(tmp_path, kit, model_a):
    words = {f"w{i}": i for i in range(64)}
    tokenizer = Tokenizer(WordLevel(words, unk_token="w0"))
    tokenizer.pre_tokenizer = Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(tmp_path)
    model_a.save_pretrained(tmp_path)
    with ReferenceEngine(tmp_path) as engine:
        params = {"max_new_tokens": 4, "temperature": 0}
        answer = kit.post(engine, "/generate", text="w1 w2 w3", sampling_params=params).json
    assert answer["output_ids"] == kit.greedy(model_a, [1, 2, 3], 4)
    assert answer["text"].split() == [f"w{i}" for i in answer["output_ids"]]


def test_a_qwen2_model_with_tied_embeddings_is_served_and_updated_too(kit):
    first, second = (kit.qwen2(seed) for seed in (0, 1))
    with ReferenceEngine(first) as engine:
        assert engine.generate(kit.PROMPT)["output_ids"] == kit.greedy(first, kit.PROMPT, 16)
        trainer = kit.Trainer(engine)
        assert kit.post(engine, "/begin_weight_update").status == 200
        head = {"lm_head.weight": torch.zeros_like(second.lm_head.weight)}
        tensors = dict(second.named_parameters()) | head
        assert trainer.send(tensors, flush_cache=True).status == 200
        assert engine.generate(kit.PROMPT)["output_ids"] == kit.greedy(second, kit.PROMPT, 16)
        trainer.close()
