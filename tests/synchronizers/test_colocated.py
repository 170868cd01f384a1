"""SGLang on the trainer's own devices, with our facades: shared memory, two engines, and faults."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import nn

from tests.integration import kit
from tests.integration.kit import BEGIN, CONTINUE, END, PAUSE
from weight_update import ConfigurationError, EngineState, WeightUpdateError
from weight_update.reference_engine import Fault, ReferenceEngine
from weight_update.synchronizers import SGLangGeneration, TorchPolicy, create_weight_synchronizer

OPEN = "/update_weights_from_tensor"
RELEASE, RESUME = "/release_memory_occupation", "/resume_memory_occupation"
NEW, MIXED, OLD = EngineState.NEW, EngineState.MIXED, EngineState.OLD
GONE = EngineState.UNREACHABLE
SMALL = 20_000 / 2**30


class NotingPolicy(TorchPolicy):
    """Notes when its phases come, and that no weight is read before it has made room.

    Args:
        model: The model.
        journal: Where it notes them.
    """

    def __init__(self, model: nn.Module, journal: list[str]) -> None:
        super().__init__(model, torch.optim.AdamW(model.parameters()))
        self._journal = journal

    def offload_before_refit(self) -> None:
        self._journal.append("offload")
        super().offload_before_refit()

    def offload_after_refit(self) -> None:
        self._journal.append("restore")
        super().offload_after_refit()

    def source(self) -> Any:
        self._journal.append("read")
        return super().source()


@contextmanager
def synchronizer(
    engines: list[ReferenceEngine], policy: Any, gigabytes: float | None = None, **options: Any
) -> Iterator[Any]:
    """What the factory makes of a trainer and SGLang servers that share their devices."""
    policy = policy if isinstance(policy, TorchPolicy) else TorchPolicy(policy)
    made = create_weight_synchronizer(
        policy,
        SGLangGeneration([engine.url for engine in engines], **options),
        "sglang",
        colocated=True,
        refit_buffer_size_gb=gigabytes,
        refit_timeout_s=60.0,
    )
    made.init_communicator()
    yield made
    made.shutdown()


def states(error: WeightUpdateError) -> list[EngineState]:
    assert error.report is not None
    return [outcome.state for outcome in error.report.engines.values()]


# ---- what a sync does


def test_every_server_generates_with_the_policys_weights(two: list[ReferenceEngine]) -> None:
    with synchronizer(two, kit.llama(1)) as sync:
        assert sync.is_stale
        told = sync.sync_weights()
        assert not sync.is_stale
    assert [kit.served(engine) for engine in two] == [kit.tokens_of(1)] * 2
    assert told["version"] == sync.report.version
    assert (sync.report.route.way, sync.report.route.backend) == ("ipc", "shared memory")


def test_the_size_of_a_buffer_divides_the_weights(two: list[ReferenceEngine]) -> None:
    with synchronizer(two, kit.llama(1), gigabytes=SMALL) as sync:
        sync.sync_weights()
        assert sync.report.buckets > 3
    assert [kit.served(engine) for engine in two] == [kit.tokens_of(1)] * 2


def test_each_side_makes_room_for_the_other_in_turn(engine: ReferenceEngine) -> None:
    journal: list[str] = []
    policy = NotingPolicy(copy.deepcopy(kit.llama(1)), journal)
    with synchronizer([engine], policy, needs_offload=True) as sync:
        sync.generation.finish_generation()
        journal.clear()
        log = kit.Log(engine)
        sync.sync_weights()
    assert journal == ["offload", "read", "restore"]
    steps = [
        (r["path"], tuple((r["json"] or {}).get("tags") or ()))
        for r in log.records(engine)
        if r["path"] in (RESUME, PAUSE, BEGIN, END, CONTINUE)
    ]
    first, last = steps[0], steps[-1]
    assert first == (RESUME, ("weights",))
    assert (last[0], "kv_cache" in last[1]) == (RESUME, True)
    assert [path for path, _ in steps[1:-1]][-4:] == [PAUSE, BEGIN, END, CONTINUE]


# ---- what speaks against it


def test_kv_scales_are_refused_before_any_phase(engine: ReferenceEngine) -> None:
    journal: list[str] = []
    policy = NotingPolicy(copy.deepcopy(kit.llama(1)), journal)
    with synchronizer([engine], policy) as sync:
        journal.clear()
        with pytest.raises(ValueError, match="do not support kv_scales"):
            sync.sync_weights(kv_scales={"model.layers.0": 1.0})
    assert journal == []


def test_another_transport_does_not_go_with_shared_devices(engine: ReferenceEngine) -> None:
    generation = SGLangGeneration(engine.url, transport="broadcast")
    with pytest.raises(ConfigurationError, match="does not go with colocated"):
        create_weight_synchronizer(TorchPolicy(kit.llama(1)), generation, "sglang", True)


@pytest.mark.parametrize("offsets", [[], [0, 1], [-1], ["0"]], ids=str)
def test_every_engine_needs_a_rank_beside_it(offsets: Any) -> None:
    with pytest.raises(ConfigurationError, match="must be a rank for each of 1 engines"):
        SGLangGeneration("http://127.0.0.1:1", engine_gpu_offsets=offsets)


def test_a_wrong_shape_is_refused_and_the_trainer_gets_its_room_back(
    engine: ReferenceEngine,
) -> None:
    kit.push(engine, kit.llama(0))
    model, journal = copy.deepcopy(kit.llama(1)), list[str]()
    model.model.norm.weight = nn.Parameter(torch.ones(3))
    with synchronizer([engine], NotingPolicy(model, journal)) as sync:
        with pytest.raises(WeightUpdateError, match="shape") as caught:
            sync.sync_weights()
        assert sync.is_stale
    assert states(caught.value) == [OLD]
    assert journal[-1] == "restore"
    assert kit.served(engine) == kit.tokens_of(0)


# ---- engines that fail in the middle

FAULTS: list[tuple[str, dict[str, Any], set[EngineState]]] = [
    ("refuse", {"after": 1}, {MIXED}),
    ("close", {"after": 1}, {MIXED}),
    ("die", {"after": 1}, {GONE}),
    ("die", {"after": 1, "when": "after_load", "tensors": 1}, {GONE}),
]


@pytest.mark.parametrize(
    ("kind", "fields", "expected"), FAULTS, ids=[f"{kind} {'-'.join(f)}" for kind, f, _ in FAULTS]
)
def test_a_failure_restores_the_trainer_says_what_each_engine_holds_and_is_healed(
    kind: Any, fields: dict[str, Any], expected: set[EngineState], two: list[ReferenceEngine]
) -> None:
    journal: list[str] = []
    policy = NotingPolicy(copy.deepcopy(kit.llama(1)), journal)
    with synchronizer(two, policy, gigabytes=SMALL) as sync:
        sync.sync_weights()
        two[0].inject(Fault(OPEN, kind, times=1, **fields))
        with pytest.raises(WeightUpdateError) as caught:
            sync.sync_weights()
        assert caught.value.phase == "transfer"
        struck, bystander = states(caught.value)
        assert struck in expected
        assert bystander in (MIXED, OLD)
        assert journal[-1] == "restore"
        assert sync.is_stale
        kit.revive(two[0])
        sync.sync_weights()
        assert not sync.is_stale
    assert [kit.served(engine) for engine in two] == [kit.tokens_of(1)] * 2
