"""A scheme's life with the collectors that it is handed to, in one process."""

from __future__ import annotations

import multiprocessing
import pickle
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from tensordict import TensorDict
from torch import nn
from torchrl import logger as torchrl_logger
from torchrl.collectors import Collector, MultiAsyncCollector, MultiSyncCollector
from torchrl.weight_update import WeightStrategy
from transformers import LlamaForCausalLM

from tests.collectors import worlds
from tests.integration import kit
from tests.integration.kit import INIT, LEAVE, PAUSE, UPDATE
from weight_update import ConfigurationError, SGLangWeightSyncScheme
from weight_update.reference_engine import ReferenceEngine

KEY = "a-key-that-nobody-may-read"


@pytest.fixture
def scheme(engine: ReferenceEngine) -> Iterator[SGLangWeightSyncScheme]:
    """A scheme with a training model."""
    made = SGLangWeightSyncScheme(engine.url, timeout=60.0)
    made.register_model(kit.llama(1))
    yield made
    made.shutdown()


def collect(scheme: Any, policy: Any = None, **options: Any) -> Any:
    schemes = {"policy": scheme, **options.pop("more", {})}
    return Collector(
        worlds.Idle(),
        worlds.client() if policy is None else policy,
        frames_per_batch=4,
        total_frames=400,
        track_policy_version=True,
        weight_sync_schemes=schemes,
        trust_policy=True,
        **options,
    )


class Quiet(LlamaForCausalLM):
    """A model that a collector takes for its policy."""

    def forward(self, sample: Any) -> Any:
        return sample.set("action", torch.zeros(1))


def quiet(seed: int) -> Quiet:
    model = Quiet(kit.llama(seed).config)
    model.load_state_dict(kit.llama(seed).state_dict())
    return model


# ---- life and death


def test_a_collectors_shutdown_leaves_the_group(
    engine: ReferenceEngine, scheme: SGLangWeightSyncScheme
) -> None:
    log = kit.Log(engine)
    collector = collect(scheme)
    collector.update_policy_weights_()
    collector.shutdown()
    assert [record["status"] for record in log.records(engine, LEAVE)] == [200]
    assert not scheme.sender_transports[0].check_connection()
    collector.shutdown()
    scheme.shutdown()


def test_a_collector_that_is_dropped_leaves_the_group(
    engine: ReferenceEngine, scheme: SGLangWeightSyncScheme
) -> None:
    log = kit.Log(engine)
    collector = collect(scheme)
    del collector
    assert log.count(engine, INIT) == log.count(engine, LEAVE) == 1


def test_a_scheme_goes_on_with_another_collector(
    engine: ReferenceEngine, scheme: SGLangWeightSyncScheme
) -> None:
    first = collect(scheme)
    first.update_policy_weights_()
    first.shutdown()
    second = collect(scheme)
    second.update_policy_weights_()
    assert scheme.context is second
    assert int(second.policy_version) == 1
    assert kit.served(engine) == kit.tokens_of(1)
    second.shutdown()


def test_another_collectors_own_policy_is_sent_then(engine: ReferenceEngine) -> None:
    scheme = SGLangWeightSyncScheme(engine.url, timeout=60.0)
    for seed in (0, 1):
        collector = collect(scheme, quiet(seed))
        collector.update_policy_weights_()
        assert kit.served(engine) == kit.tokens_of(seed)
        collector.shutdown()


def test_an_update_after_the_schemes_end_is_an_error(scheme: SGLangWeightSyncScheme) -> None:
    collector = collect(scheme)
    scheme.shutdown()
    with pytest.raises(RuntimeError, match=r"Must be initialized on sender.*scheme of its own"):
        collector.update_policy_weights_()
    assert int(collector.policy_version) == 0
    collector.shutdown()


def test_a_second_connect_is_an_error(scheme: SGLangWeightSyncScheme) -> None:
    collector = collect(scheme)
    with pytest.raises(RuntimeError, match=r"sender twice: the scheme drives Collector already"):
        scheme.connect()
    collector.update_policy_weights_()
    collector.shutdown()


def test_a_second_collector_that_was_handed_the_same_scheme_cannot_update(
    engine: ReferenceEngine, scheme: SGLangWeightSyncScheme
) -> None:
    first, second = collect(scheme), collect(scheme)
    log = kit.Log(engine)
    with pytest.raises(ConfigurationError, match="drives another Collector already"):
        second.update_policy_weights_()
    assert log.count(engine, PAUSE) == 0
    second.shutdown()
    first.update_policy_weights_()
    assert int(first.policy_version) == 1
    first.shutdown()


def test_a_collector_that_outlives_the_program_starts_no_thread(
    scheme: SGLangWeightSyncScheme, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The interpreter would wait for it for ever."""
    collector = collect(scheme)
    with monkeypatch.context() as patch:
        patch.setattr("sys.is_finalizing", lambda: True)
        collector.shutdown()
    assert scheme.initialized_on_sender


def test_a_collector_is_still_what_it_was(scheme: SGLangWeightSyncScheme) -> None:
    collector = collect(scheme)
    assert isinstance(collector, Collector)
    assert type(collector).__name__ == "Collector"
    collector.shutdown()


# ---- what is sent


def test_the_model_is_the_training_model_whole(scheme: SGLangWeightSyncScheme) -> None:
    """RayCollector extracts ``scheme.model`` by ``scheme.strategy_str`` and sends that."""
    model = kit.llama(1)
    assert scheme.model is model
    for strategy in ("tensordict", "state_dict"):
        extracted = WeightStrategy(extract_as=strategy).extract_weights(model)
        assert scheme.prepare_weights(extracted, "policy", None) is model


def test_some_weights_of_the_training_model_are_sent_as_they_are(
    scheme: SGLangWeightSyncScheme,
) -> None:
    some = {"lm_head.weight": kit.llama(1).lm_head.weight}
    assert scheme.prepare_weights(some, "policy", None) is some


def test_other_values_under_the_same_names_are_sent_as_they_are(
    scheme: SGLangWeightSyncScheme,
) -> None:
    other = dict(kit.llama(0).state_dict())
    assert scheme.prepare_weights(other, "policy", None) is other


@pytest.mark.parametrize("nothing", [{}, TensorDict({})], ids=["dict", "TensorDict"])
def test_what_was_extracted_of_a_client_is_no_weights(
    nothing: Any, scheme: SGLangWeightSyncScheme
) -> None:
    assert scheme.prepare_weights(nothing, "policy", None) is kit.llama(1)


def test_there_is_no_model_without_one(engine: ReferenceEngine) -> None:
    assert SGLangWeightSyncScheme(engine.url).model is None


def test_words_name_a_model_of_the_collector(engine: ReferenceEngine) -> None:
    collector = collect(SGLangWeightSyncScheme(engine.url, timeout=60.0), quiet(1))
    kit.push(engine, kit.llama(0))
    collector.update_policy_weights_("policy")
    assert kit.served(engine) == kit.tokens_of(1)
    with pytest.raises(ConfigurationError, match="no model with parameters under 'polcy'"):
        collector.update_policy_weights_("polcy")
    assert int(collector.policy_version) == 1
    collector.shutdown()


def test_weights_for_each_worker_are_refused_before_a_pause(
    engine: ReferenceEngine, scheme: SGLangWeightSyncScheme
) -> None:
    log = kit.Log(engine)
    collector = collect(scheme)
    with pytest.raises(ConfigurationError, match="weights for each worker"):
        collector.update_policy_weights_({0: {"a": torch.zeros(1)}, 1: {"a": torch.ones(1)}})
    assert log.count(engine, PAUSE) == 0
    collector.shutdown()


# ---- several models


def test_a_scheme_a_model_and_one_call_counts_once(
    engine: ReferenceEngine, scheme: SGLangWeightSyncScheme
) -> None:
    other = SGLangWeightSyncScheme(engine.url, timeout=60.0)
    log = kit.Log(engine)
    collector = collect(scheme, more={"reward": other})
    models = {"policy": kit.llama(0), "reward": kit.llama(1)}
    collector.update_policy_weights_(weights_dict=models)
    assert int(collector.policy_version) == 1
    assert log.count(engine, UPDATE) >= 2
    assert kit.served(engine) == kit.tokens_of(1)
    collector.shutdown()
    assert log.count(engine, LEAVE) == 2


def test_the_model_of_another_name_is_not_the_policy(engine: ReferenceEngine) -> None:
    other = SGLangWeightSyncScheme(engine.url, timeout=60.0)
    collector = collect(SGLangWeightSyncScheme(engine.url), quiet(0), more={"reward": other})
    with pytest.raises(ConfigurationError, match="no weights to send: 'reward'"):
        collector.update_policy_weights_(model_id="reward")
    collector.shutdown()


# ---- policies that workers would get as stand-ins


class Buffered(nn.Module):
    """A policy without parameters that has a table."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.ones(1))


@pytest.mark.parametrize("kind", [MultiSyncCollector, MultiAsyncCollector])
@pytest.mark.parametrize("policy", [worlds.layer, Buffered])
def test_a_stand_in_on_the_meta_device_is_refused(
    kind: Any, policy: Any, engine: ReferenceEngine, scheme: SGLangWeightSyncScheme
) -> None:
    log = kit.Log(engine)
    others = set(multiprocessing.active_children())
    with pytest.raises(ConfigurationError, match=r"meta device.*policy_factory="):
        kind(
            [worlds.Idle] * 2,
            policy(),
            frames_per_batch=8,
            total_frames=80,
            weight_sync_schemes={"policy": scheme},
        )
    assert set(multiprocessing.active_children()) <= others
    assert log.count(engine, INIT) == 0
    assert not scheme.initialized_on_sender


# ---- in a worker


class Broken:
    """A collector whose tracker is broken."""

    def increment_version(self) -> None:
        raise KeyError("no tracker")


def test_what_a_worker_cannot_count_is_told_in_its_words(scheme: SGLangWeightSyncScheme) -> None:
    worker = pickle.loads(pickle.dumps(scheme))
    collector = Broken()
    worker.init_on_receiver(model_id="policy", context=collector, worker_idx=0)
    told = worker.count(3)
    assert told == ["Broken.increment_version() failed (KeyError: 'no tracker') at version 3"]


def test_a_worker_whose_collector_is_not_there_tells_so(scheme: SGLangWeightSyncScheme) -> None:
    worker = pickle.loads(pickle.dumps(scheme))
    worker.init_on_receiver(model_id="policy", worker_idx=0, model=worlds.client())
    worker.connect(worker_idx=0)
    assert worker.count(1) == ["its collector is gone"]


def test_a_worker_whose_policy_has_weights_says_that_they_stay(
    scheme: SGLangWeightSyncScheme, caplog: pytest.LogCaptureFixture, monkeypatch: Any
) -> None:
    monkeypatch.setattr(torchrl_logger, "propagate", True)
    worker = pickle.loads(pickle.dumps(scheme))
    worker.init_on_receiver(model_id="policy", worker_idx=0, model=worlds.layer())
    assert "has weights of its own, which are never updated" in caplog.text


# ---- as configuration


def test_a_scheme_with_workers_is_pickled_without_what_it_holds(engine: ReferenceEngine) -> None:
    """And is not shown with its key."""
    scheme = SGLangWeightSyncScheme(engine.url, timeout=60.0, api_key=KEY)
    twins = Twins()
    scheme.init_on_sender(model_id="policy", context=twins, ctx=multiprocessing)
    twin = pickle.loads(pickle.dumps(scheme))
    assert twin.options == scheme.options
    assert not twin.initialized_on_sender
    assert not twin.sender_transports
    assert KEY not in repr(twin) + repr(vars(twin))
    scheme.shutdown()


class Twins:
    """A collector with workers, as far as a scheme looks at it before they start."""

    num_workers = 2
    policy = None
