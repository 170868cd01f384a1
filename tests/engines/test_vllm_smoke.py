"""A real vLLM starts here, computes what transformers computes, and can be controlled."""

from __future__ import annotations

import pytest

from .models import greedy
from .vllm_server import VLLMServer, vllm_llama

PROMPTS = ([7], [5, 6, 7, 8], [200, 3, 77, 150, 9, 41, 18, 255])
NEW_TOKENS = 24


@pytest.mark.parametrize("prompt", PROMPTS, ids=lambda prompt: f"{len(prompt)}-tokens")
def test_greedy_output_equals_transformers(vllm: VLLMServer, prompt: list[int]) -> None:
    assert vllm.generate(prompt, NEW_TOKENS) == greedy(vllm_llama(), prompt, NEW_TOKENS)


def test_one_worker_joins_a_weight_transfer(vllm: VLLMServer) -> None:
    assert vllm.get("get_world_size?include_dp=true") == {"world_size": 1}


def test_it_pauses_and_resumes_and_serves_on(vllm: VLLMServer) -> None:
    prompt = [3, 14, 15, 92]

    assert vllm.post("pause?mode=keep", {}) == {"status": "paused"}
    assert vllm.get("is_paused") == {"is_paused": True}
    assert vllm.post("resume", {}) == {"status": "resumed"}

    assert vllm.get("is_paused") == {"is_paused": False}
    assert vllm.generate(prompt, NEW_TOKENS) == greedy(vllm_llama(), prompt, NEW_TOKENS)


def test_the_label_of_the_weights_can_be_written(vllm: VLLMServer) -> None:
    assert vllm.get("weight_info") == {"weight_version": "default"}
    vllm.post("update_weight_version", {"new_version": "7"})
    assert vllm.get("weight_info") == {"weight_version": "7"}


def test_the_prefix_cache_can_be_reset(vllm: VLLMServer) -> None:
    assert vllm.post("reset_prefix_cache", {}) == {"success": True}
