"""Rewards are checkable, and the policy-gradient step goes up."""

from dataclasses import replace

import pytest
import torch

from weight_update.demo.policy import Policy, advantages, all_logprobs, clipped_loss, of_tokens
from weight_update.demo.task import PROMPTS, reward, spell, token_rewards

from .builders import sample_of


def test_counting_earns_all_and_anything_else_nothing() -> None:
    assert reward((10, 7), (8, 9, 0, 1)) == 1.0
    assert reward((10, 7), (7, 7, 7, 7)) == 0.0
    assert reward((10, 7), (12, 13, 14, 15)) == 0.0


def test_a_mistake_costs_its_own_token_only() -> None:
    assert token_rewards((10, 7), (8, 2, 3, 4)) == [1.0, 0.0, 1.0, 1.0]


def test_every_number_is_a_prompt() -> None:
    assert [spell(prompt) for prompt in PROMPTS] == [f"a {digit}" for digit in range(10)]


def test_advantages_are_centred_and_scaled() -> None:
    made = advantages(torch.tensor([[1.0, 0.0], [0.0, 0.0]]))
    assert made.mean().item() == pytest.approx(0.0, abs=1e-6)
    assert made.std().item() == pytest.approx(1.0, abs=1e-4)


def test_equal_rewards_teach_nothing() -> None:
    assert advantages(torch.ones(3, 4)).abs().max().item() == 0.0


@pytest.mark.parametrize(("advantage", "shift", "moves"), [(1, 0, 1), (1, 1, 0), (-1, -1, 0)])
def test_what_moved_far_enough_is_left_alone(advantage: int, shift: int, moves: int) -> None:
    logprob = torch.tensor([-1.0 + shift], requires_grad=True)
    clipped_loss(logprob, torch.tensor([-1.0]), torch.tensor([float(advantage)])).backward()
    assert logprob.grad is not None
    assert (logprob.grad.item() != 0) == bool(moves)


def test_a_step_makes_right_tokens_likelier() -> None:
    policy = Policy(seed=3)
    right = sample_of(policy.model, "1")
    wrong = replace(right, output=(12,) * len(right.output))
    before = of_tokens(all_logprobs(policy.model, [right]), [right]).sum().item()
    policy.learn([right, wrong])
    assert of_tokens(all_logprobs(policy.model, [right]), [right]).sum().item() > before
