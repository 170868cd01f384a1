"""One adapter is replaced on a real vLLM, through a folder, and requests keep their own."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from weight_update import EngineState, VLLMWeightSender, VLLMWeightSyncScheme
from weight_update.errors import EngineRejected, WeightUpdateError

from .lora_server import adapted
from .models import greedy
from .vllm_server import MODEL, VLLMServer, completion, vllm_llama

PROMPT = [3, 14, 15, 92, 65]
TOKENS = 24
LONG = 400


@pytest.fixture
def server(vllm: VLLMServer) -> VLLMServer:
    return vllm


@pytest.fixture(params=["abort", "retract"])
def sender(request: Any, server: VLLMServer, tmp_path: Path) -> Iterator[VLLMWeightSender]:
    scheme = VLLMWeightSyncScheme(
        server.url,
        lora="adapter",
        adapter_directory=tmp_path,
        pause_mode=request.param,
        timeout=60,
    )
    with scheme.create_sender() as made:
        yield made


def policy(seed: int, **more: Any) -> Any:
    return adapted(vllm_llama(), seed, **more)


def asked(server: VLLMServer, count: int, model: str) -> list[int]:
    (choice,) = server.post("v1/completions", completion(PROMPT, count, model=model))["choices"]
    return list(choice["token_ids"])


def serves(server: VLLMServer, model: Any, name: str = "policy") -> bool:
    return asked(server, TOKENS, name) == greedy(model, PROMPT, TOKENS)


def test_each_push_is_what_requests_for_the_adapter_get(
    server: VLLMServer, sender: VLLMWeightSender
) -> None:
    for seed in (1, 2, 3):
        model = policy(seed)

        report = sender.update_weights(model)

        assert report.verification == "unverified"
        assert serves(server, model)
        assert serves(server, vllm_llama(), MODEL)
        assert server.get("weight_info") == {"weight_version": str(report.version)}


@pytest.mark.parametrize("sender", ["retract"], indirect=True)
def test_a_request_in_flight_ends_on_the_adapter_that_it_began_with(
    server: VLLMServer, sender: VLLMWeightSender
) -> None:
    old, new = policy(1), policy(2)
    sender.update_weights(old)
    with ThreadPoolExecutor() as pool:
        running = pool.submit(asked, server, LONG, "policy")
        sender.update_weights(new)
        output = running.result(120)

    assert len(output) == LONG
    assert serves(server, new)


@pytest.mark.parametrize("sender", ["abort"], indirect=True)
def test_an_adapter_that_the_server_refuses_leaves_the_one_before(
    server: VLLMServer, sender: VLLMWeightSender
) -> None:
    kept = policy(1)
    sender.update_weights(kept)
    with pytest.raises(EngineRejected, match="DoRA") as caught:
        sender.update_weights(policy(2, use_dora=True))

    assert caught.value.report.engines[server.url].state is EngineState.OLD
    assert serves(server, kept)


@pytest.mark.parametrize("sender", ["abort"], indirect=True)
@pytest.mark.parametrize(
    "more",
    [{"use_rslora": True}, {"rank_pattern": {"q_proj": 2}, "alpha_pattern": {"v_proj": 3}}],
    ids=["rsLoRA", "patterns"],
)
def test_scales_of_a_layer_and_of_rslora_are_served(
    server: VLLMServer, sender: VLLMWeightSender, more: dict[str, Any]
) -> None:
    model = policy(4, **more)

    sender.update_weights(model)

    assert serves(server, model)


@pytest.mark.parametrize("sender", ["abort"], indirect=True)
def test_the_rank_may_change_from_push_to_push(
    server: VLLMServer, sender: VLLMWeightSender
) -> None:
    for rank in (4, 8, 2):
        model = policy(rank, r=rank)

        sender.update_weights(model)

        assert serves(server, model)


@pytest.mark.parametrize("sender", ["abort"], indirect=True)
def test_a_proof_that_vllm_cannot_give_is_refused(
    server: VLLMServer, sender: VLLMWeightSender, tmp_path: Path
) -> None:
    scheme = VLLMWeightSyncScheme(
        server.url, lora="adapter", adapter_directory=tmp_path, verify="checksum"
    )
    with scheme.create_sender() as strict, pytest.raises(WeightUpdateError) as caught:
        strict.update_weights(policy(1))

    assert caught.value.report.engines[server.url].state is EngineState.OLD
