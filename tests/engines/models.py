"""Tiny random models, small enough for a CPU server and exact enough to compare."""

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from torch import nn
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
)

Family = Literal["llama", "qwen2"]

VOCAB_SIZE = 256
CONTEXT = 8192
SEED_A = 1
SEED_B = 2

SIZES: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": CONTEXT,
    # Wide enough that the greedy path differs between seeds and has few near-ties.
    "initializer_range": 0.2,
}


@dataclass(frozen=True)
class TinyModels:
    """Directories of two checkpoints of one architecture with different weights."""

    a: Path
    b: Path


def tiny_config() -> LlamaConfig:
    """Describe a two-layer Llama with grouped-query attention and untied embeddings."""
    return LlamaConfig(**SIZES, head_dim=16, tie_word_embeddings=False)


def tiny_llama(seed: int) -> LlamaForCausalLM:
    """Build the model in fp32 from a seed, without disturbing the global generator."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return LlamaForCausalLM(tiny_config())  # type: ignore[no-untyped-call]


def tiny_qwen2(seed: int) -> Qwen2ForCausalLM:
    """Build a Qwen2 in fp32, with tied embeddings and with biases that are not zero."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Qwen2ForCausalLM(Qwen2Config(**SIZES, tie_word_embeddings=True))
        for name, parameter in model.named_parameters():
            if name.endswith(".bias"):
                nn.init.normal_(parameter, std=SIZES["initializer_range"])
        return model


def tiny_model(family: Family, seed: int) -> Any:
    """Build the model of a family in fp32 from a seed."""
    return tiny_llama(seed) if family == "llama" else tiny_qwen2(seed)


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


def save_tiny_model(directory: Path, seed: int, family: Family = "llama") -> Path:
    """Write the model and its tokenizer as a checkpoint directory."""
    tiny_model(family, seed).save_pretrained(directory)
    tiny_tokenizer().save_pretrained(directory)
    return directory


def save_tiny_models(root: Path, family: Family = "llama") -> TinyModels:
    """Write checkpoints A and B under one directory."""
    return TinyModels(
        a=save_tiny_model(root / "model-a", SEED_A, family),
        b=save_tiny_model(root / "model-b", SEED_B, family),
    )


@torch.no_grad()
def greedy(model: Any, input_ids: list[int], max_new_tokens: int) -> list[int]:
    """Continue a prompt greedily, end-of-sequence tokens being tokens like any other."""
    tokens = list(input_ids)
    for _ in range(max_new_tokens):
        logits = model(input_ids=torch.tensor([tokens]), use_cache=False).logits
        tokens.append(int(logits[0, -1].argmax()))
    return tokens[len(input_ids) :]


def shortfall(model: Any, input_ids: list[int], output: list[int]) -> float:
    """Say how far below the best logit the model holds the worst of the given tokens.

    0 means that every token is the model's own greedy choice, given those before it.
    """
    return worst_shortfall(model, [(input_ids, output)])


@torch.no_grad()
def worst_shortfall(model: Any, given: Iterable[tuple[list[int], list[int]]]) -> float:
    """The largest :func:`shortfall` of several outputs; those of one length go in one pass."""
    by_length: dict[int, list[tuple[list[int], list[int]]]] = defaultdict(list)
    for input_ids, output in given:
        by_length[len(input_ids) + len(output)].append((input_ids, output))
    worst = [torch.zeros(())]
    for alike in by_length.values():
        tokens = torch.tensor([input_ids + output for input_ids, output in alike])
        logits = model(input_ids=tokens, use_cache=False).logits[:, :-1].float()
        chosen = logits.gather(2, tokens[:, 1:, None]).squeeze(2)
        below = logits.amax(2) - chosen
        rows = zip(below, alike, strict=True)
        worst += [row[len(input_ids) - 1 :].max() for row, (input_ids, _) in rows]
    return float(torch.stack(worst).max())
