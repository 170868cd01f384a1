"""Collectors that are Ray actors, of a local cluster."""

from __future__ import annotations

import pickle
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import version
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from tests.collectors import worlds
from tests.integration import kit
from tests.integration.kit import LEAVE, PAUSE, UPDATE
from tests.synchronizers import ray_cluster
from weight_update import SGLangWeightSyncScheme, WeightUpdateError
from weight_update.collectors.counting import Counters
from weight_update.collectors.remote_counting import register
from weight_update.reference_engine import Fault, ReferenceEngine

ray = pytest.importorskip("ray")

# Frames on their way when the engine was updated are taken before the ones that are looked at.
MOST_BATCHES = 40
PATIENCE = 120.0


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    """A cluster of this machine alone; actors run where tests cannot be imported."""
    me = sys.modules[__name__]
    for module in (worlds, me):
        ray.cloudpickle.register_pickle_by_value(module)
    with ray_cluster.cluster(ray, 3):
        yield
    for module in (worlds, me):
        ray.cloudpickle.unregister_pickle_by_value(module)


@dataclass
class Run:
    """A collector of two actors, who pushes to its engine, and what its frames carry."""

    collector: Any
    scheme: Any
    sender: Any
    batches: Iterator[Any]
    version: int = 0

    def reaches(self, expected: int) -> bool:
        """Whether frames come to carry a number, and never a higher one."""
        self.version = expected
        for batch in islice(self.batches, MOST_BATCHES):
            seen = set(batch["next", "policy_version"].flatten().tolist())
            if max(seen) > expected:
                return False
            if seen == {expected}:
                return True
        return False


def batches_of(collector: Any) -> Iterator[Any]:
    """What a collector yields; torchrl 0.13 frees batches by a call that Ray dropped."""
    if not version("torchrl").startswith("0.13"):
        yield from collector
    while True:
        for actor in collector.remote_collectors:
            yield ray.get(actor.next.remote(), timeout=PATIENCE)


@pytest.fixture(scope="module")
def shared(cluster: None, fleet: list[ReferenceEngine]) -> Iterator[Run]:
    """The run that tests share; its actors collect at their own pace."""
    from torchrl.collectors.distributed import RayCollector

    kit.push(fleet[0], kit.llama(0))
    scheme = SGLangWeightSyncScheme(fleet[0].url, timeout=60.0)
    scheme.register_model(kit.llama(1))
    collector = RayCollector(
        [worlds.Idle] * 2,
        policy_factory=worlds.client,
        frames_per_batch=4,
        total_frames=1_000_000,
        num_collectors=2,
        sync=False,
        remote_configs={"num_cpus": 1, "num_gpus": 0, "memory": 2**27},
        collector_kwargs={"track_policy_version": True},
        weight_sync_schemes={"policy": scheme},
    )
    sender = scheme.create_sender()
    for _ in range(2):
        sender.register_collector(collector)
    yield Run(collector, scheme, sender, batches_of(collector))
    sender.shutdown()
    collector.shutdown()


@pytest.fixture
def run(shared: Run, engine: ReferenceEngine) -> Run:
    """The shared run, with a training model."""
    shared.scheme.register_model(kit.llama(1))
    shared.sender.register_model(kit.llama(1))
    return shared


def left(engine: ReferenceEngine) -> int:
    """How many groups an engine was told to leave."""
    return sum(record["path"] == LEAVE for record in engine.requests())


@pytest.mark.parametrize("worker_ids", [None, 0], ids=["all", "the one that has a batch"])
def test_one_push_reaches_the_engine_and_all_actors_count_it_once(
    worker_ids: int | None, run: Run, engine: ReferenceEngine
) -> None:
    kit.push(engine, kit.llama(0))
    log = kit.Log(engine)
    run.collector.update_policy_weights_(worker_ids=worker_ids)
    assert log.count(engine, PAUSE) == 1
    assert kit.served(engine) == kit.tokens_of(1)
    assert run.reaches(run.version + 1)


def test_a_failed_push_is_raised_and_no_actor_counts_it(run: Run, engine: ReferenceEngine) -> None:
    engine.inject(Fault(UPDATE, "refuse", times=1))
    with pytest.raises(WeightUpdateError, match="injected fault"):
        run.collector.update_policy_weights_()
    assert run.reaches(run.version)
    run.collector.update_policy_weights_()
    assert run.reaches(run.version + 1)


def test_a_sender_that_the_collector_was_registered_with_twice_moves_its_actors_once(
    run: Run,
) -> None:
    """RayCollector itself has nothing that counts."""
    assert run.sender.update_weights().warnings == ()
    assert run.reaches(run.version + 1)


def test_the_collectors_shutdown_leaves_the_group(run: Run, engine: ReferenceEngine) -> None:
    run.collector.update_policy_weights_()
    group = run.scheme.sender_transports[0]
    assert group.check_connection()
    before = left(engine)
    run.collector.shutdown()
    assert left(engine) == before + 1
    assert not group.check_connection()
    assert not run.scheme.initialized_on_sender


# ---- actors of one's own


class Counting:
    """An actor that counts, and that can be kept busy."""

    def __init__(self) -> None:
        self.counted = 0

    def increment_version(self) -> None:
        self.counted += 1

    def version(self) -> int:
        return self.counted

    def work_until(self, file: str) -> None:
        while not Path(file).exists():
            time.sleep(0.01)


class Refusing(Counting):
    """One that cannot count."""

    def increment_version(self) -> None:
        raise KeyError("no tracker")


def start(kind: type) -> Any:
    handle = ray.remote(kind).options(num_cpus=0).remote()
    ray.get(handle.version.remote(), timeout=PATIENCE)
    return handle


def test_an_actor_counts_once_however_many_handles_stand_for_it(cluster: None) -> None:
    handle = start(Counting)
    counters = Counters()
    for twin in (handle, handle, pickle.loads(pickle.dumps(handle))):
        register(counters, twin)
    assert counters.count(1) == []
    assert ray.get(handle.version.remote(), timeout=PATIENCE) == 1
    ray.kill(handle)


def test_an_actor_that_is_busy_is_not_waited_for_and_counts_before_its_next_batch(
    cluster: None, tmp_path: Path
) -> None:
    handle = start(Counting)
    busy = handle.work_until.remote(str(tmp_path / "done"))
    counters = Counters()
    register(counters, handle)
    assert counters.count(1) == []
    counted = handle.version.remote()
    assert ray.wait([busy], timeout=0)[0] == []
    (tmp_path / "done").touch()
    assert ray.get(counted, timeout=PATIENCE) == 1
    ray.kill(handle)


@pytest.mark.parametrize("kind", [Counting, Refusing])
def test_what_an_actor_fails_at_is_told_by_then_or_with_the_next_version(
    kind: type, cluster: None
) -> None:
    handle = start(kind)
    counters = Counters()
    register(counters, handle)
    if kind is Counting:
        ray.kill(handle)
    expected = "is gone" if kind is Counting else "no tracker"
    deadline = time.monotonic() + PATIENCE
    words: list[str] = []
    while not words and time.monotonic() < deadline:
        words = counters.count(1)
    assert expected in words[0]


def test_an_actor_that_is_dead_is_told_of_once(cluster: None) -> None:
    dead, alive = start(Counting), start(Counting)
    counters = Counters()
    for handle in (dead, alive):
        register(counters, handle)
    ray.kill(dead)
    told: list[str] = []
    deadline = time.monotonic() + PATIENCE
    while not told and time.monotonic() < deadline:
        told = counters.count(1)
    assert ["is gone" in words for words in told] == [True]
    before = ray.get(alive.version.remote(), timeout=PATIENCE)
    assert counters.count(2) == []
    assert ray.get(alive.version.remote(), timeout=PATIENCE) == before + 1
    ray.kill(alive)


def test_an_actor_behind_a_collector_counts_once_and_as_a_handle_does(cluster: None) -> None:
    """``RayLLMCollector`` would wait for its actor, and names it by this attribute alone."""
    from torchrl.collectors.llm import RayLLMCollector

    handle = start(Counting)
    collector = RayLLMCollector.__new__(RayLLMCollector)
    collector._collector = handle
    counters = Counters()
    for one in (collector, handle, collector):
        register(counters, one)
    assert counters.count(1) == []
    assert ray.get(handle.version.remote(), timeout=PATIENCE) == 1
    ray.kill(handle)
