"""Tiny random Llama models, small enough for a CPU server and exact enough to compare."""

from dataclasses import dataclass
from pathlib import Path

import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

VOCAB_SIZE = 256
SEED_A = 1
SEED_B = 2


@dataclass(frozen=True)
class TinyModels:
    """Directories of two checkpoints of one architecture with different weights."""

    a: Path
    b: Path


def tiny_config() -> LlamaConfig:
    """Describe a two-layer Llama with grouped-query attention and untied embeddings."""
    return LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=2048,
        tie_word_embeddings=False,
        # Wide enough that the greedy path differs between seeds and has no near-ties.
        initializer_range=0.2,
    )


def tiny_llama(seed: int) -> LlamaForCausalLM:
    """Build the model in fp32 from a seed, without disturbing the global generator."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return LlamaForCausalLM(tiny_config())  # type: ignore[no-untyped-call]


def tiny_tokenizer() -> PreTrainedTokenizerFast:
    """Build a tokenizer whose words are `w0`, `w1`, ... and whose ids are those numbers."""
    special = {0: "<unk>", 1: "<s>", 2: "</s>"}
    words = {special.get(i, f"w{i}"): i for i in range(VOCAB_SIZE)}
    tokenizer = Tokenizer(WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    return PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=tokenizer,
        unk_token="<unk>",
        bos_token="<s>",
        eos_token="</s>",
        pad_token="<unk>",
    )


def save_tiny_model(directory: Path, seed: int) -> Path:
    """Write the model and its tokenizer as a checkpoint directory."""
    tiny_llama(seed).save_pretrained(directory)
    tiny_tokenizer().save_pretrained(directory)
    return directory


def save_tiny_models(root: Path) -> TinyModels:
    """Write checkpoints A and B under one directory."""
    return TinyModels(
        a=save_tiny_model(root / "model-a", SEED_A),
        b=save_tiny_model(root / "model-b", SEED_B),
    )


@torch.no_grad()
def greedy(model: LlamaForCausalLM, input_ids: list[int], max_new_tokens: int) -> list[int]:
    """Continue a prompt greedily, end-of-sequence tokens being tokens like any other."""
    tokens = list(input_ids)
    for _ in range(max_new_tokens):
        logits = model(input_ids=torch.tensor([tokens]), use_cache=False).logits
        tokens.append(int(logits[0, -1].argmax()))
    return tokens[len(input_ids) :]
