"""Section L of the case list: threads, interrupts, the life of a process, backends."""

from __future__ import annotations

import copy
import multiprocessing
import os
import pickle
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch

from tests.integration import kit, trainers
from tests.integration.kit import BEGIN, CONTINUE, END, FLUSH, INIT, PAUSE, STAMP, UPDATE
from tests.integration.trainers import Trainers
from weight_update import (
    ConfigurationError,
    EngineState,
    SGLangWeightSyncScheme,
    WeightUpdateError,
)
from weight_update.collectors.worker_counting import count_at
from weight_update.reference_engine import Fault, ReferenceEngine

from .trial import MIXED, NEW, OLD, Trial, once

# ---- C40


def test_c40_threads_that_update_at_once_never_interleave(two: list[ReferenceEngine]) -> None:
    with kit.make_sender(two) as sender, ThreadPoolExecutor(3) as pool:
        sender.init_all_workers_group()
        log = kit.Log(*two)
        reports = list(pool.map(sender.update_weights, [kit.llama(i % 2) for i in range(6)]))
    versions = sorted(report.version for report in reports)
    assert versions == list(range(versions[0], versions[0] + 6))
    for engine in two:
        assert log.steps(engine) == list(kit.USUAL_STEPS) * 6
        assert kit.label(engine) == str(versions[-1])


def test_c40_two_senders_of_one_process_never_interleave_on_an_engine(
    engine: ReferenceEngine,
) -> None:
    """A session that is open belongs to a trainer that lives, and is not closed as a dead one's."""
    with (
        kit.make_sender(engine) as first,
        kit.make_sender(engine) as second,
        ThreadPoolExecutor(2) as pool,
    ):
        first.init_all_workers_group()
        second.init_all_workers_group()
        log = kit.Log(engine)
        engine.inject(Fault(UPDATE, "slow", seconds=0.5))
        calls = [
            pool.submit(sender.update_weights, kit.llama(seed))
            for sender, seed in ((first, 0), (second, 1)) * 2
        ]
        reports = [call.result(120) for call in calls]
    assert log.steps(engine) == list(kit.USUAL_STEPS) * 4
    assert {report.engines[engine.url].state for report in reports} == {NEW}
    last = [call["json"]["group_name"] for call in log.records(engine, UPDATE)][-1]
    names = {sender: body["group_name"] for sender, body in enumerate(log.bodies(engine, UPDATE))}
    assert last in names.values()
    assert not kit.is_paused(engine)


def test_c40_a_second_update_is_refused_at_once_where_that_is_the_choice(
    engine: ReferenceEngine,
) -> None:
    with kit.make_sender(engine, when_busy="refuse") as sender, ThreadPoolExecutor(1) as pool:
        sender.update_weights(kit.llama(0))
        engine.inject(once(UPDATE, "slow", seconds=3.0))
        log = kit.Log(engine)
        first = pool.submit(sender.update_weights, kit.llama(1))
        kit.wait_for(lambda: log.count(engine, UPDATE))
        with pytest.raises(WeightUpdateError, match="busy"):
            sender.update_weights(kit.llama(0))
        assert first.result(60).engines[engine.url].state is NEW
        sender.update_weights(kit.llama(1))
    assert kit.served(engine) == kit.tokens_of(1)


@pytest.mark.parametrize("path", [PAUSE, UPDATE, STAMP])
def test_c40_after_a_failure_in_one_thread_another_one_succeeds(
    path: str, engine: ReferenceEngine
) -> None:
    trial = Trial([engine])
    engine.inject(once(path, "refuse"))
    with ThreadPoolExecutor(1) as pool:
        error = pool.submit(trial.sender.update_weights, kit.llama(1)).exception(60)
        assert isinstance(error, WeightUpdateError)
        pool.submit(trial.sender.update_weights, kit.llama(1)).result(60)
    trial.check_new()


def test_c40_a_hook_that_calls_its_own_sender_is_refused_and_harms_nothing(
    engine: ReferenceEngine,
) -> None:
    errors: list[BaseException] = []
    sender = kit.make_sender(engine)

    class Reentrant:
        def increment_version(self) -> None:
            try:
                sender.update_weights(kit.llama(0))
            except WeightUpdateError as error:
                errors.append(error)

    sender.register_collector(Reentrant())
    with sender:
        sender.update_weights(kit.llama(1))
    assert isinstance(errors[0], ConfigurationError)
    assert kit.served(engine) == kit.tokens_of(1)


def test_c40_an_update_in_the_background_sends_the_weights_of_its_moment(
    engine: ReferenceEngine,
) -> None:
    """The training step that runs meanwhile is in none of the tensors."""
    model = copy.deepcopy(kit.llama(1))
    with kit.make_sender(engine) as sender:
        sender.update_weights(kit.llama(0))
        engine.inject(once(PAUSE, "slow", seconds=0.5))
        future = sender.update_weights_async(model)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.zero_()
        report = future.result(60)
    assert report.engines[engine.url].state is NEW
    assert kit.served(engine) == kit.tokens_of(1)


# ---- C47


@contextmanager
def interrupt_when(log: kit.Log, engine: ReferenceEngine, path: str) -> Iterator[None]:
    """Send this process a SIGINT once a route was called."""

    def watch() -> None:
        kit.wait_for(lambda: log.count(engine, path))
        os.kill(os.getpid(), signal.SIGINT)

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    try:
        yield
    finally:
        watcher.join(60)
        time.sleep(0)  # a signal that came last is taken here


INTERRUPTED = {
    PAUSE: OLD,
    BEGIN: OLD,
    UPDATE: MIXED,  # no answer ever came, so nobody knows
    END: NEW,
    FLUSH: MIXED,
    STAMP: NEW,
}


@pytest.mark.parametrize("path", INTERRUPTED)
def test_c47_an_interrupt_in_any_step_leaves_a_known_state_that_heals(
    path: str, engine: ReferenceEngine
) -> None:
    trial = Trial([engine])
    engine.inject(once(path, "hang"))
    if path == FLUSH:
        kit.make_flush_owed(engine)
    started = time.monotonic()
    with pytest.raises(KeyboardInterrupt) as caught, interrupt_when(trial.log, engine, path):
        trial.sender.update_weights(kit.llama(1))
    assert time.monotonic() - started < 30  # far below the deadline of 60 s
    outcome = trial.sender.engines[engine.url]
    assert outcome.state in (INTERRUPTED[path], NEW if path == FLUSH else INTERRUPTED[path])
    late = "may still take effect" in outcome.detail
    assert late or outcome.paused == kit.is_paused(engine)
    assert kit.is_paused(engine) == (outcome.state is MIXED)
    notes = " ".join(caught.value.__notes__)
    assert f"{engine.url} {outcome.state}" in notes
    assert ("paused" in notes) == outcome.paused
    assert trial.sender.version == trial.version
    trial.heal()


def test_c47_an_interrupt_after_a_confirmed_bucket_holds_the_engine_and_says_so(
    engine: ReferenceEngine,
) -> None:
    trial = Trial([engine], bucket_bytes=20_000)
    engine.inject(once(UPDATE, "hang", after=2))

    class After:
        """Counts as called once the third bucket was announced."""

        def count(self, engine: ReferenceEngine, path: str) -> bool:
            return trial.log.count(engine, path) >= 3

    with (
        pytest.raises(KeyboardInterrupt) as caught,
        interrupt_when(After(), engine, UPDATE),  # type: ignore[arg-type]
    ):
        trial.sender.update_weights(kit.llama(1))
    notes = " ".join(caught.value.__notes__)
    assert f"{engine.url} mixed" in notes
    assert "paused" in notes
    assert trial.resumes() == [0]
    trial.heal()


def test_c47_an_interrupted_process_ends_and_its_engine_goes_on(
    engine: ReferenceEngine, workplace: Trainers, weights_b: str
) -> None:
    """The broadcast never starts: nothing was applied."""
    kit.push(engine, kit.llama(0))
    log = kit.Log(engine)
    trainer = workplace.start(
        trainers.update_until_interrupted, url=engine.url, weights=weights_b, stalled=True
    )
    trainer.wait_for("stalled")
    kit.wait_for(lambda: log.count(engine, UPDATE))
    trainer.kill(signal.SIGINT)
    assert trainer.wait(40) == 0
    assert f"{engine.url} old" in trainer.output()
    assert log.count(engine, CONTINUE) == 1
    assert kit.served(engine) == kit.tokens_of(0)


def test_c47_a_process_that_is_told_to_end_settles_its_engine_first(
    engine: ReferenceEngine, workplace: Trainers, weights_b: str
) -> None:
    """SIGTERM, as a cluster's scheduler sends it."""
    kit.push(engine, kit.llama(0))
    log = kit.Log(engine)
    trainer = workplace.start(
        trainers.update_until_interrupted, url=engine.url, weights=weights_b, stalled=True
    )
    trainer.wait_for("stalled")
    kit.wait_for(lambda: log.count(engine, UPDATE))
    trainer.kill(signal.SIGTERM)
    assert trainer.wait(40) == 128 + signal.SIGTERM
    assert log.count(engine, CONTINUE) == 1
    assert kit.served(engine) == kit.tokens_of(0)


# ---- C63


NCCL = {"NCCL_P2P_DISABLE": "0", "NCCL_SHM_DISABLE": "0", "NCCL_CUMEM_ENABLE": "1"}


@pytest.mark.parametrize("settings", [NCCL, {}], ids=["set", "unset"])
@pytest.mark.parametrize("failing", [False, True])
def test_c63_no_variable_of_the_process_is_written(
    settings: dict[str, str],
    failing: bool,
    engine: ReferenceEngine,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in NCCL:
        monkeypatch.delenv(name, raising=False)
    for name, value in settings.items():
        monkeypatch.setenv(name, value)
    before = dict(os.environ)
    if failing:
        engine.inject(once(INIT, "refuse"))
        with pytest.raises(WeightUpdateError):
            kit.push(engine, kit.llama(1))
    kit.push(engine, kit.llama(1))
    after = {k: v for k, v in os.environ.items() if k != "PYTEST_CURRENT_TEST"}
    assert after == {k: v for k, v in before.items() if k != "PYTEST_CURRENT_TEST"}


# ---- C64


def test_c64_on_the_cpu_both_sides_use_gloo_and_cuda_is_never_touched(
    engine: ReferenceEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def forbidden(*_: Any, **__: Any) -> None:
        raise AssertionError("CUDA was touched")

    for name in ("_lazy_init", "current_stream", "synchronize", "set_device", "current_device"):
        monkeypatch.setattr(torch.cuda, name, forbidden)
    log = kit.Log(engine)
    with kit.make_sender(engine, device="cpu") as sender:
        sender.update_weights(kit.llama(1))
    assert log.bodies(engine, INIT)[0]["backend"] == "gloo"
    assert kit.served(engine) == kit.tokens_of(1)


def test_c64_a_backend_that_the_engine_refuses_is_named_with_its_words(
    engine: ReferenceEngine,
) -> None:
    engine.inject(once(INIT, "refuse", message="this server has nccl only"))
    with kit.make_sender(engine) as sender, pytest.raises(WeightUpdateError) as caught:
        sender.update_weights(kit.llama(1))
    assert "this server has nccl only" in str(caught.value)
    assert "gloo" in str(caught.value)
    assert caught.value.phase == "connect"


def test_c64_nccl_without_a_gpu_is_refused_at_construction() -> None:
    if torch.cuda.is_available():
        pytest.skip("this machine has CUDA")
    with pytest.raises(ConfigurationError, match="backend='gloo'"):
        SGLangWeightSyncScheme("http://127.0.0.1:1", backend="nccl")


# ---- C66


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_c66_shutting_down_twice_takes_no_time_when_the_peer_is_gone(
    number: signal.Signals, engine: ReferenceEngine
) -> None:
    sender = kit.make_sender(engine)
    sender.update_weights(kit.llama(1))
    os.kill(engine.pid, number)
    with kit.takes_at_most(10):  # 5 s are promised; the rest is for a busy machine
        sender.shutdown()
        sender.shutdown()


def test_c66_an_exit_without_a_shutdown_is_clean_when_the_engine_is_frozen(
    engine: ReferenceEngine, workplace: Trainers, weights_b: str
) -> None:
    trainer = workplace.start(trainers.update_once, url=engine.url, weights=weights_b)
    trainer.wait_for("version")
    os.kill(engine.pid, signal.SIGSTOP)
    trainer.go_on()
    assert trainer.wait(40) == 0, trainer.output()
    assert "Error" not in trainer.output()


# ---- C77


class Workers:
    """A collector with workers, as far as a scheme looks at it; here they are threads."""

    policy = None
    total = 0

    def __init__(self, scheme: SGLangWeightSyncScheme, num_workers: int) -> None:
        self.num_workers, self.counted = num_workers, [0] * num_workers
        scheme.init_on_sender(model_id="policy", context=self, ctx=multiprocessing)
        ends = scheme._worker_ends._ends
        for index, end in enumerate(ends):
            count_at(end, partial(self._count, index))
        ends.clear()  # connect() closes the parent's copies, and threads have no copies
        scheme.connect()

    def _count(self, index: int, _: int) -> list[str]:
        self.counted[index] += 1
        return []

    def increment_version(self) -> None:
        self.total += 1


@pytest.mark.parametrize("workers", [1, 2, 3])
def test_c77_a_push_for_any_worker_reaches_the_server_of_all_and_all_count_it(
    workers: int, engine: ReferenceEngine
) -> None:
    """They sample from the same servers: what one has, all have."""
    scheme = SGLangWeightSyncScheme(engine.url, timeout=60.0)
    collector = Workers(scheme, workers)
    named = [*range(workers), list(range(workers)), None]
    for times, worker_ids in enumerate(named, start=1):
        scheme.send(kit.llama(1), worker_ids)
        assert collector.counted == [times] * workers
    log = kit.Log(engine)
    for unknown in (workers, -1, [0, workers]):
        with pytest.raises(ConfigurationError, match=f"there are {workers}, counted from 0"):
            scheme.send(kit.llama(1), unknown)
    assert log.count(engine, PAUSE) == 0
    assert collector.counted == [len(named)] * workers
    scheme.shutdown()


# ---- C78


REBUILD = {
    "pickle": lambda value: pickle.loads(pickle.dumps(value)),
    "deepcopy": copy.deepcopy,
    "copy of a copy": lambda value: pickle.loads(pickle.dumps(copy.deepcopy(value))),
}


@pytest.mark.parametrize("rebuild", REBUILD.values(), ids=REBUILD.keys())
def test_c78_a_copy_of_a_connected_sender_connects_anew_and_leaves_the_first_alone(
    rebuild: Any, engine: ReferenceEngine
) -> None:
    log = kit.Log(engine)
    with kit.make_sender(engine) as sender:
        sender.register_model(kit.llama(0))
        sender.update_weights()
        with rebuild(sender) as twin:
            with pytest.raises(WeightUpdateError, match="register_model"):
                twin.update_weights()
            assert log.count(engine, INIT) == 1
            twin.update_weights(kit.llama(1))
            assert kit.served(engine) == kit.tokens_of(1)
        sender.update_weights()
        assert sender.engines[engine.url].state is EngineState.NEW
    assert kit.served(engine) == kit.tokens_of(0)


@pytest.mark.parametrize("rebuild", REBUILD.values(), ids=REBUILD.keys())
def test_c78_a_copied_scheme_has_every_option(rebuild: Any) -> None:
    scheme = SGLangWeightSyncScheme(
        ["http://a:1", "http://b:1"],
        "127.0.0.1",
        29_600,
        pause_mode="abort",
        bucket_bytes=7,
        dtype=torch.bfloat16,
        timeout=12.5,
        api_key="a",
        admin_api_key="b",
        on_failure="resume",
        quorum=1,
        verify="off",
    )
    twin = rebuild(scheme)
    assert twin.options == scheme.options
    assert twin.options.http.api_key == "a"
    assert twin.server_url == scheme.server_url


def test_c78_after_a_fork_the_child_is_refused_and_the_parent_goes_on(
    engine: ReferenceEngine, workplace: Trainers, weights_b: str
) -> None:
    trainer = workplace.start(trainers.update_after_fork, url=engine.url, weights=weights_b)
    assert trainer.wait(60) == 0, trainer.output()
    assert "child failed" in trainer.output()
    assert "parent updated" in trainer.output()
    assert kit.served(engine) == kit.tokens_of(1)
