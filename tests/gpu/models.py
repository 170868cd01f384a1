"""Tiny Llamas, and what they and engines generate.

Tests import this as ``tests.gpu.models``, scripts beside it as ``models``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

if TYPE_CHECKING:
    from weight_update.reference_engine import ReferenceEngine

PROMPT = [3, 14, 15]
TOKENS = 7


def llama(seed: int, **sizes: int) -> LlamaForCausalLM:
    """A random Llama."""
    torch.manual_seed(seed)
    usual: dict[str, Any] = {
        "vocab_size": 64,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "initializer_range": 0.2,
    }
    return LlamaForCausalLM(LlamaConfig(**usual | sizes)).eval()


def uneven_llama(seed: int) -> LlamaForCausalLM:
    """A Llama that two ranks cannot divide into equal parts."""
    return llama(seed, vocab_size=65, intermediate_size=130)


def greedy(model: Any) -> list[int]:
    """What a model generates for the prompt."""
    ids = torch.tensor([PROMPT], device=model.device)
    tokens = model.generate(ids, max_new_tokens=TOKENS, do_sample=False, eos_token_id=None)
    return [int(token) for token in tokens[0, len(PROMPT) :]]


def generated(engine: ReferenceEngine) -> list[int]:
    """What an engine generates for the prompt."""
    return list(engine.generate(PROMPT, TOKENS, ignore_eos=True)["output_ids"])
