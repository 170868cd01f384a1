"""The loop: sample from the live engine, learn, push the weights, and again."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from weight_update import SGLangWeightSender, UpdateReport
from weight_update.demo.policy import Policy
from weight_update.demo.provenance import Provenance, Verdict
from weight_update.demo.sampler import Sample, Sampler
from weight_update.demo.task import reward

GROUPS_A_STEP = 10


@dataclass(frozen=True)
class Step:
    """What one step did.

    Attributes:
        number: Counted from one.
        reward: Mean reward of the samples it learned from.
        version: What the engine serves afterwards.
        carried: How many of its samples were running across an update.
        verdict: What checking their versions found.
        update: The report of the push; None in a run without pushes.
    """

    number: int
    reward: float
    version: str
    carried: int
    verdict: Verdict
    update: UpdateReport | None


def mean_reward(samples: Sequence[Sample]) -> float:
    """The mean reward of samples."""
    return sum(reward(s.prompt, s.output) for s in samples) / max(len(samples), 1)


def train(
    policy: Policy,
    sampler: Sampler,
    provenance: Provenance,
    sender: SGLangWeightSender | None,
    steps: int,
) -> Iterator[Step]:
    """Train, one record a step.

    Args:
        policy: What learns.
        sampler: Where its samples come from.
        provenance: Is told of every push, and checks every sample.
        sender: Takes the policy's weights to the engine after each step; None leaves them
            where they are, which is the control run.
        steps: How many steps to take.
    """
    for number in range(1, steps + 1):
        samples = sampler.take(GROUPS_A_STEP, provenance.versions[-1])
        verdict = provenance.check(samples)
        policy.learn(samples)
        update = None if sender is None else _push(policy, sender, provenance)
        yield Step(
            number=number,
            reward=mean_reward(samples),
            version=provenance.versions[-1],
            carried=sum(sample.carried for sample in samples),
            verdict=verdict,
            update=update,
        )


def _push(policy: Policy, sender: SGLangWeightSender, provenance: Provenance) -> UpdateReport:
    """Bring the policy's weights to the engine, in the middle of whatever it generates."""
    report = sender.update_weights(policy.model)
    provenance.pushed(str(report.version), policy.model)
    return report
