"""Samples, steps and evidence as the demo would have measured them."""

from dataclasses import replace
from typing import Any

import torch

from weight_update import UpdateReport
from weight_update.demo.policy import all_logprobs, of_tokens
from weight_update.demo.proof import Evidence, Greedy, Requests, Run
from weight_update.demo.provenance import Verdict
from weight_update.demo.sampler import Sample
from weight_update.demo.task import OUTPUT_TOKENS, PROMPTS
from weight_update.demo.training import Step
from weight_update.rollouts import Span


def sample(*spans: tuple[str, int, int], asked_under: str = "default") -> Sample:
    """A right answer after 3, made by the versions of ``spans``."""
    output = tuple((4 + place) % 10 for place in range(OUTPUT_TOKENS))
    made = tuple(Span(*span) for span in spans)
    return Sample(PROMPTS[3], output, (-1.0,) * OUTPUT_TOKENS, made, asked_under)


def sample_of(model: Any, version: str) -> Sample:
    """A sample whose probabilities are those of ``model``, said to be of ``version``."""
    bare = sample((version, 0, OUTPUT_TOKENS), asked_under=version)
    with torch.no_grad():
        logprobs = of_tokens(all_logprobs(model, [bare]), [bare])[0]
    return replace(bare, logprobs=tuple(logprobs.tolist()))


def step(number: int, reward: float, *, pushed: bool) -> Step:
    """A step that learned from 60 samples."""
    update = UpdateReport(number, 1000, 21, 1, {"transfer": 0.001, "total": 0.01}, {})
    version = str(number) if pushed else "default"
    verdict = Verdict(checked=60, worst=1e-6)
    return Step(number, reward, version, 12, verdict, update if pushed else None)


def a_run(*, pushed: bool) -> Run:
    """A run of ten steps, as it should be."""
    steps = [step(n, n / 10 if pushed else 0.05, pushed=pushed) for n in range(1, 11)]
    return Run(
        steps=tuple(steps),
        verdict=Verdict(checked=600, worst=1e-6),
        requests=Requests(asked=600, returned=600, lost=0),
        first_version="default",
        last_version="10" if pushed else "default",
    )


def evidence(**changes: Any) -> Evidence:
    """Evidence that proves everything, but for ``changes``."""
    made = Evidence(
        engine="reference 0.5.23",
        before=Greedy(engine=((1, 2), (3, 4)), trainer=((1, 2), (3, 5))),
        after=Greedy(engine=((1, 2), (3, 4)), trainer=((1, 2), (3, 4))),
        live=a_run(pushed=True),
        control=a_run(pushed=False),
    )
    return replace(made, **changes)
