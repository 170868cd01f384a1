"""A real SGLang and a real vLLM behind one sender: one update, one version, one output."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from weight_update import (
    EngineState,
    SGLangWeightSyncScheme,
    VLLMWeightSyncScheme,
    WeightUpdateError,
)
from weight_update.errors import ConfigurationError
from weight_update.schemes.fleet import FleetWeightSyncScheme

from .conftest import require
from .models import greedy, shortfall
from .sglang_server import RELEASE, SGLangServer, engine_of
from .vllm_server import VLLMServer, vllm_llama

PROMPT, TOKENS = [3, 14, 15, 92, 65], 24
SEED_A, SEED_B, SEED_C = 1, 21, 22
BUCKET_BYTES = 200_000


@pytest.fixture(scope="module")
def sglang_of_vllms(
    vllm_server: VLLMServer, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[SGLangServer]:
    """An SGLang on the checkpoint of the session's vLLM, whose heads are wider than the others'."""
    require(engine_of(RELEASE))
    log_path = tmp_path_factory.mktemp("mixed") / "server.log"
    with SGLangServer(vllm_server.model_dir, log_path) as server:
        yield server


@pytest.fixture
def pair(sglang_of_vllms: SGLangServer, vllm: VLLMServer) -> tuple[SGLangServer, VLLMServer]:
    """Both on the weights that they started with."""
    sglang_of_vllms.load(sglang_of_vllms.model_dir)
    return sglang_of_vllms, vllm


def fleet_of(pair: tuple[SGLangServer, VLLMServer], **options: Any) -> FleetWeightSyncScheme:
    options = {"timeout": 60.0, **options}
    sglang, vllm = pair
    return FleetWeightSyncScheme(
        [
            SGLangWeightSyncScheme(sglang.url, **options),
            VLLMWeightSyncScheme(vllm.url, **options),
        ]
    )


def outputs(pair: tuple[SGLangServer, VLLMServer]) -> list[list[int]]:
    return [server.generate(PROMPT, TOKENS) for server in pair]


@pytest.mark.parametrize(
    "options",
    [{"bucket_bytes": BUCKET_BYTES}, {"load_format": "tensors"}],
    ids=["several packed buckets", "one broadcast a tensor"],
)
def test_both_generate_as_the_trainer_does_under_one_version(
    options: dict[str, Any], pair: tuple[SGLangServer, VLLMServer]
) -> None:
    assert outputs(pair) == [greedy(vllm_llama(SEED_A), PROMPT, TOKENS)] * 2

    with fleet_of(pair, **options).create_sender() as sender:
        for seed in (SEED_B, SEED_C):
            report = sender.update_weights(vllm_llama(seed))

            assert outputs(pair) == [greedy(vllm_llama(seed), PROMPT, TOKENS)] * 2
            assert {o.state for o in report.engines.values()} == {EngineState.NEW}
            assert [server.label() for server in pair] == [str(report.version)] * 2
            assert report.route is not None
            assert report.route.backend == "gloo"
            assert report.verification == "unverified"  # vLLM proves nothing
            assert report.engines[pair[0].url].verified != "unverified"


def test_a_rehearsal_changes_nothing_of_either(pair: tuple[SGLangServer, VLLMServer]) -> None:
    with fleet_of(pair).create_sender() as sender:
        sender.update_weights(vllm_llama(SEED_B))
        transport = sender._transport
        assert transport.rehearse(transport.plan({transport.harmless_name: torch.ones(1)}))

    assert outputs(pair) == [greedy(vllm_llama(SEED_B), PROMPT, TOKENS)] * 2


def test_an_adapter_is_merged_for_both(pair: tuple[SGLangServer, VLLMServer]) -> None:
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    torch.manual_seed(7)
    model = peft.get_peft_model(vllm_llama(SEED_B), config)

    with fleet_of(pair).create_sender() as sender:
        sender.update_weights(model)

    merged = model.merge_and_unload().eval()
    for tokens in outputs(pair):
        assert shortfall(merged, PROMPT, tokens) <= 1e-3
        assert shortfall(vllm_llama(SEED_B), PROMPT, tokens) > 1e-2


def test_what_one_kind_cannot_take_is_sent_to_neither(
    pair: tuple[SGLangServer, VLLMServer],
) -> None:
    """SGLang takes parts of a fused layer; vLLM would make garbage of them."""
    lacking = "model.layers.0.self_attn.k_proj.weight"
    some = {
        name: value
        for name, value in vllm_llama(SEED_B).state_dict().items()
        if ".layers.0.self_attn." in name and name != lacking
    }

    with fleet_of(pair).create_sender() as sender:
        sender.update_weights(vllm_llama(SEED_A))
        with pytest.raises(ConfigurationError, match="k_proj"):
            sender.update_weights(some)

    assert outputs(pair) == [greedy(vllm_llama(SEED_A), PROMPT, TOKENS)] * 2


def test_what_vllm_refuses_leaves_nobody_with_half_a_model(
    pair: tuple[SGLangServer, VLLMServer],
) -> None:
    sglang, vllm = pair
    weights = list(vllm_llama(SEED_B).state_dict().items())
    weights.insert(len(weights) // 2, ("model.layers.9.x.weight", torch.ones(2)))
    with fleet_of(pair, bucket_bytes=BUCKET_BYTES, verify="off").create_sender() as sender:
        sender.update_weights(vllm_llama(SEED_A))
        with pytest.raises(WeightUpdateError) as caught:
            sender.update_weights(dict(weights))
        assert caught.value.engine == vllm.url
        assert vllm.is_paused()
        assert sender.engines[sglang.url].held

        sender.update_weights(vllm_llama(SEED_C))

    assert outputs(pair) == [greedy(vllm_llama(SEED_C), PROMPT, TOKENS)] * 2
