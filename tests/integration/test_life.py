"""Restarts, crashes, interrupts, threads, forks: what outlives what."""

from __future__ import annotations

import copy
import gc
import os
import pickle
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from weight_update import (
    EngineState,
    SGLangWeightSyncScheme,
    UpdateTimeout,
)
from weight_update.reference_engine import Fault, ReferenceEngine

from . import kit, trainers
from .kit import BEGIN, CONTINUE, INIT, UPDATE
from .trainers import Trainers

# ---- engines that restart


def test_a_restarted_engine_is_noticed_and_gets_everything_again(
    three: list[ReferenceEngine],
) -> None:
    """C08: it is back on base weights, without label and group; the other one is not."""
    with kit.make_sender(three[:2]) as sender:
        first = sender.update_weights(kit.llama(1))
        three[0].restart()
        assert kit.served(three[0]) == kit.tokens_of(0)
        log = kit.Log(*three[:2])
        report = sender.update_weights(kit.llama(1))
        assert report.version == first.version + 1
        for engine in three[:2]:
            assert log.count(engine, INIT) == 1
            assert kit.served(engine) == kit.tokens_of(1)
            assert kit.label(engine) == str(report.version)


def test_an_engine_killed_before_the_update_is_lost_and_taken_back(
    engine: ReferenceEngine,
) -> None:
    """C08, C66: in time, and shutdown does not wait for the dead."""
    with kit.make_sender(engine) as sender:
        sender.update_weights(kit.llama(1))
        os.kill(engine.pid, signal.SIGKILL)
        engine.process.wait()
        with kit.takes_at_most(20), pytest.raises(ConnectionError):
            sender.update_weights(kit.llama(1))
        assert sender.engines[engine.url].state is EngineState.UNREACHABLE
        with kit.takes_at_most(20):
            sender.shutdown()
            sender.shutdown()
    engine.restart()


# ---- trainers that die


@pytest.mark.parametrize("stalled", [False, True], ids=["refused", "in the broadcast"])
def test_the_next_trainer_works_after_one_was_killed_in_mid_update(
    stalled: bool, engine: ReferenceEngine, workplace: Trainers, weights_b: str
) -> None:
    """C20: its group, its session and its pause are left on the engine."""
    kit.push(engine, kit.llama(0))
    if not stalled:
        engine.inject(Fault(UPDATE, "hang", times=1))
    log = kit.Log(engine)
    trainer = workplace.start(
        trainers.update_until_interrupted, url=engine.url, weights=weights_b, stalled=stalled
    )
    kit.wait_for(lambda: log.count(engine, UPDATE))
    trainer.kill(signal.SIGKILL)
    assert trainer.wait(40) == -signal.SIGKILL
    with kit.make_sender(engine) as sender:
        report = sender.update_weights(kit.llama(1))
    assert report.engines[engine.url].state is EngineState.NEW
    assert kit.served(engine) == kit.tokens_of(1)
    names = [body["group_name"] for body in log.bodies(engine, INIT)]
    assert len(names) == len(set(names)) == 2
    assert log.count(engine, BEGIN) == 3  # the second was told that a session is open


@pytest.mark.parametrize("action", [trainers.update_once, trainers.update_and_shut_down_twice])
def test_a_trainer_exits_in_time_after_its_engine_was_killed(
    action: object, workplace: Trainers, weights_b: str, three: list[ReferenceEngine]
) -> None:
    """C66: with and without a shutdown, with exit code 0 and nothing to say."""
    engine = three[2]
    trainer = workplace.start(action, url=engine.url, weights=weights_b)  # type: ignore[arg-type]
    trainer.wait_for("version" if action is trainers.update_once else "updated")
    os.kill(engine.pid, signal.SIGSTOP if action is trainers.update_once else signal.SIGKILL)
    trainer.go_on()
    assert trainer.wait(40) == 0, trainer.output()
    assert "Error" not in trainer.output()


# ---- interrupts


def test_an_interrupt_in_the_broadcast_frees_and_resumes_the_engine(
    engine: ReferenceEngine, workplace: Trainers, weights_b: str
) -> None:
    """C47: the engine waits for bytes that never come; nothing was applied, so it goes on."""
    kit.push(engine, kit.llama(0))
    log = kit.Log(engine)
    trainer = workplace.start(
        trainers.update_until_interrupted, url=engine.url, weights=weights_b, stalled=True
    )
    trainer.wait_for("stalled")
    kit.wait_for(lambda: log.count(engine, UPDATE))
    trainer.kill(signal.SIGINT)
    assert trainer.wait(40) == 0
    assert f"interrupted the weight update was interrupted; {engine.url} old" in trainer.output()
    assert log.count(engine, CONTINUE) == 1
    assert kit.served(engine) == kit.tokens_of(0)


def test_an_interrupt_without_an_answer_leaves_the_engine_held_and_says_so(
    engine: ReferenceEngine, workplace: Trainers, weights_b: str
) -> None:
    """C47: whether anything was applied is unknown, so it counts as mixed."""
    engine.inject(Fault(UPDATE, "hang", times=1))
    log = kit.Log(engine)
    trainer = workplace.start(
        trainers.update_until_interrupted, url=engine.url, weights=weights_b, stalled=False
    )
    kit.wait_for(lambda: log.count(engine, UPDATE))
    trainer.kill(signal.SIGINT)
    assert trainer.wait(40) == 0
    assert f"{engine.url} mixed (version" in trainer.output()
    assert ", paused)" in trainer.output()
    assert log.count(engine, CONTINUE) == 0
    assert kit.is_paused(engine)
    kit.push(engine, kit.llama(1))
    assert kit.served(engine) == kit.tokens_of(1)


# ---- one process, many groups


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_connecting_again_and_again_leaves_nothing_behind(three: list[ReferenceEngine]) -> None:
    """C37: twenty groups beside a live one; names never repeat, threads and files stay flat."""
    log = kit.Log(*three)
    with kit.make_sender(three[1]) as other:
        other.update_weights(kit.llama(0))
        kit.push(three[0], kit.llama(0))
        gc.collect()
        time.sleep(0.3)  # threads of the calls above end
        threads, files = threading.active_count(), open_files()
        for _ in range(20):
            kit.push(three[0], kit.llama(1))
        kit.wait_for(lambda: gc.collect() >= 0 and threading.active_count() <= threads)
        kit.wait_for(lambda: open_files() <= files + 2)
        other.update_weights(kit.llama(1))
    names = [b["group_name"] for e in three for b in log.bodies(e, INIT)]
    assert len(names) == len(set(names)) == 22
    assert [kit.served(engine) for engine in three[:2]] == [kit.tokens_of(1)] * 2


def test_the_default_process_group_is_left_alone(engine: ReferenceEngine, tmp_path: Path) -> None:
    """C38: an update works with and without one, and torch's is the same afterwards."""
    dist = torch.distributed
    kit.push(engine, kit.llama(0))
    assert not dist.is_initialized()
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/rdzv", rank=0, world_size=1)
    try:
        group = dist.group.WORLD
        kit.push(engine, kit.llama(1))
        assert dist.group.WORLD is group
        dist.barrier()
    finally:
        dist.destroy_process_group()
    assert kit.served(engine) == kit.tokens_of(1)


# ---- threads


def test_two_updates_at_once_never_interleave(engine: ReferenceEngine) -> None:
    """C40: one waits for the other, and both count."""
    with kit.make_sender(engine) as sender, ThreadPoolExecutor(4) as pool:
        sender.init_all_workers_group()
        log = kit.Log(engine)
        reports = list(pool.map(sender.update_weights, [kit.llama(1)] * 4))
    assert log.steps(engine) == list(kit.USUAL_STEPS) * 4
    versions = sorted(report.version for report in reports)
    assert versions == list(range(versions[0], versions[0] + 4))
    assert kit.label(engine) == str(versions[-1])


def test_a_second_update_waits_no_longer_than_its_deadline(engine: ReferenceEngine) -> None:
    """C40: then it is a typed error, and the first is not disturbed."""
    with kit.make_sender(engine) as sender, ThreadPoolExecutor(1) as pool:
        sender.update_weights(kit.llama(0))
        engine.inject(Fault(UPDATE, "slow", seconds=5.0, times=1))
        log = kit.Log(engine)
        first = pool.submit(sender.update_weights, kit.llama(1))
        kit.wait_for(lambda: log.count(engine, UPDATE))
        busy = pytest.raises(UpdateTimeout, match="another update was still running")
        with kit.timeout_of(sender, 0.3), busy as caught:
            sender.update_weights(kit.llama(0))
        assert caught.value.phase == "plan"
        assert first.result(60).engines[engine.url].state is EngineState.NEW
    assert kit.served(engine) == kit.tokens_of(1)


def test_the_lock_is_free_after_a_failure(engine: ReferenceEngine) -> None:
    """C40: the update of another thread succeeds after the first one failed."""
    engine.inject(Fault(UPDATE, "refuse", times=1))
    with kit.make_sender(engine) as sender, ThreadPoolExecutor(2) as pool:
        futures = [pool.submit(sender.update_weights, kit.llama(1)) for _ in range(2)]
        errors = [future.exception(60) for future in futures]
    assert sorted(error is None for error in errors) == [False, True]
    assert kit.served(engine) == kit.tokens_of(1)


# ---- copies and forks


def test_a_pickled_sender_works_in_another_process(
    engine: ReferenceEngine, workplace: Trainers, weights_b: str, tmp_path: Path
) -> None:
    """C78: it travels as configuration, and the sender it was made from stays connected."""
    with kit.make_sender(engine) as sender:
        sender.update_weights(kit.llama(0))
        path = tmp_path / "sender.pickle"
        path.write_bytes(pickle.dumps(sender))
        trainer = workplace.start(
            trainers.update_pickled, url=engine.url, weights=weights_b, pickled=str(path)
        )
        assert trainer.wait(60) == 0, trainer.output()
        assert kit.served(engine) == kit.tokens_of(1)
        assert f"version {kit.label(engine)}" in trainer.output()
        sender.update_weights(kit.llama(0))
        assert kit.served(engine) == kit.tokens_of(0)


@pytest.mark.parametrize(
    "copied", [copy.deepcopy, lambda scheme: pickle.loads(pickle.dumps(scheme))]
)
def test_a_copied_scheme_is_equal_and_unconnected(copied: object, engine: ReferenceEngine) -> None:
    """C78."""
    scheme = SGLangWeightSyncScheme(engine.url, pause_mode="abort", bucket_bytes=1000, timeout=60)
    scheme.init_on_sender(model_id="policy")
    twin = copied(scheme)  # type: ignore[operator]
    assert twin.options == scheme.options
    assert twin.server_url == scheme.server_url
    with twin.create_sender() as sender:
        sender.update_weights(kit.llama(1))
    assert kit.served(engine) == kit.tokens_of(1)
    scheme.shutdown()


def test_a_sender_used_after_a_fork_fails_in_the_child_and_works_in_the_parent(
    engine: ReferenceEngine, workplace: Trainers, weights_b: str
) -> None:
    """C78: threads and sockets of a group do not survive a fork."""
    trainer = workplace.start(trainers.update_after_fork, url=engine.url, weights=weights_b)
    assert trainer.wait(60) == 0, trainer.output()
    assert "does not survive a fork" in trainer.output()
    assert "parent updated to" in trainer.output()
    assert kit.served(engine) == kit.tokens_of(1)


@pytest.mark.parametrize("size", [1, 3])
def test_an_engine_that_comes_late_to_the_rendezvous_is_freed_and_updated_next(
    three: list[ReferenceEngine], size: int
) -> None:
    """C01, C11: told of a rendezvous that is over, an engine would dial it for half an hour."""
    engines = three[:size]
    engines[-1].inject(Fault(INIT, "slow", seconds=3.0, times=1))
    log = kit.Log(*engines)
    with kit.make_sender(engines, timeout=1.0) as sender:
        with pytest.raises(UpdateTimeout):
            sender.update_weights(kit.llama(1))
        kit.wait_for(lambda: all(join["t1"] for join in log.records(engines[-1], INIT)))

        with kit.timeout_of(sender, 60.0):
            sender.update_weights(kit.llama(1))

    for engine in engines:
        assert kit.served(engine) == kit.tokens_of(1)
