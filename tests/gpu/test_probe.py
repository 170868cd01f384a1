"""One GPU for trainer and engine: NCCL refuses, which the tiny transfer finds out.

Run it where a GPU is: ``pytest tests/gpu/test_probe.py``. Elsewhere it is skipped.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from weight_update import SGLangWeightSyncScheme, WeightUpdateError
from weight_update.reference_engine import ReferenceEngine

pytestmark = pytest.mark.skipif(torch.cuda.device_count() < 1, reason="needs a GPU")

PROMPT = [3, 14, 15]
TOKENS = 7


def tiny(seed: int) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        initializer_range=0.2,
    )
    return LlamaForCausalLM(config).eval()


def greedy(model: Any) -> list[int]:
    prompt = torch.tensor([PROMPT], device=model.device)
    tokens = model.generate(prompt, max_new_tokens=TOKENS, do_sample=False, eos_token_id=None)
    return [int(token) for token in tokens[0, len(PROMPT) :]][:TOKENS]


@pytest.fixture
def engine() -> Iterator[ReferenceEngine]:
    with ReferenceEngine(tiny(0), device="cuda:0") as engine:
        yield engine


def generated(engine: ReferenceEngine) -> list[int]:
    return list(engine.generate(PROMPT, TOKENS, ignore_eos=True)["output_ids"])[:TOKENS]


def pushed(engine: ReferenceEngine, model: Any, **settings: Any) -> list[Any]:
    """Reports of two updates."""
    scheme = SGLangWeightSyncScheme(engine.url, timeout=60, **settings)
    with scheme.create_sender() as sender:
        return [sender.update_weights(model) for _ in range(2)]


def test_the_engine_on_the_trainers_own_gpu_is_reached_over_ipc(engine: ReferenceEngine) -> None:
    settings, model = dict(os.environ), tiny(1).cuda()

    reports = pushed(engine, model)

    print(*reports, sep="\n")
    assert generated(engine) == greedy(model)
    for report in reports:
        assert report.route.way == "ipc"
        assert any("NCCL refuses" in reason for reason in report.route.reasons)
        assert report.warnings == ()
    assert dict(os.environ) == settings


def test_a_broadcast_that_was_asked_for_goes_through_the_hosts_memory(
    engine: ReferenceEngine,
) -> None:
    model = tiny(1).cuda()

    reports = pushed(engine, model, transport="broadcast")

    print(*reports, sep="\n")
    assert generated(engine) == greedy(model)
    for report in reports:
        assert (report.route.way, report.route.backend) == ("broadcast", "gloo")
        assert any("many times slower" in warning for warning in report.warnings)


def test_who_asks_for_nccl_gets_its_words_and_the_engine_goes_on(engine: ReferenceEngine) -> None:
    with pytest.raises(WeightUpdateError, match="CUDA_VISIBLE_DEVICES") as caught:
        pushed(engine, tiny(1).cuda(), backend="nccl")

    print(caught.value)
    assert "Duplicate GPU" in str(caught.value)
    assert generated(engine) == greedy(tiny(0).cuda())
