"""TorchRL's own collector drives the scheme: ``weight_sync_schemes={"policy": scheme}``."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from tensordict import TensorDict
from torch import nn
from torchrl.collectors import Collector

from tests.collectors.worlds import Idle, client, layer
from weight_update import (
    ConfigurationError,
    EngineRejected,
    SGLangWeightSyncScheme,
    WeightUpdateError,
)
from weight_update.reference_engine import Fault, ReferenceEngine

from . import kit
from .kit import INIT, LEAVE, PAUSE, UPDATE

Make = Callable[..., Any]


@pytest.fixture
def make_collector() -> Iterator[Make]:
    """A function that makes collectors, which are shut down afterwards."""
    made: list[Any] = []

    def make(scheme: SGLangWeightSyncScheme, policy: nn.Module | None = None) -> Any:
        made.append(
            Collector(
                Idle(),
                policy or client(),
                frames_per_batch=4,
                total_frames=400,
                weight_sync_schemes={"policy": scheme},
                track_policy_version=True,
            )
        )
        return made[-1]

    yield make
    for collector in made:
        collector.shutdown()


def make_scheme(engine: ReferenceEngine) -> SGLangWeightSyncScheme:
    return SGLangWeightSyncScheme(engine.url, timeout=60.0)


def version_of(collector: Any) -> int:
    return int(collector.policy_version)


def test_the_constructor_makes_the_group_and_sends_nothing(
    engine: ReferenceEngine, make_collector: Make
) -> None:
    log = kit.Log(engine)
    scheme = make_scheme(engine)
    scheme.register_model(kit.llama(1))
    collector = make_collector(scheme)
    assert log.count(engine, INIT) == 1
    assert log.count(engine, PAUSE) == log.count(engine, UPDATE) == 0
    assert version_of(collector) == 0


def test_an_update_pushes_the_registered_model_and_counts_once(
    engine: ReferenceEngine, make_collector: Make
) -> None:
    """C07: 0, 1, 2, and what is collected is stamped so."""
    kit.push(engine, kit.llama(0))
    scheme = make_scheme(engine)
    scheme.register_model(kit.llama(1))
    collector = make_collector(scheme)
    for expected in (1, 2):
        collector.update_policy_weights_()
        assert version_of(collector) == expected
    assert kit.served(engine) == kit.tokens_of(1)
    batch = next(iter(collector))
    assert set(batch["next", "policy_version"].flatten().tolist()) == {2}


def test_a_failed_update_is_raised_and_does_not_count(
    engine: ReferenceEngine, make_collector: Make
) -> None:
    """C07: and the next one heals."""
    kit.push(engine, kit.llama(0))
    scheme = make_scheme(engine)
    scheme.register_model(kit.llama(1))
    collector = make_collector(scheme)
    collector.update_policy_weights_()
    engine.inject(Fault(UPDATE, "refuse", times=1))
    with pytest.raises(EngineRejected, match="injected fault"):
        collector.update_policy_weights_()
    assert version_of(collector) == 1
    collector.update_policy_weights_()
    assert version_of(collector) == 2


def test_explicit_weights_win_over_the_registered_model(
    engine: ReferenceEngine, make_collector: Make
) -> None:
    scheme = make_scheme(engine)
    scheme.register_model(kit.llama(0))
    collector = make_collector(scheme)
    collector.update_policy_weights_(TensorDict(dict(kit.llama(1).state_dict())))
    assert kit.served(engine) == kit.tokens_of(1)


def test_a_policy_without_parameters_and_no_model_is_an_error_before_a_pause(
    engine: ReferenceEngine, make_collector: Make
) -> None:
    """C30: never a silent success."""
    log = kit.Log(engine)
    collector = make_collector(make_scheme(engine))
    with pytest.raises(ConfigurationError, match="register_model"):
        collector.update_policy_weights_()
    assert version_of(collector) == 0
    assert log.count(engine, PAUSE) == 0


@pytest.mark.parametrize("policy", [None, layer()], ids=["client", "with weights"])
def test_a_collected_model_is_an_error_and_not_the_policy(
    policy: nn.Module | None, engine: ReferenceEngine, make_collector: Make
) -> None:
    """C54: held weakly; and nothing else is sent in its place."""
    log = kit.Log(engine)
    scheme = make_scheme(engine)
    scheme.register_model(nn.Linear(1, 1))
    collector = make_collector(scheme, policy)
    with pytest.raises(WeightUpdateError, match="garbage-collected"):
        collector.update_policy_weights_()
    assert log.count(engine, PAUSE) == 0
    assert version_of(collector) == 0


def test_a_scheme_in_use_is_pickled_as_configuration(
    engine: ReferenceEngine, make_collector: Make
) -> None:
    """C78: collectors pickle schemes to their workers."""
    scheme = make_scheme(engine)
    scheme.register_model(kit.llama(1))
    make_collector(scheme).update_policy_weights_()
    twin = pickle.loads(pickle.dumps(scheme))
    assert twin.options == scheme.options
    assert not twin.sender_transports


def test_shutdown_leaves_the_group_and_may_be_repeated(engine: ReferenceEngine) -> None:
    scheme = make_scheme(engine)
    scheme.register_model(kit.llama(1))
    log = kit.Log(engine)
    collector = Collector(
        Idle(),
        client(),
        frames_per_batch=4,
        total_frames=4,
        weight_sync_schemes={"policy": scheme},
    )
    collector.update_policy_weights_()
    collector.shutdown()
    scheme.shutdown()
    scheme.shutdown()
    left = log.records(engine, LEAVE)
    assert [record["status"] for record in left] == [200]
