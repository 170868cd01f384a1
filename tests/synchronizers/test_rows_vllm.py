"""The vLLM rows over NeMo-RL's own objects: what is called, in which order, whatever fails."""

from __future__ import annotations

import threading
from concurrent.futures import Future
from typing import Any

import pytest

from weight_update import (
    ConfigurationError,
    EngineState,
    RefitAborted,
    UpdateTimeout,
    WeightUpdateError,
)
from weight_update.synchronizers import (
    CollectiveSenderSpec,
    CollectiveWeightSynchronizer,
    DynamoWeightSynchronizer,
    IPCWeightSynchronizer,
    NoSurvivingShards,
)

from .nemo import FREE_BYTES, Journal, NemoCluster, NemoPolicy, NemoVLLM, done, failed

TRAIN, INFERENCE = 4, 4


def ipc(**options: Any) -> tuple[IPCWeightSynchronizer, Journal]:
    journal = Journal()
    return IPCWeightSynchronizer(NemoPolicy(journal), NemoVLLM(journal), **options), journal


def collective(
    kind: type[CollectiveWeightSynchronizer] = CollectiveWeightSynchronizer, **options: Any
) -> tuple[Any, Journal]:
    journal = Journal()
    clusters = NemoCluster(TRAIN), NemoCluster(INFERENCE)
    return kind(NemoPolicy(journal), NemoVLLM(journal), *clusters, **options), journal


RESTORED = ["P.restore", "G.prepare kv_cache"]


def test_colocated_engines_open_what_the_policy_streams():
    sync, journal = ipc()
    sync.init_communicator()
    assert journal.take() == ["P.info", "G.info"]
    sync.sync_weights(kv_scales={"a.k_scale": 0.5})
    assert journal.take() == [
        "P.offload",
        "G.prepare weights",
        "P.free",
        "P.stream",
        "G.open",
        *RESTORED,
    ]
    assert journal.arguments["P.stream"] == {
        "buffer_size_bytes": int(FREE_BYTES * 0.3),
        "kv_scales": {"a.k_scale": 0.5},
    }


@pytest.mark.parametrize("step", ["G.prepare weights", "P.free", "P.stream", "G.open"])
def test_after_a_failure_phases_are_restored(step: str):
    sync, journal = ipc()
    journal.fail(step)
    with pytest.raises(RuntimeError, match=f"{step} broke"):
        sync.sync_weights()
    called = journal.take()
    assert called[called.index(step) + 1 :] == RESTORED
    assert sync.is_stale
    sync.sync_weights()
    assert not sync.is_stale


def test_a_group_is_made_once_the_generation_knows_what_will_come():
    sync, journal = collective()
    sync.init_communicator()
    assert journal.take() == ["P.info", "G.info", "P.init", "G.init"]
    assert journal.arguments["P.init"] == {
        "port": 29501,
        "world_size": TRAIN + INFERENCE,
        "train": TRAIN,
        "peer": "nemo",
    }
    assert journal.arguments["G.init"] == {
        "port": 29501,
        "world_size": TRAIN + INFERENCE,
        "train": TRAIN,
    }


def test_a_collective_has_no_phases_and_no_size_of_its_own():
    sync, journal = collective(refit_timeout_s=7.0)
    sync.init_communicator()
    journal.take()
    sync.sync_weights(kv_scales={"a.k_scale": 0.5})
    assert journal.take() == ["P.broadcast", "G.receive"]
    assert journal.arguments["P.broadcast"] == {
        "kv_scales": {"a.k_scale": 0.5},
        "buffer_size_bytes": None,
        "num_buffers": None,
        "refit_timeout_s": 7.0,
    }
    assert journal.arguments["G.receive"] == {"refit_timeout_s": 7.0}


def test_workers_watch_a_finite_time_though_none_is_given():
    sync, journal = collective()
    sync.sync_weights()
    assert journal.arguments["P.broadcast"]["refit_timeout_s"] == 300.0
    assert journal.arguments["G.receive"]["refit_timeout_s"] == 300.0


def test_the_generation_says_how_it_wants_the_bytes():
    sync, journal = collective()
    sync.generation.spec = CollectiveSenderSpec("vllm", 1 << 30, 2)
    sync.generation.get_inference_world_size = lambda: 6
    sync.init_communicator()
    sync.sync_weights()
    assert journal.arguments["P.init"]["peer"] == "vllm"
    assert journal.arguments["P.init"]["world_size"] == TRAIN + 6
    sent = journal.arguments["P.broadcast"]
    assert (sent["buffer_size_bytes"], sent["num_buffers"]) == (1 << 30, 2)


def test_a_generation_whose_workers_watch_no_time_is_told_none():
    sync, journal = collective()
    sync.generation.supports_refit_worker_timeout = False
    sync.sync_weights()
    assert journal.arguments["G.receive"] == {"refit_timeout_s": None}


def test_gradients_are_freed_first_where_that_is_asked_for():
    sync, journal = collective(release_grads_before_refit=True)
    sync.sync_weights()
    assert journal.take() == ["P.offload", "P.broadcast", "G.receive"]


def test_a_group_whose_transfer_failed_is_made_anew():
    sync, journal = collective()
    sync.init_communicator()
    journal.fail("G.receive")
    with pytest.raises(WeightUpdateError):
        sync.sync_weights()
    journal.take()
    sync.sync_weights()
    assert journal.take() == ["P.init", "G.init", "P.broadcast", "G.receive"]
    assert journal.arguments["P.init"]["port"] == 29502


# -- what the two sides say ----------------------------------------------------------------

SIDES = {ipc: ("P.stream", "G.open"), collective: ("P.broadcast", "G.receive")}
ROWS = pytest.mark.parametrize("make", [ipc, collective])


@ROWS
@pytest.mark.parametrize(
    ("verdicts", "good"),
    [
        ([True], True),
        ([True, None], True),
        ([None, None], False),
        ([], False),
        ([True, False], False),
    ],
)
def test_receivers_have_to_say_yes(make: Any, verdicts: list[bool | None], good: bool):
    sync, journal = make()
    journal.futures[SIDES[make][1]] = [done(verdict) for verdict in verdicts]
    if good:
        sync.sync_weights()
    else:
        with pytest.raises(RuntimeError, match="Weight transfer failed"):
            sync.sync_weights()
    assert sync.is_stale is not good


@ROWS
@pytest.mark.parametrize("side", [0, 1])
def test_a_side_that_fails_is_the_cause(make: Any, side: int):
    sync, journal = make()
    cause = ConnectionResetError("rank 2 is gone")
    journal.futures[SIDES[make][side]] = [failed(cause)]
    with pytest.raises(RuntimeError, match=r"Weight transfer failed: .*rank 2 is gone") as caught:
        sync.sync_weights()
    assert caught.value.__cause__ is cause


@ROWS
def test_a_sender_that_fails_is_told_of_when_the_receivers_have_ended_too(make: Any):
    sync, journal = make()
    send, receive = SIDES[make]
    answer: Future[bool] = Future()
    journal.futures[send] = [failed(RuntimeError("the sender broke"))]
    journal.futures[receive] = [answer]
    threading.Timer(0.2, answer.set_result, [False]).start()
    with pytest.raises(RuntimeError, match="the sender broke"):
        sync.sync_weights()
    assert answer.done()


@ROWS
def test_receivers_that_never_end_are_waited_for_in_bounds(make: Any):
    sync, journal = make(refit_timeout_s=0.5)
    send, receive = SIDES[make]
    journal.futures[send] = [failed(RuntimeError("the sender broke"))]
    journal.futures[receive] = [Future()]
    with pytest.raises(RuntimeError, match="the sender broke"):
        sync.sync_weights()


@ROWS
@pytest.mark.parametrize("side", [0, 1])
def test_a_side_that_hangs_ends_with_the_time(make: Any, side: int):
    sync, journal = make(refit_timeout_s=0.5)
    journal.futures[SIDES[make][side]] = [Future()]
    with pytest.raises(UpdateTimeout, match="Weight transfer failed: 1 of 2 workers did not"):
        sync.sync_weights()


@ROWS
def test_engines_that_may_be_mixed_are_reported_so_and_cannot_be_held(make: Any):
    sync, journal = make()
    journal.fail(SIDES[make][1])
    with pytest.raises(WeightUpdateError) as caught:
        sync.sync_weights()
    (outcome,) = caught.value.report.engines.values()
    assert (outcome.state, outcome.paused) == (EngineState.MIXED, False)


@pytest.mark.parametrize(
    "cause",
    [RuntimeError("engine core: [refit-aborted] no peer"), RuntimeError("RefitAborted: no peer")],
)
def test_an_abort_is_told_by_its_words(cause: Exception):
    sync, journal = collective()
    journal.futures["G.receive"] = [failed(cause)]
    with pytest.raises(RefitAborted, match="reconcile_communicator") as caught:
        sync.sync_weights()
    assert caught.value.__cause__ is cause


# -- membership ----------------------------------------------------------------------------


def test_nothing_is_rebuilt_while_everybody_is_there():
    sync, journal = collective()
    sync.init_communicator()
    journal.take()
    assert sync.reconcile_communicator([]) is False
    assert journal.take() == []


def test_a_group_without_the_absent_is_made_once():
    sync, journal = collective()
    sync.init_communicator()
    sync.sync_weights()
    journal.take()
    assert sync.reconcile_communicator([0]) is True
    assert journal.take() == ["P.init", "G.member", "G.rebuild"]
    assert sync.is_stale
    assert journal.arguments["P.init"]["world_size"] == TRAIN + 2
    assert journal.arguments["P.init"]["port"] == journal.arguments["G.rebuild"]["port"] == 29502
    assert sync.generation.membership.shard_prefixes == {1: 0}
    assert sync.reconcile_communicator([0]) is False


def test_a_shard_that_is_back_is_taken_back():
    sync, _ = collective()
    sync.init_communicator()
    sync.reconcile_communicator([0])
    assert sync.reconcile_communicator([]) is True
    assert sync.generation.membership.shard_prefixes == {0: 0, 1: 2}


def test_force_rebuilds_though_nobody_left():
    sync, journal = collective()
    sync.init_communicator()
    journal.take()
    assert sync.reconcile_communicator([], force=True) is True
    assert journal.take() == ["P.init", "G.member", "G.rebuild"]


def test_a_rebuild_that_failed_is_due_again():
    sync, journal = collective()
    sync.init_communicator()
    journal.fail("G.rebuild")
    with pytest.raises(WeightUpdateError, match=r"G\.rebuild broke"):
        sync.reconcile_communicator([0])
    journal.take()
    assert sync.reconcile_communicator([0]) is True
    assert sync.reconcile_communicator([0]) is False


def test_a_rebuild_speaks_the_same_handshake():
    sync, journal = collective()
    sync.generation.spec = CollectiveSenderSpec("vllm")
    sync.init_communicator()
    sync.reconcile_communicator([1])
    assert journal.arguments["P.init"]["peer"] == "vllm"


def test_a_fleet_of_which_nobody_is_left_is_refused():
    sync, _ = collective()
    with pytest.raises(NoSurvivingShards):
        sync.reconcile_communicator([0, 1])


def test_a_shard_of_no_fleet_is_refused():
    sync, _ = collective()
    with pytest.raises(ValueError, match=r"shards 0 to 1, and not \[7\]"):
        sync.reconcile_communicator([7])


def test_colocated_engines_are_who_they_are():
    sync, _ = ipc()
    assert sync.reconcile_communicator([0], force=True) is None


# -- dynamo --------------------------------------------------------------------------------


def test_dynamo_is_a_collective_that_speaks_vllms_handshake():
    sync, journal = collective(DynamoWeightSynchronizer)
    sync.generation.spec = CollectiveSenderSpec("vllm", 1 << 30, 2)
    sync.init_communicator()
    sync.sync_weights()
    assert journal.take() == ["P.info", "G.info", "P.init", "G.init", "P.broadcast", "G.receive"]
    assert journal.arguments["P.init"]["peer"] == "vllm"
    assert sync.reconcile_communicator([0]) is None


@pytest.mark.parametrize("call", ["init_communicator", "sync_weights"])
def test_dynamo_with_another_handshake_would_hang_and_is_refused(call: str):
    sync, journal = collective(DynamoWeightSynchronizer)
    with pytest.raises(ConfigurationError, match="handshake 'vllm'"):
        getattr(sync, call)()
    assert journal.take() == []


def test_sides_that_cannot_hand_over_are_refused():
    with pytest.raises(ConfigurationError, match="has no update_weights_via_ipc_zmq"):
        IPCWeightSynchronizer(NemoPolicy(Journal()), object())
