"""A fleet whose adapter is replaced: what each server is left with, whatever happens."""

from __future__ import annotations

import gc
import subprocess
import sys
import time
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from peft import get_peft_model_state_dict

from tests import warm
from weight_update import EngineState, SGLangWeightSender, SGLangWeightSyncScheme
from weight_update.engines.lora import AdapterCourier
from weight_update.errors import ConfigurationError, EngineRejected
from weight_update.ports import free_port

from .adapter_server import LOAD, UNLOAD, AdapterServer, policy
from .kit import llama

Servers = tuple[AdapterServer, AdapterServer]


@pytest.fixture
def servers() -> Iterator[Servers]:
    with AdapterServer() as one, AdapterServer() as other:
        yield one, other


@pytest.fixture
def sender(servers: Servers) -> Iterator[SGLangWeightSender]:
    urls = [server.url for server in servers]
    scheme = SGLangWeightSyncScheme(urls, lora="adapter", lora_name="actor", timeout=20)
    with scheme.create_sender() as made:
        yield made


def holds(server: AdapterServer, model: Any, name: str = "actor") -> bool:
    sent = get_peft_model_state_dict(model, save_embedding_layers=False)
    held = server.adapters[name]
    return held.keys() == sent.keys() and all(torch.equal(held[n], sent[n]) for n in sent)


def test_every_server_gets_the_adapter_under_the_name_and_the_label(
    servers: Servers, sender: SGLangWeightSender
) -> None:
    for seed in (1, 2):
        model = policy(seed)

        report = sender.update_weights(model)

        assert report.verification == "checksum"
        assert report.buckets == 1
        for server in servers:
            assert list(server.adapters) == ["actor"]
            assert holds(server, model)
            assert (server.label, server.paused) == (str(report.version), False)


def test_the_swap_happens_while_paused_and_no_group_is_made(
    servers: Servers, sender: SGLangWeightSender
) -> None:
    sender.update_weights(policy(1))
    servers[0].asked.clear()

    sender.update_weights(policy(2))

    calls = [path for path in servers[0].asked if not path.endswith("_checker")]
    assert calls == [
        *("/pause_generation", UNLOAD, LOAD, "/update_weight_version", "/continue_generation"),
    ]


def test_a_refusal_before_the_swap_leaves_every_server_running(
    servers: Servers, sender: SGLangWeightSender
) -> None:
    kept = policy(1)
    sender.update_weights(kept)
    servers[1].refuses.add("actor.trial")

    with pytest.raises(EngineRejected) as caught:
        sender.update_weights(policy(2, lora_alpha=16))

    states = caught.value.report.engines
    assert states[servers[1].url].state is EngineState.OLD
    assert holds(servers[1], kept)
    assert not servers[1].paused
    assert servers[1].label == "1"


def test_a_swap_that_fails_halfway_is_held_and_healed_by_the_next_push(
    servers: Servers, sender: SGLangWeightSender
) -> None:
    sender.update_weights(policy(1))
    servers[0].refuses.add("actor")
    with pytest.raises(EngineRejected) as caught:
        sender.update_weights(policy(2))
    held = caught.value.report.engines[servers[0].url]
    assert (held.state, held.paused) == (EngineState.MIXED, True)
    servers[0].refuses.clear()
    model = policy(3)

    sender.update_weights(model)

    assert all(holds(server, model) and not server.paused for server in servers)


def test_a_background_push_sends_the_adapter_as_it_was(
    servers: Servers, sender: SGLangWeightSender
) -> None:
    model, same = policy(1), policy(1)
    sender.register_model(model)

    pending = sender.update_weights_async()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1.0)
    pending.result(20)

    assert holds(servers[0], same)


def test_a_model_without_adapters_is_refused_before_anything_is_asked(
    servers: Servers, sender: SGLangWeightSender
) -> None:
    with pytest.raises(ConfigurationError, match="has no LoRA adapter"):
        sender.update_weights(llama(0))
    with pytest.raises(ConfigurationError, match="takes a model with PEFT adapters"):
        sender.update_weights({"a": torch.zeros(1)})
    assert servers[0].asked == []


def test_retracted_requests_would_keep_the_old_adapter(servers: Servers) -> None:
    scheme = SGLangWeightSyncScheme(servers[0].url, lora="adapter", pause_mode="retract")
    with (
        scheme.create_sender() as sender,
        pytest.raises(ConfigurationError, match="use 'abort'"),
    ):
        sender.update_weights(policy(1))
    assert not servers[0].paused


def test_rank_and_modules_may_change_from_push_to_push(
    servers: Servers, sender: SGLangWeightSender
) -> None:
    for more in ({"r": 4}, {"r": 8}, {"r": 2, "target_modules": ["q_proj", "o_proj"]}):
        model = policy(1, **more)

        report = sender.update_weights(model)

        assert report.verification == "checksum"
        assert all(holds(server, model) for server in servers)


def test_no_copy_of_an_adapter_outlives_its_push(
    servers: Servers, sender: SGLangWeightSender, monkeypatch: pytest.MonkeyPatch
) -> None:
    packed, pack = [], AdapterCourier.pack

    def noted(courier: AdapterCourier, tensors: Any) -> None:
        packed.extend(weakref.ref(tensor) for tensor in tensors.values())
        pack(courier, tensors)

    monkeypatch.setattr(AdapterCourier, "pack", noted)

    sender.update_weights(policy(1))

    assert packed
    limit = time.monotonic() + 20  # a thread may still be ending
    while any(ref() is not None for ref in packed):
        assert time.monotonic() < limit
        time.sleep(0.02)
        gc.collect()


def test_the_ranks_of_a_sharded_trainer_push_it_together(servers: Servers) -> None:
    port = free_port()
    urls = [server.url for server in servers]
    command = [sys.executable, "-m", "tests.integration.sharded_policy"]
    ranks = [
        warm.start([*command, str(rank), "2", str(port), "5", *urls], stdout=subprocess.PIPE)
        for rank in range(2)
    ]
    told = [rank.communicate(timeout=240)[0].decode().strip() for rank in ranks]

    assert told == [str([(1, "checksum"), (2, "checksum")])] * 2
    assert all(holds(server, policy(5), "policy") and not server.paused for server in servers)
