"""The task: go on counting, 3 4 5 ... 9 0 1, with a reward that anybody can check."""

from __future__ import annotations

from collections.abc import Sequence

DIGITS = 10
START = 10
"""The token before the first number; the tokens above it mean nothing and earn nothing."""
VOCABULARY = 16
OUTPUT_TOKENS = 16
PROMPTS = tuple((START, digit) for digit in range(DIGITS))


def token_rewards(prompt: Sequence[int], output: Sequence[int]) -> list[float]:
    """One for each token that is the number after the token before it, else zero.

    Example:
        >>> token_rewards((START, 8), (9, 0, 5, 6))
        [1.0, 1.0, 0.0, 1.0]
    """
    before = (prompt[-1], *output[:-1])
    return [float(follows(left, right)) for left, right in zip(before, output, strict=True)]


def follows(left: int, right: int) -> bool:
    """Whether ``right`` is the number after ``left``; 0 comes after 9.

    Example:
        >>> follows(9, 0), follows(3, 5), follows(START, 1)
        (True, False, False)
    """
    return left < DIGITS and right == (left + 1) % DIGITS


def reward(prompt: Sequence[int], output: Sequence[int]) -> float:
    """The share of right tokens.

    Example:
        >>> reward((START, 8), (9, 0, 5, 6))
        0.75
    """
    return sum(token_rewards(prompt, output)) / len(output)


def spell(tokens: Sequence[int]) -> str:
    """Tokens as text: numbers as they are, the meaningless ones as letters.

    Example:
        >>> spell((START, 3, 4, 15))
        'a 3 4 f'
    """
    return " ".join(f"{token:x}" for token in tokens)
