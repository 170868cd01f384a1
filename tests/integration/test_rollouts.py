"""Requests that an update aborts are recovered, and their answers say who made them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from weight_update import SGLangWeightSender
from weight_update.reference_engine import ReferenceEngine
from weight_update.rollouts import is_aborted, retry_aborted, salted, versions_of

from . import kit

PAGE = Path(__file__).parents[2] / "docs" / "rollouts.md"
REQUESTS = 8
LENGTH = 800
SECONDS = 240.0

Json = dict[str, Any]


class Sampler:
    """Keeps requests in flight, and every answer that came of them."""

    def __init__(self, engine: ReferenceEngine) -> None:
        self.answers: list[Json] = []
        self._engine = engine

    def generate(self, request: Json) -> Json:
        answer: Json = self._engine.call("POST", "/generate", request, timeout=SECONDS)
        self.answers.append(answer)
        return answer

    @property
    def aborted(self) -> list[Json]:
        return [answer for answer in self.answers if is_aborted(answer)]

    @contextmanager
    def in_flight(self, **options: Any) -> Iterator[list[Future[Json]]]:
        """Eight long requests with prompts of their own, all of them running."""
        with ThreadPoolExecutor(REQUESTS) as pool:
            asked = [
                pool.submit(retry_aborted, self.generate, request_of(number), **options)
                for number in range(REQUESTS)
            ]
            kit.wait_for(lambda: kit.running(self._engine) == REQUESTS)
            yield asked


def request_of(number: int) -> Json:
    sampling = {"max_new_tokens": LENGTH, "temperature": 0, "ignore_eos": True}
    body = {"input_ids": prompt_of(number), "sampling_params": sampling}
    return {**body, "return_logprob": True}


def prompt_of(number: int) -> list[int]:
    return [3, 1, 4, number]


def made_by(seed: int, prompt: list[int], output: list[int]) -> bool:
    """Whether every token of an output is a model's greedy choice after those before it."""
    with torch.no_grad():
        logits = kit.llama(seed)(torch.tensor([prompt + output])).logits[0, len(prompt) - 1 : -1]
    chosen = logits.gather(1, torch.tensor(output)[:, None]).squeeze(1)
    return bool((logits.amax(1) - chosen).max() < 1e-3)


@contextmanager
def aborting_sender(engine: ReferenceEngine) -> Iterator[SGLangWeightSender]:
    """A sender that has joined already, so that an update starts with its pause."""
    with kit.make_sender(engine, pause_mode="abort") as sender:
        sender.init_all_workers_group()
        yield sender


@pytest.fixture
def at_a(engine: ReferenceEngine) -> ReferenceEngine:
    kit.push(engine, kit.llama(0))
    return engine


def test_all_requests_in_flight_are_recovered_from_the_start(at_a: ReferenceEngine) -> None:
    """C17: no aborted answer is a sample, and each is asked again once the engine goes on."""
    sampler = Sampler(at_a)
    with aborting_sender(at_a) as sender, sampler.in_flight() as asked:
        report = sender.update_weights(kit.llama(1))
        answers = [future.result(SECONDS) for future in asked]

    assert len(sampler.aborted) == REQUESTS
    for number, answer in enumerate(answers):
        assert len(answer["output_ids"]) == LENGTH
        assert made_by(1, prompt_of(number), answer["output_ids"])
        assert [span.version for span in versions_of(answer).spans] == [str(report.version)]


def test_all_requests_in_flight_go_on_from_their_tokens(at_a: ReferenceEngine) -> None:
    """C17: no token is lost, and each token is the greedy choice of the version it names."""
    sampler = Sampler(at_a)
    before = kit.label(at_a)
    with aborting_sender(at_a) as sender, sampler.in_flight(keep=True) as asked:
        report = sender.update_weights(kit.llama(1))
        answers = [future.result(SECONDS) for future in asked]

    kept = sorted(len(answer["output_ids"]) for answer in sampler.aborted)
    assert len(kept) == REQUESTS
    assert kept == sorted(versions_of(answer).spans[0].end for answer in answers)
    for number, answer in enumerate(answers):
        old, new = versions_of(answer).spans
        assert (old.version, new.version) == (before, str(report.version))
        prompt, output = prompt_of(number), answer["output_ids"]
        assert len(output) == new.end == LENGTH
        assert made_by(0, prompt, output[: old.end])
        assert made_by(1, prompt + output[: old.end], output[old.end :])
        logprobs = answer["meta_info"]["output_token_logprobs"]
        assert [token for _, token, *_ in logprobs] == output


def test_updates_one_after_another_leave_every_version_in_the_answer(at_a: ReferenceEngine) -> None:
    """C17: two updates, each while all requests run."""
    sampler = Sampler(at_a)
    named = [kit.label(at_a)]
    with aborting_sender(at_a) as sender, sampler.in_flight(keep=True) as asked:
        for seed in (1, 0):
            kit.wait_for(lambda: kit.running(at_a) == REQUESTS)
            named.append(str(sender.update_weights(kit.llama(seed)).version))
        answers = [future.result(SECONDS) for future in asked]

    for answer in answers:
        found = versions_of(answer)
        assert found.exact
        assert [span.version for span in found.spans] == named
        assert len(answer["output_ids"]) == LENGTH


def test_a_salted_request_uses_no_prefix_of_other_weights(at_a: ReferenceEngine) -> None:
    """C09: where nothing can be flushed, the key of the cache separates the versions."""

    def says(body: Json) -> list[int]:
        return list(at_a.call("POST", "/generate", body)["output_ids"])

    sampling = {"max_new_tokens": kit.TOKENS, "temperature": 0}
    request = {"input_ids": kit.PROMPT, "sampling_params": sampling}
    with kit.make_sender(at_a, pause_mode="in_place") as sender:
        before = sender.update_weights(kit.llama(0)).version
        assert says(request) == says(salted(request, before)) == kit.tokens_of(0)
        after = sender.update_weights(kit.llama(1)).version

    assert says(request) != kit.tokens_of(1)
    assert says(salted(request, before)) != kit.tokens_of(1)  # sent too late
    assert says(salted(request, after)) == says(salted(request, after)) == kit.tokens_of(1)


def test_the_examples_of_the_page_work(at_a: ReferenceEngine) -> None:
    names: dict[str, Any] = {}
    plain = PAGE.read_text().split("\n## TorchRL")[0]
    for code in re.findall(r"^```python\n(.*?)^```", plain, re.MULTILINE | re.DOTALL):
        exec(compile(code.replace("http://a:30000", at_a.url), str(PAGE), "exec"), names)
    with kit.make_sender(at_a) as sender:
        report = sender.update_weights(kit.llama(1))
    output, versions = names["sample"](kit.PROMPT, report)

    assert len(output) == 512
    assert [span.version for span in versions.spans] == [str(report.version)]
    answer = at_a.generate(kit.PROMPT)
    assert names["is_on_policy"](answer, report.version)
    assert not names["is_on_policy"](answer, report.version + 1)
