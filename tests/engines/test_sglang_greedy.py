"""The server computes what transformers computes, so its output can prove which weights it has."""

import pytest

from .models import SEED_A, SEED_B, TinyModels, greedy, tiny_llama
from .sglang_server import SGLangServer

PROMPTS = ([7], [5, 6, 7, 8], [200, 3, 77, 150, 9, 41, 18, 255], list(range(10, 74)))
NEW_TOKENS = 24


@pytest.mark.parametrize("prompt", PROMPTS, ids=lambda prompt: f"{len(prompt)}-tokens")
def test_greedy_output_equals_transformers(sglang_at_a: SGLangServer, prompt: list[int]) -> None:
    """Token for token, on prompts of several lengths."""
    expected = greedy(tiny_llama(SEED_A), prompt, NEW_TOKENS)
    assert sglang_at_a.generate(prompt, NEW_TOKENS) == expected


def test_output_shows_which_weights_are_loaded(
    sglang_at_a: SGLangServer, tiny_models: TinyModels
) -> None:
    """Loading B changes the output into B's, which differs from A's."""
    prompt = [5, 6, 7, 8]
    expected = greedy(tiny_llama(SEED_B), prompt, NEW_TOKENS)
    assert sglang_at_a.generate(prompt, NEW_TOKENS) != expected
    sglang_at_a.load(tiny_models.b)
    assert sglang_at_a.generate(prompt, NEW_TOKENS) == expected
