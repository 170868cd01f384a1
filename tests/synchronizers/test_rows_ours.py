"""The rows over facades: phases around an update, its size, its extra tensors, its engines."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from weight_update import ConfigurationError, EngineState, WeightUpdateError
from weight_update.delivery import ranks
from weight_update.synchronizers import (
    CollectiveWeightSynchronizer,
    IPCWeightSynchronizer,
    NoSurvivingShards,
    SGLangColocatedWeightSynchronizer,
    SGLangDisaggregatedWeightSynchronizer,
    carriers,
)
from weight_update.weights.stream import Stream

from .nemo import Journal, NemoCluster, NemoPolicy
from .served import FREE_BYTES, FakeGeneration, FakePolicy

ROWS = {
    "sglang colocated": SGLangColocatedWeightSynchronizer,
    "sglang apart": SGLangDisaggregatedWeightSynchronizer,
    "vllm colocated": IPCWeightSynchronizer,
    "vllm apart": CollectiveWeightSynchronizer,
}
EVERY = pytest.mark.parametrize("row", ROWS)
SHARED = (["P.offload", "G.prepare weights"], ["P.restore", "G.prepare kv_cache"])
AROUND: dict[str, tuple[list[str], list[str]]] = {
    "sglang colocated": SHARED,
    "sglang apart": (["G.prepare weights"], ["G.prepare kv_cache"]),
    "vllm colocated": SHARED,
    "vllm apart": ([], []),
}
UPDATE = [
    *("E.inspect", "E.join", "E.pause", "E.drain", "E.begin", "E.apply"),
    *("E.end", "E.flush", "E.stamp", "E.resume"),
]


def made(row: str, engines: int = 1, **options: Any) -> tuple[Any, Journal]:
    journal = Journal()
    sides = FakePolicy(journal), FakeGeneration(journal, engines)
    clusters = (NemoCluster(1), NemoCluster(engines)) if row == "vllm apart" else ()
    return ROWS[row](*sides, *clusters, **options), journal


@EVERY
def test_one_update_runs_between_the_phases(row: str):
    sync, journal = made(row)
    sync.sync_weights()
    before, after = AROUND[row]
    assert journal.take() == [*before, "P.free", "P.source", *UPDATE, *after]
    assert sync.generation.packer.sent == [("a", 0.0), ("b", 1.0), ("c", 2.0), ("d", 3.0)]
    assert not sync.is_stale


@EVERY
def test_the_delivery_is_told_where_the_engines_are_and_how_long_it_may_take(row: str):
    sync, _ = made(row, refit_timeout_s=9.0)
    asked = sync.generation.asked
    assert asked["colocated"] is row.endswith("colocated")
    assert (asked["timeout_s"], asked["policy"]) == (9.0, sync.policy)


@EVERY
def test_a_share_of_what_is_free_limits_buckets(row: str, monkeypatch: pytest.MonkeyPatch):
    buffers = 2 if row.endswith("colocated") else 1
    monkeypatch.setenv("NRL_REFIT_BUFFER_MEMORY_RATIO", str(buffers * 40 / FREE_BYTES))
    sync, _ = made(row)
    sync.sync_weights()
    assert sync.generation.packer.sizes == [32, 32]


@EVERY
def test_a_size_that_is_given_is_that_of_a_bucket_or_of_two_on_a_shared_device(row: str):
    buffers = 2 if row.endswith("colocated") else 1
    sync, journal = made(row, refit_buffer_size_gb=buffers * 16 / 1024**3)
    sync.sync_weights()
    assert sync.generation.packer.sizes == [16, 16, 16, 16]
    assert "P.free" not in journal.calls


@pytest.mark.parametrize("row", ["vllm colocated", "vllm apart"])
def test_scales_of_a_cache_are_sent_last(row: str):
    sync, _ = made(row)
    sync.sync_weights(kv_scales={"x.k_scale": 0.5, "x.v_scale": 0.25})
    sent = sync.generation.packer.sent
    assert sent[-2:] == [("x.k_scale", 0.5), ("x.v_scale", 0.25)]
    assert len(sent) == 6


@pytest.mark.parametrize("row", ["vllm colocated", "vllm apart"])
def test_scales_cannot_follow_a_stream(row: str):
    sync, _ = made(row)
    sync.policy.weights = Stream([("a", torch.zeros(4))], whole=True)
    with pytest.raises(ConfigurationError, match="yield them at its end"):
        sync.sync_weights(kv_scales={"x.k_scale": 0.5})


@EVERY
def test_scales_are_refused_where_no_engine_takes_them(row: str):
    sync, journal = made(row)
    if sync.takes_kv_scales:
        return
    with pytest.raises(ValueError, match="do not support kv_scales"):
        sync.sync_weights(kv_scales={})
    assert journal.take() == []


@EVERY
@pytest.mark.parametrize(
    "scales", [3, "a", ["a"], {1: 1.0}, {"a": None}, {"a": 0.0}, {"a": float("nan")}], ids=str
)
def test_scales_that_are_none_are_refused_before_any_phase(row: str, scales: Any):
    sync, journal = made(row)
    with pytest.raises(ConfigurationError, match="kv_scales"):
        sync.sync_weights(kv_scales=scales)
    assert journal.take() == []


@EVERY
def test_a_refused_size_changes_no_phase(row: str):
    sync, journal = made(row, refit_buffer_size_gb=-1)
    with pytest.raises(ValueError, match="refit_buffer_size_gb must be > 0"):
        sync.sync_weights()
    assert journal.take() == []


STATES = [
    ("E.pause", EngineState.OLD, False),
    ("E.begin", EngineState.OLD, False),
    ("E.apply", EngineState.MIXED, True),
]


@EVERY
@pytest.mark.parametrize(("step", "state", "paused"), STATES)
def test_a_failure_leaves_a_known_state_and_restored_phases(
    row: str, step: str, state: EngineState, paused: bool
):
    sync, journal = made(row)
    sync.init_communicator()
    journal.take()
    (engine,) = sync.generation.engines.values()
    engine.fail(step.removeprefix("E."), "bug")
    with pytest.raises(RuntimeError, match="Weight transfer failed") as caught:
        sync.sync_weights()
    (outcome,) = caught.value.report.engines.values()
    assert (outcome.state, outcome.paused) == (state, paused)
    assert engine.paused is paused
    called = [call for call in journal.take() if not call.startswith("E.")]
    assert called[called.index("P.source") + 1 :] == AROUND[row][1]
    assert sync.is_stale
    sync.sync_weights()
    assert not sync.is_stale
    assert not engine.paused


@EVERY
def test_an_objection_pauses_nothing(row: str):
    sync, journal = made(row)
    sync.policy.weights = {"a": "no tensor"}
    with pytest.raises(WeightUpdateError, match="are not tensors") as caught:
        sync.sync_weights()
    assert "Weight transfer failed" not in str(caught.value)
    assert "E.pause" not in journal.calls


@EVERY
def test_only_a_collective_needs_its_group_beforehand(row: str):
    sync, journal = made(row)
    sync.init_communicator()
    joined = ["P.source", "E.inspect", "E.join"] if row == "vllm apart" else []
    assert journal.take() == ["P.info", "G.info", *joined]


def test_a_group_is_made_where_the_model_is():
    sync, _ = made("vllm apart")
    met: list[torch.device | None] = []
    sync.generation.deliver.connect = met.append
    sync.policy.weights = torch.nn.Linear(1, 1)
    sync.init_communicator()
    assert met == [torch.device("cpu")]


@pytest.mark.parametrize(("speaks", "joined"), [(True, ["E.inspect", "E.join"]), (False, [])])
def test_of_the_ranks_that_hold_a_model_one_makes_the_group(
    speaks: bool, joined: list[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(carriers, "leads", lambda source: speaks)
    sync, journal = made("vllm apart")
    sync.init_communicator()
    assert [call for call in journal.take() if call.startswith("E.")] == joined


@pytest.mark.parametrize(
    ("trainer_ranks", "readers", "speak"),
    [
        ("one", set(), [True, True]),
        ("one", {0, 1}, [True, False]),
        ("one", {1}, [False, True]),
        ("node", set(), [True, False]),
    ],
)
def test_of_ranks_that_take_part_one_speaks(
    trainer_ranks: Any, readers: set[int], speak: list[bool], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(ranks, "readers_of", lambda source, count: readers)
    told = []
    for number in range(2):
        channel = SimpleNamespace(rank=number, ranks=2)
        monkeypatch.setattr(ranks, "open_channel", lambda channel=channel: channel)
        told.append(ranks.leads(dict, trainer_ranks))
    assert told == speak


@EVERY
def test_a_shutdown_gives_the_group_up(row: str):
    sync, journal = made(row)
    sync.sync_weights()
    journal.take()
    sync.shutdown()
    assert sync.generation.groups[-1].given_up
    assert "E.leave" in journal.take()
    sync.shutdown()
    assert sync.is_stale


@pytest.mark.parametrize("row", ["sglang colocated", "sglang apart", "vllm colocated"])
def test_membership_is_not_a_rows_without_a_group(row: str):
    assert made(row)[0].reconcile_communicator([0], force=True) is None


def apart(engines: int) -> tuple[Any, Journal]:
    sync, journal = made("vllm apart", engines)
    sync.init_communicator()
    journal.take()
    return sync, journal


def test_nothing_is_rebuilt_while_everybody_is_there():
    sync, journal = apart(2)
    assert sync.reconcile_communicator([]) is False
    assert journal.take() == []


def test_an_absent_engine_gets_nothing_until_it_is_back():
    sync, _ = apart(3)
    assert sync.reconcile_communicator([1]) is True
    assert sync.is_stale
    sync.sync_weights()
    assert list(sync.report.engines) == ["http://engine0:1", "http://engine2:1"]
    assert sync.reconcile_communicator([1]) is False
    assert sync.reconcile_communicator([]) is True
    sync.sync_weights()
    assert len(sync.report.engines) == 3


def test_force_makes_the_group_anew():
    sync, journal = apart(1)
    assert sync.reconcile_communicator([], force=True) is True
    assert "E.join" in journal.take()
    assert len(sync.generation.groups) == 2


def test_a_group_that_could_not_be_made_is_due_again():
    sync, _ = apart(2)
    sync.generation.engines["http://engine1:1"].fail("join", "refuse")
    with pytest.raises(WeightUpdateError):
        sync.reconcile_communicator([0])
    assert sync.reconcile_communicator([0]) is True
    assert sync.reconcile_communicator([0]) is False


def test_a_fleet_of_which_nobody_is_left_is_refused():
    sync, _ = apart(2)
    with pytest.raises(NoSurvivingShards):
        sync.reconcile_communicator([0, 1])
    assert sync.reconcile_communicator([]) is False


@EVERY
def test_a_policy_that_cannot_be_read_does_not_fit(row: str):
    journal = Journal()
    clusters = (NemoCluster(1), NemoCluster(1)) if row == "vllm apart" else ()
    with pytest.raises(ConfigurationError, match="do not fit together"):
        ROWS[row](torch.nn.Linear(1, 1), FakeGeneration(journal), *clusters)


@EVERY
def test_workers_do_not_fit_engines_that_they_cannot_receive_for(row: str):
    journal = Journal()
    clusters = (NemoCluster(1), NemoCluster(1)) if row == "vllm apart" else ()
    with pytest.raises(ConfigurationError, match="a FakeGeneration has no"):
        ROWS[row](NemoPolicy(journal), FakeGeneration(journal), *clusters)
