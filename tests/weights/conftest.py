"""Tiny real models, small enough that every test may build its own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

MakeLlama = Callable[..., LlamaForCausalLM]


def tiny_llama(*, seed: int = 0, dtype: torch.dtype = torch.float32, **more: Any):
    """A random Llama of two layers; untied unless told otherwise."""
    torch.manual_seed(seed)
    settings: dict[str, Any] = {
        "vocab_size": 32,
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "max_position_embeddings": 64,
        "tie_word_embeddings": False,
        "initializer_range": 0.2,
    }
    return LlamaForCausalLM(LlamaConfig(**(settings | more))).to(dtype).eval()


@pytest.fixture
def make_llama() -> MakeLlama:
    return tiny_llama
