"""An SGLang and a vLLM side by side: a reference engine and a fake that take one checkpoint."""

from __future__ import annotations

from functools import cache
from typing import Any

from transformers import LlamaConfig, LlamaForCausalLM

from tests.vllm_fake import FakeVLLM, checkpoint, signature
from weight_update import EngineState, SGLangWeightSyncScheme, VLLMWeightSyncScheme
from weight_update.reference_engine import ReferenceEngine
from weight_update.schemes.fleet import FleetWeightSyncScheme

from . import kit

BUCKET_BYTES = 2_000  # three buckets
PROMPT, TOKENS = [1, 2, 3], 8
TEXTS = {EngineState.OLD: signature(checkpoint(0)), EngineState.NEW: signature(checkpoint(1))}
SEEDS = {EngineState.OLD: 0, EngineState.NEW: 1}

Server = ReferenceEngine | FakeVLLM


@cache
def llama(seed: int) -> LlamaForCausalLM:
    """The model of a fake's checkpoint; shared, so tests must not change it."""
    config = LlamaConfig(
        vocab_size=16,
        hidden_size=8,
        intermediate_size=8,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        tie_word_embeddings=False,
        eos_token_id=None,
        bos_token_id=None,
    )
    model = LlamaForCausalLM(config)
    model.load_state_dict(checkpoint(seed))
    return model.eval()


@cache
def tokens_of(seed: int) -> list[int]:
    """What :func:`llama` generates."""
    return kit.greedy(llama(seed), PROMPT, TOKENS)


def serves(server: Server, state: EngineState) -> bool:
    """Whether a server generates with the weights of seed 0 (``old``) or 1 (``new``)."""
    if isinstance(server, FakeVLLM):
        return server.served() == TEXTS[state]
    return bool(server.generate(PROMPT, TOKENS)["output_ids"] == tokens_of(SEEDS[state]))


def label(server: Server) -> str:
    """The version that a server shows."""
    return server.label if isinstance(server, FakeVLLM) else kit.label(server)


def is_paused(server: Server) -> bool:
    """Whether a server holds new requests."""
    return server.paused if isinstance(server, FakeVLLM) else kit.is_paused(server)


def fleet_of(
    servers: list[Server],
    *,
    sglang: dict[str, Any] | None = None,
    vllm: dict[str, Any] | None = None,
    **shared: Any,
) -> FleetWeightSyncScheme:
    """A fleet of servers; ``sglang`` and ``vllm`` are for one kind alone."""
    shared = {"timeout": 60.0, "bucket_bytes": BUCKET_BYTES, **shared}
    theirs = [s.url for s in servers if isinstance(s, ReferenceEngine)]
    others = [s.url for s in servers if isinstance(s, FakeVLLM)]
    return FleetWeightSyncScheme(
        [
            SGLangWeightSyncScheme(theirs, **{**shared, **(sglang or {})}),
            VLLMWeightSyncScheme(others, **{**shared, **(vllm or {})}),
        ]
    )
