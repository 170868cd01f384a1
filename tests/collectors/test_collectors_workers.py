"""Collectors with worker processes: one push for all, and every frame has the number it needs."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from typing import Any

import pytest
from tensordict import TensorDict
from torchrl.collectors import MultiAsyncCollector, MultiSyncCollector

from tests.collectors import worlds
from tests.integration import kit
from tests.integration.kit import INIT, LEAVE, PAUSE, UPDATE
from weight_update import ConfigurationError, SGLangWeightSyncScheme, WeightUpdateError
from weight_update.reference_engine import Fault, ReferenceEngine

# Frames on their way when the engine was updated are taken before the ones that are looked at.
MOST_BATCHES = 40


@dataclass
class Run:
    """A collector with two workers, which is shared by tests, and who pushes to its engine."""

    collector: Any
    scheme: Any
    senders: list[Any]
    batches: Iterator[Any]

    @property
    def version(self) -> int:
        """What the parent knows."""
        return int(self.collector.policy_version)

    def reaches(self, expected: int) -> bool:
        """Whether frames come to carry a number, and never a higher one."""
        for batch in islice(self.batches, MOST_BATCHES):
            seen = set(batch["next", "policy_version"].flatten().tolist())
            if max(seen) > expected:
                return False
            if seen == {expected}:
                return True
        return False


KINDS = {"sync": MultiSyncCollector, "async": MultiAsyncCollector}


@pytest.fixture(scope="module", params=KINDS)
def shared(request: pytest.FixtureRequest, fleet: list[ReferenceEngine]) -> Iterator[Run]:
    """A run of each kind: one's policies have parameters, the other's ask the engine."""
    kit.push(fleet[0], kit.llama(0))
    scheme = SGLangWeightSyncScheme(fleet[0].url, timeout=60.0)
    asks = request.param == "async"
    collector = KINDS[request.param](
        [worlds.Idle] * 2,
        policy_factory=worlds.asking(fleet[0].url) if asks else worlds.layer,
        frames_per_batch=8,
        total_frames=-1,
        weight_sync_schemes={"policy": scheme},
        track_policy_version=True,
    )
    senders = [scheme.create_sender() for _ in range(2)]
    for sender in (*senders, senders[0]):
        sender.register_collector(collector)
    yield Run(collector, scheme, senders, iter(collector))
    for one in (*senders, collector):
        one.shutdown()


@pytest.fixture
def run(shared: Run, engine: ReferenceEngine) -> Run:
    """The shared run, with a training model."""
    shared.scheme.register_model(kit.llama(1))
    for sender in shared.senders:
        sender.register_model(kit.llama(1))
    return shared


CALLS: dict[str, Callable[[Any], Any]] = {
    "the registered model": lambda c: c.update_policy_weights_(),
    "a module": lambda c: c.update_policy_weights_(kit.llama(1)),
    "weights": lambda c: c.update_policy_weights_(weights=dict(kit.llama(1).state_dict())),
    "the old name": lambda c: c.update_policy_weights_(
        policy_weights=TensorDict(dict(kit.llama(1).state_dict()))
    ),
    "one worker": lambda c: c.update_policy_weights_(worker_ids=1),
    "both workers": lambda c: c.update_policy_weights_(worker_ids=[0, 1]),
}


@pytest.mark.parametrize("call", CALLS)
def test_one_push_reaches_the_engine_and_all_workers_count_it_once(
    call: str, run: Run, engine: ReferenceEngine
) -> None:
    kit.push(engine, kit.llama(0))
    log = kit.Log(engine)
    before = run.version
    CALLS[call](run.collector)
    assert log.count(engine, PAUSE) == 1
    assert kit.served(engine) == kit.tokens_of(1)
    assert run.version == before + 1
    assert run.reaches(before + 1)


def test_a_failed_push_is_raised_and_no_worker_counts_it(run: Run, engine: ReferenceEngine) -> None:
    before = run.version
    engine.inject(Fault(UPDATE, "refuse", times=1))
    with pytest.raises(WeightUpdateError, match="injected fault"):
        run.collector.update_policy_weights_()
    assert run.version == before
    assert run.reaches(before)
    run.collector.update_policy_weights_()
    assert run.reaches(before + 1)


@pytest.mark.parametrize("index", [0, 1])
def test_a_sender_that_a_collector_was_registered_with_moves_its_workers(
    index: int, run: Run
) -> None:
    """The parent's number alone would move by TorchRL's own means. The first has it twice."""
    before = run.version
    assert run.senders[index].update_weights().warnings == ()
    assert run.version == before + 1
    assert run.reaches(before + 1)


def test_a_failed_update_of_a_sender_moves_no_worker(run: Run, engine: ReferenceEngine) -> None:
    before = run.version
    engine.inject(Fault(UPDATE, "refuse", times=1))
    with pytest.raises(WeightUpdateError, match="injected fault"):
        run.senders[0].update_weights()
    assert run.version == before
    assert run.reaches(before)


def test_workers_that_collect_already_cannot_be_registered(run: Run) -> None:
    if not isinstance(run.collector, MultiAsyncCollector):
        pytest.skip("between two batches its workers wait")
    assert run.reaches(run.version)
    with (
        run.scheme.create_sender() as sender,
        pytest.raises(ConfigurationError, match="before its first batch"),
    ):
        sender.register_collector(run.collector)


def test_no_frame_of_new_weights_carries_an_older_number(run: Run, engine: ReferenceEngine) -> None:
    """Its workers count while the engine is paused; their policies act out its version."""
    if not isinstance(run.collector, MultiAsyncCollector):
        pytest.skip("its policies do not ask the engine")
    ahead = int(kit.label(engine)) - run.version
    for _ in range(3):
        run.collector.update_policy_weights_()
        for batch in islice(run.batches, 6):
            made_by = batch["action"].flatten() - ahead
            assert (batch["next", "policy_version"].flatten() >= made_by).all()


def are_gone(processes: Any) -> bool:
    """Whether processes end; torchrl 0.13.3 tells a slow one to and does not wait for it."""
    for process in processes:
        process.join(60)
    return not any(process.is_alive() for process in processes)


def shut_down(collector: Any) -> None:
    """Shut down a collector that has a dead worker, at which torchrl 0.13.3 stops with an error."""
    try:
        collector.shutdown()
    except ValueError:
        for process in collector.procs:
            with suppress(ValueError):  # it was closed
                process.terminate()
                process.join(60)


def test_death_and_afterlife(engine: ReferenceEngine) -> None:
    """A dead worker is warned of; nothing outlives the collector; its scheme drives another."""
    scheme = SGLangWeightSyncScheme(engine.url, timeout=60.0)
    scheme.register_model(kit.llama(1))
    log = kit.Log(engine)
    others = set(multiprocessing.active_children())

    def make(workers: int, **options: Any) -> Any:
        return MultiSyncCollector(
            [worlds.Idle] * workers,
            policy_factory=worlds.client,
            frames_per_batch=4 * workers,
            total_frames=-1,
            weight_sync_schemes={"policy": scheme},
            track_policy_version=True,
            **options,
        )

    first = make(2)
    first.procs[1].kill()
    first.procs[1].join(60)
    first.update_policy_weights_()
    assert int(first.policy_version) == 1
    shut_down(first)
    assert are_gone(set(multiprocessing.active_children()) - others)
    assert log.count(engine, LEAVE) == 1
    assert not scheme.initialized_on_sender

    second = make(1, update_at_each_batch=True)
    stamped = [b["next", "policy_version"].flatten().tolist() for b in islice(iter(second), 2)]
    assert stamped == [[1] * 4, [2] * 4]
    with pytest.raises(RuntimeError, match="drives MultiSyncCollector already"):
        scheme.connect()
    second.shutdown()
    assert are_gone(set(multiprocessing.active_children()) - others)
    assert log.count(engine, INIT) == log.count(engine, LEAVE) == 2
