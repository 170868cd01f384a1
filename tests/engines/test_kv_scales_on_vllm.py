"""Scales of a KV cache on a real vLLM without an fp8 cache: refused before anything is paused."""

from __future__ import annotations

from typing import Any

import pytest

from weight_update import WeightMismatchError
from weight_update.synchronizers import (
    StaticCluster,
    TorchPolicy,
    VLLMGeneration,
    create_weight_synchronizer,
)

from .models import SEED_B, greedy
from .vllm_server import VLLMServer, vllm_llama

PROMPT = [3, 14, 15, 92, 65]
TOKENS = 24
CLUSTERS: dict[str, Any] = {
    "train_cluster": StaticCluster(1),
    "inference_cluster": StaticCluster(1),
}


@pytest.mark.parametrize(("colocated", "clusters"), [(True, {}), (False, CLUSTERS)])
def test_scales_that_the_engine_has_no_place_for_are_refused_and_it_serves_on(
    vllm: VLLMServer, colocated: bool, clusters: dict[str, Any]
) -> None:
    model: Any = vllm_llama(SEED_B)
    made = create_weight_synchronizer(
        TorchPolicy(model), VLLMGeneration(vllm.url, timeout=60.0), "vllm", colocated, **clusters
    )
    try:
        with pytest.raises(WeightMismatchError, match=r"know 1 .*k_scale.*leave kv_scales out"):
            made.sync_weights(kv_scales={"model.layers.0.self_attn.k_scale": 0.5})
        assert not vllm.is_paused()
        assert vllm.generate(PROMPT, TOKENS) == greedy(vllm_llama(), PROMPT, TOKENS)
        made.sync_weights()
        assert vllm.generate(PROMPT, TOKENS) == greedy(model, PROMPT, TOKENS)
    finally:
        made.shutdown()
