"""Samplers of the real server: prefixes of old weights, aborted requests, who made an answer."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import pytest

from weight_update import SGLangWeightSender, SGLangWeightSyncScheme
from weight_update.rollouts import is_aborted, retry_aborted, salted, versions_of

from .long_request import wait_until
from .models import SEED_A, SEED_B, greedy, shortfall, tiny_llama
from .sglang_server import SGLangServer

Json = dict[str, Any]

SHARED = list(range(20, 60))
TOKENS = 8
REQUESTS = 6
LENGTH = 700
NEAR_TIE = 1e-3


def sender_of(server: SGLangServer, **settings: Any) -> SGLangWeightSender:
    return SGLangWeightSyncScheme(server.url, timeout=60, **settings).create_sender()


def of_generate(prompt: list[int]) -> Json:
    sampling = {"max_new_tokens": TOKENS, "temperature": 0, "ignore_eos": True}
    return {"input_ids": prompt, "sampling_params": sampling}


def of_completions(prompt: list[int]) -> Json:
    body = {"prompt": prompt, "model": "m", "max_tokens": TOKENS}
    return {**body, "temperature": 0, "ignore_eos": True}


def of_chat(prompt: list[int]) -> Json:
    """The tokens of a conversation, since the tiny tokenizer has no chat template."""
    said = [{"role": "user", "content": "w20"}]
    body = {"messages": said, "input_ids": prompt, "model": "m", "max_tokens": TOKENS}
    return {**body, "temperature": 0, "ignore_eos": True}


ROUTES = {
    "generate": of_generate,
    "v1/completions": of_completions,
    "v1/chat/completions": of_chat,
}


def words(tokens: list[int]) -> str:
    """What the tiny tokenizer makes of tokens."""
    return "".join(f" w{token}" for token in tokens)


def said(answer: Json) -> str:
    """The text of an answer of any route."""
    choice = answer["choices"][0] if "choices" in answer else answer
    return str(choice["text"] if "text" in choice else choice["message"]["content"])


@pytest.mark.parametrize("route", ROUTES)
def test_an_old_prefix_is_served_without_the_salt_and_never_with_it(
    sglang_at_a: SGLangServer, route: str
) -> None:
    """C09: ``in_place`` cannot flush; the prompt shares its start with one seen before."""
    assert sglang_at_a.status("POST", "flush_cache") == 200
    seen, request = ROUTES[route]([*SHARED, 78]), ROUTES[route]([*SHARED, 77])
    fresh = words(greedy(tiny_llama(SEED_B), [*SHARED, 77], TOKENS))
    with sender_of(sglang_at_a, pause_mode="in_place") as sender:
        before = sender.update_weights(tiny_llama(SEED_A)).version
        for body in (seen, salted(seen, before)):
            sglang_at_a.post(route, body)
        after = sender.update_weights(tiny_llama(SEED_B)).version

    assert said(sglang_at_a.post(route, request)) != fresh
    assert said(sglang_at_a.post(route, salted(request, before))) != fresh  # sent too late
    for _ in range(2):  # the second time from the cache
        answer = sglang_at_a.post(route, salted(request, after))
        assert said(answer) == fresh
        assert [span.version for span in versions_of(answer).spans] == [str(after)]


def request_of(number: int) -> Json:
    sampling = {"max_new_tokens": LENGTH, "temperature": 0, "ignore_eos": True}
    body = {"input_ids": prompt_of(number), "sampling_params": sampling, "rid": f"mine-{number}"}
    return {**body, "return_logprob": True}


def prompt_of(number: int) -> list[int]:
    return [3, 14, 15, 92, 100 + number]


@pytest.mark.parametrize("keep", [False, True])
def test_all_requests_that_an_update_aborts_are_recovered(
    sglang_at_a: SGLangServer, keep: bool
) -> None:
    """C17: from the start, or without losing a token."""
    answers: list[Json] = []

    def generate(request: Json) -> Json:
        answers.append(sglang_at_a.post("generate", request, timeout=240))
        return answers[-1]

    with (
        sender_of(sglang_at_a, pause_mode="abort") as sender,
        ThreadPoolExecutor(REQUESTS) as pool,
    ):
        before = sender.update_weights(tiny_llama(SEED_A)).version
        wait_until(lambda: running(sglang_at_a) == 0)  # the count trails what it counts
        ask = partial(retry_aborted, generate, keep=keep)
        asked = [pool.submit(ask, request_of(number)) for number in range(REQUESTS)]
        wait_until(lambda: running(sglang_at_a) == REQUESTS)
        after = sender.update_weights(tiny_llama(SEED_B)).version
        wholes = [future.result(240) for future in asked]

    assert sum(map(is_aborted, answers)) == REQUESTS
    for number, whole in enumerate(wholes):
        output, found = whole["output_ids"], versions_of(whole)
        assert len(output) == LENGTH
        assert found.exact
        assert [token for _, token, *_ in whole["meta_info"]["output_token_logprobs"]] == output
        named = [str(before), str(after)] if keep else [str(after)]
        assert [span.version for span in found.spans] == named
        for span in found.spans:
            seed = SEED_A if span.version == str(before) else SEED_B
            head = prompt_of(number) + output[: span.start]
            assert shortfall(tiny_llama(seed), head, output[span.start : span.end]) < NEAR_TIE


def running(server: SGLangServer) -> int:
    return int(server.get("v1/loads")["loads"][0]["num_running_reqs"])


def test_a_retracted_request_tells_both_versions_on_every_route_that_labels_its_answers(
    sglang_at_a: SGLangServer,
) -> None:
    """C17: nothing is aborted; the sampler sees which weights made which token."""
    with sender_of(sglang_at_a) as sender, ThreadPoolExecutor(len(ROUTES)) as pool:
        before = sender.update_weights(tiny_llama(SEED_A)).version
        wait_until(lambda: running(sglang_at_a) == 0)
        bodies = {route: lengthened(make(prompt_of(9))) for route, make in ROUTES.items()}
        asked = [pool.submit(sglang_at_a.post, r, body, 240) for r, body in bodies.items()]
        wait_until(lambda: running(sglang_at_a) == len(ROUTES))
        after = sender.update_weights(tiny_llama(SEED_B)).version
        answers = [future.result(240) for future in asked]

    for answer in answers:
        found = versions_of(answer)
        assert not is_aborted(answer)
        assert found.mixed
        assert found.exact
        assert [span.version for span in found.spans] == [str(before), str(after)]
        assert found.spans[-1].end == LENGTH


def lengthened(body: Json) -> Json:
    if "sampling_params" in body:
        return {**body, "sampling_params": {**body["sampling_params"], "max_new_tokens": LENGTH}}
    return {**body, "max_tokens": LENGTH}
