"""Requests are in flight at all times, and none is lost without being counted."""

from collections.abc import Sequence
from typing import Any

import pytest

from weight_update.demo.sampler import (
    GROUP,
    MOST_LOST,
    REQUESTS_IN_FLIGHT,
    DemoError,
    EngineClient,
    Sampler,
    read_sample,
)
from weight_update.demo.task import OUTPUT_TOKENS, PROMPTS


def answer(*, tokens: int = OUTPUT_TOKENS, reason: str = "length") -> dict[str, Any]:
    return {
        "output_ids": [1] * tokens,
        "meta_info": {
            "finish_reason": {"type": reason},
            "output_token_logprobs": [[-1.0, 1, None]] * tokens,
            "weight_versions": [{"version": "4", "start": 0, "end": tokens}],
        },
    }


class FakeClient(EngineClient):
    """Answers at once; the calls whose numbers are in ``failing`` fail."""

    def __init__(self, failing: Sequence[int] = ()) -> None:
        super().__init__("http://nowhere")
        self.calls = 0
        self.failing = failing

    def generate(
        self, prompts: Sequence[Sequence[int]], *, temperature: float = 1.0
    ) -> list[dict[str, Any]]:
        self.calls += 1
        if self.calls in self.failing:
            raise DemoError("no answer")
        return [answer() for _ in prompts]


def test_an_answer_becomes_a_sample() -> None:
    sample = read_sample(PROMPTS[0], answer(), "3")
    assert sample is not None
    assert (len(sample.output), sample.spans[0].version, sample.asked_under) == (16, "4", "3")
    assert not sample.carried


@pytest.mark.parametrize("bad", [answer(reason="abort"), answer(tokens=3), answer(tokens=0)])
def test_what_is_not_complete_is_no_sample(bad: dict[str, Any]) -> None:
    assert read_sample(PROMPTS[0], bad, "3") is None


def test_whatever_is_taken_is_replaced() -> None:
    with Sampler(FakeClient(), "default") as sampler:
        assert sampler.asked == REQUESTS_IN_FLIGHT
        assert len(sampler.take(2, "1")) == 2 * GROUP
        assert sampler.asked == REQUESTS_IN_FLIGHT + 2 * GROUP
        assert len(sampler.drain()) == REQUESTS_IN_FLIGHT
    assert (sampler.returned, sampler.lost) == (sampler.asked, 0)


def test_lost_requests_are_counted() -> None:
    with Sampler(FakeClient(failing=[5]), "default") as sampler:
        sampler.drain()
    assert sampler.lost == GROUP
    assert sampler.asked == sampler.returned + sampler.lost


def test_an_engine_that_loses_everything_ends_the_demo() -> None:
    client = FakeClient(failing=range(1000))
    with Sampler(client, "default") as sampler, pytest.raises(DemoError, match="lost"):
        sampler.take(MOST_LOST, "default")
