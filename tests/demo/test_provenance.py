"""A sample that names the wrong weights is found out, by its spans or by its probabilities."""

from dataclasses import replace

import pytest

from weight_update.demo.policy import Policy
from weight_update.demo.provenance import Provenance, span_fault
from weight_update.demo.sampler import Sample
from weight_update.demo.task import OUTPUT_TOKENS

from .builders import sample, sample_of

END = OUTPUT_TOKENS
VERSIONS = ["default", "1", "2"]


@pytest.mark.parametrize(
    "good",
    [
        sample(("default", 0, END)),
        sample(("default", 0, 4), ("1", 4, 9), ("2", 9, END)),
        sample(("2", 0, END), asked_under="1"),
    ],
)
def test_true_spans_pass(good: Sample) -> None:
    assert span_fault(good, VERSIONS) == ""


@pytest.mark.parametrize(
    ("bad", "reason"),
    [
        (sample(), "cover"),
        (sample(("default", 0, END - 1)), "cover"),
        (sample(("default", 1, END)), "cover"),
        (sample(("default", 0, 3), ("1", 4, END)), "cover"),
        (sample(("default", 0, 0), ("1", 0, END)), "empty"),
        (sample(("3", 0, END)), "never pushed"),
        (sample(("1", 0, 4), ("default", 4, END)), "go back"),
        (sample(("1", 0, 4), ("1", 4, END)), "go back"),
        (sample(("1", 0, END), asked_under="2"), "go back"),
    ],
)
def test_false_spans_fail(bad: Sample, reason: str) -> None:
    assert reason in span_fault(bad, VERSIONS)


def test_a_label_of_other_weights_is_found_out() -> None:
    """Even those one optimizer step away, which is as close as two versions get."""
    policy = Policy(seed=5)
    provenance = Provenance("default", policy.model)
    old = sample_of(policy.model, "default")
    policy.learn([old, replace(old, output=(12,) * END)])
    provenance.pushed("1", policy.model)
    new = sample_of(policy.model, "1")
    assert provenance.check([old, new]).faults == ()
    assert provenance.check([old, new]).worst < 1e-5
    for liar in (replace(new, logprobs=old.logprobs), replace(old, logprobs=new.logprobs)):
        assert "not its own" in provenance.check([liar]).faults[0]


def test_each_span_is_held_to_its_own_version() -> None:
    first, second = Policy(seed=5).model, Policy(seed=6).model
    provenance = Provenance("default", first)
    provenance.pushed("1", second)
    early, late = sample_of(first, "default"), sample_of(second, "1")
    mixed = sample(("default", 0, 5), ("1", 5, END))
    true = replace(mixed, logprobs=early.logprobs[:5] + late.logprobs[5:])
    false = replace(mixed, logprobs=early.logprobs[:6] + late.logprobs[6:])
    assert provenance.check([true]).faults == ()
    assert provenance.check([false]).faults != ()


def test_verdicts_add_up() -> None:
    provenance = Provenance("default", Policy(seed=5).model)
    verdict = provenance.check([sample()]) + provenance.check([sample()])
    assert (verdict.checked, len(verdict.faults)) == (2, 2)
