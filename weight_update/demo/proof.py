"""What the demo claims, and whether what it measured proves it."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import median
from typing import Any

from weight_update.demo.provenance import TOLERANCE, Verdict
from weight_update.demo.task import spell
from weight_update.demo.training import Step

MARGIN = 0.3
"""How far above the control run, and above its own start, the reward must end."""
LAST_STEPS = 5


@dataclass(frozen=True)
class Greedy:
    """Greedy outputs of engine and trainer, one a prompt."""

    engine: tuple[tuple[int, ...], ...]
    trainer: tuple[tuple[int, ...], ...]

    @property
    def equal(self) -> int:
        """How many of the outputs are the same token for token."""
        return sum(left == right for left, right in zip(self.engine, self.trainer, strict=True))

    @property
    def all_equal(self) -> bool:
        """Whether all are the same."""
        return self.equal == len(self.engine) == len(self.trainer) > 0


@dataclass(frozen=True)
class Requests:
    """What became of the requests of a run."""

    asked: int
    returned: int
    lost: int


@dataclass(frozen=True)
class Run:
    """What one training run measured.

    Attributes:
        steps: One record a step.
        verdict: What checking every sample found.
        requests: What became of the requests.
        first_version: What the engine served before the run.
        last_version: What the engine says it serves after the run.
    """

    steps: tuple[Step, ...]
    verdict: Verdict
    requests: Requests
    first_version: str
    last_version: str

    @property
    def reward_first(self) -> float:
        """The reward of the first step: made by the engine's own weights."""
        return self.steps[0].reward

    @property
    def reward_last(self) -> float:
        """The mean reward of the last few steps."""
        rewards = [step.reward for step in self.steps[-LAST_STEPS:]]
        return sum(rewards) / len(rewards)

    @property
    def updates(self) -> int:
        """How many times weights were pushed."""
        return sum(step.update is not None for step in self.steps)

    @property
    def carried(self) -> int:
        """How many samples were running across an update."""
        return sum(step.carried for step in self.steps)

    @property
    def update_ms(self) -> float:
        """The median time of a push, in milliseconds; 0 if there was none."""
        updates = [step.update for step in self.steps if step.update is not None]
        return 1e3 * median(u.seconds["total"] for u in updates) if updates else 0.0


@dataclass(frozen=True)
class Evidence:
    """All that the demo measured."""

    engine: str
    before: Greedy
    after: Greedy
    live: Run
    control: Run


@dataclass(frozen=True)
class Claim:
    """One thing the demo says, whether it was proven, and the numbers."""

    text: str
    proven: bool
    numbers: str


def claims(evidence: Evidence) -> tuple[Claim, ...]:
    """Everything that must hold for the demo to succeed."""
    return (
        _started_elsewhere(evidence.before),
        _pushed_every_step(evidence.live),
        _same_tokens(evidence.after),
        _reward_rose(evidence.live, evidence.control),
        _none_lost(evidence.live, evidence.control),
        _carried_across(evidence.live),
        _versions_true(evidence.live, evidence.control),
    )


def _started_elsewhere(before: Greedy) -> Claim:
    return Claim(
        "the engine started from other weights",
        before.equal < len(before.engine),
        f"greedy outputs differed on {len(before.engine) - before.equal} of "
        f"{len(before.engine)} prompts before the first push",
    )


def _pushed_every_step(live: Run) -> Claim:
    pushed = live.updates == len(live.steps) and live.last_version == live.steps[-1].version
    return Claim(
        "the weights reached the engine every step",
        pushed and live.last_version != live.first_version,
        f"{live.updates} updates in {len(live.steps)} steps, the engine went from version "
        f"{live.first_version!r} to {live.last_version!r}",
    )


def _same_tokens(after: Greedy) -> Claim:
    return Claim(
        "the engine's greedy output equals the trainer's, token for token",
        after.all_equal,
        f"{after.equal} of {len(after.engine)} prompts, "
        f"{sum(map(len, after.engine))} tokens compared",
    )


def _reward_rose(live: Run, control: Run) -> Claim:
    bar = MARGIN + max(control.reward_last, live.reward_first)
    return Claim(
        "the reward rose well above a run without pushes",
        live.reward_last >= bar,
        f"{live.reward_first:.2f} to {live.reward_last:.2f}; without pushes "
        f"{control.reward_first:.2f} to {control.reward_last:.2f} in {len(control.steps)} steps",
    )


def _none_lost(live: Run, control: Run) -> Claim:
    lost = live.requests.lost + control.requests.lost
    asked = live.requests.asked + control.requests.asked
    returned = live.requests.returned + control.requests.returned
    return Claim(
        "no request was lost",
        lost == 0 and asked == returned > 0,
        f"{asked} sent, {returned} came back complete, {lost} lost",
    )


def _carried_across(live: Run) -> Claim:
    return Claim(
        "requests in flight were carried across updates",
        live.carried > 0,
        f"{live.carried} requests have tokens of more than one version",
    )


def _versions_true(live: Run, control: Run) -> Claim:
    verdict = live.verdict + control.verdict
    returned = live.requests.returned + control.requests.returned
    complete = verdict.checked == returned > 0
    numbers = (
        f"{verdict.checked} of {returned} samples recomputed, log-probabilities agree "
        f"within {verdict.worst:.0e} ({TOLERANCE:.0e} allowed)"
    )
    if verdict.faults:
        numbers = f"{len(verdict.faults)} faults, the first: {verdict.faults[0]}"
    return Claim(
        "every sample carries the version that made it",
        complete and not verdict.faults,
        numbers,
    )


def report(evidence: Evidence, seconds: float) -> dict[str, Any]:
    """What ``demo-report.json`` holds."""
    live, control = evidence.live, evidence.control
    verdict = live.verdict + control.verdict
    made = claims(evidence)
    return {
        "proven": all(claim.proven for claim in made),
        "engine": evidence.engine,
        "reward_first": round(live.reward_first, 4),
        "reward_last": round(live.reward_last, 4),
        "reward_control": round(control.reward_last, 4),
        "tokens_equal": evidence.after.all_equal,
        "requests_lost": live.requests.lost + control.requests.lost,
        "requests_sent": live.requests.asked + control.requests.asked,
        "requests_carried": live.carried,
        "updates": live.updates,
        "update_ms_median": round(live.update_ms, 2),
        "versions_checked": verdict.checked,
        "version_faults": list(verdict.faults[:20]),
        "logprob_difference_max": verdict.worst,
        "steps": len(live.steps),
        "control_steps": len(control.steps),
        "rewards": [round(step.reward, 4) for step in live.steps],
        "control_rewards": [round(step.reward, 4) for step in control.steps],
        "seconds": round(seconds, 1),
        "claims": [
            {"claim": claim.text, "proven": claim.proven, "numbers": claim.numbers}
            for claim in made
        ],
    }


def example(greedy: Greedy, place: int) -> tuple[str, str]:
    """One greedy output of the engine and of the trainer, as text."""
    return spell(greedy.engine[place]), spell(greedy.trainer[place])
