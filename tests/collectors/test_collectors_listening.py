"""Hooks and loggers of a scheme hear its updates, whoever asked for them.

Pins: what a collector drove went by no sender, and nobody heard of it.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from torchrl.collectors import Collector, MultiSyncCollector

from tests.collectors import llm_kit, worlds
from tests.integration import kit
from tests.integration.kit import UPDATE
from weight_update import ConfigurationError, EngineRejected, SGLangWeightSyncScheme
from weight_update.reference_engine import Fault, ReferenceEngine


class Rows:
    """A logger that keeps what it is told, by step."""

    def __init__(self) -> None:
        self.rows: list[tuple[int, dict[str, float]]] = []

    def log_scalar(self, name: str, value: float, step: int) -> None:
        raise AssertionError("an update is one row")

    def log_metrics(self, metrics: dict[str, float], step: int) -> None:
        self.rows.append((step, metrics))

    def of(self, name: str) -> list[tuple[int, float]]:
        return [(step, row[f"weight_update/{name}"]) for step, row in self.rows]


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A busy machine writes late: tests read what was logged once it is."""
    monkeypatch.setattr("weight_update.schemes.loggers._PATIENCE_SECONDS", 60.0)


@pytest.fixture
def scheme(engine: ReferenceEngine) -> Iterator[SGLangWeightSyncScheme]:
    """A scheme with a training model, of an engine that stands at version 0."""
    kit.relabel(engine, "0")
    made = SGLangWeightSyncScheme(engine.url, timeout=60.0)
    made.register_model(kit.llama(1))
    yield made
    made.shutdown()


def collect(scheme: Any) -> Any:
    return Collector(
        worlds.Idle(),
        worlds.client(),
        frames_per_batch=4,
        total_frames=400,
        track_policy_version=True,
        weight_sync_schemes={"policy": scheme},
        trust_policy=True,
    )


def collect_in_workers(scheme: Any) -> Any:
    return MultiSyncCollector(
        [worlds.Idle] * 2,
        policy_factory=worlds.client,
        frames_per_batch=8,
        total_frames=80,
        track_policy_version=True,
        weight_sync_schemes={"policy": scheme},
    )


def attach(scheme: Any) -> Any:
    collector = llm_kit.collector(llm_kit.policy(scheme.server_url))
    scheme.attach(collector)
    return collector


@pytest.mark.parametrize("make", [collect, collect_in_workers, attach])
def test_an_update_that_a_collector_drives_is_heard_once(
    make: Callable[[Any], Any], scheme: SGLangWeightSyncScheme
) -> None:
    heard, rows = [], Rows()
    scheme.register_post_hook(heard.append)
    scheme.register_logger(rows)
    collector = make(scheme)
    try:
        assert heard == rows.rows == []  # the group was made, and nothing was sent
        collector.update_policy_weights_()
        collector.update_policy_weights_()
    finally:
        collector.shutdown()

    assert [report.version for report in heard] == [1, 2]
    assert rows.of("updates") == [(1, 1), (2, 2)]
    assert rows.of("bytes") == [(report.version, report.bytes) for report in heard]


@pytest.mark.parametrize(("make", "counted"), [(collect, 0), (collect_in_workers, 1)])
def test_a_hook_runs_before_a_collector_counts_and_after_worker_processes_have(
    make: Callable[[Any], Any], counted: int, scheme: SGLangWeightSyncScheme
) -> None:
    seen: list[int] = []
    collector = make(scheme)
    scheme.register_post_hook(lambda: seen.append(int(collector.policy_version)))
    try:
        collector.update_policy_weights_()
    finally:
        collector.shutdown()
    assert seen == [counted]


def test_a_failed_update_of_a_collector_is_logged_and_no_hook_runs(
    engine: ReferenceEngine, scheme: SGLangWeightSyncScheme
) -> None:
    heard, rows = [], Rows()
    scheme.register_post_hook(heard.append)
    scheme.register_logger(rows)
    collector = collect(scheme)
    engine.inject(Fault(UPDATE, "refuse", times=1))

    with pytest.raises(EngineRejected):
        collector.update_policy_weights_()
    assert heard == []
    collector.update_policy_weights_()
    collector.shutdown()

    assert rows.of("failures") == [(0, 1), (1, 1)]
    assert [report.version for report in heard] == [1]


def test_an_update_without_anything_to_send_is_logged_as_a_failed_one(
    engine: ReferenceEngine,
) -> None:
    scheme, rows = SGLangWeightSyncScheme(engine.url, timeout=60.0), Rows()
    scheme.register_logger(rows)
    collector = collect(scheme)

    with pytest.raises(ConfigurationError, match="no weights to send"):
        collector.update_policy_weights_()
    collector.shutdown()

    assert [value for _, value in rows.of("failures")] == [1]


def test_updates_of_the_schemes_senders_are_heard_too(scheme: SGLangWeightSyncScheme) -> None:
    heard: list[str] = []
    scheme.register_post_hook(lambda: heard.append("scheme"))
    with scheme.create_sender() as sender:
        sender.register_post_hook(lambda: heard.append("sender"))
        sender.update_weights(kit.llama(1))
    assert heard == ["scheme", "sender"]

    collector = collect(scheme)
    collector.update_policy_weights_()
    collector.shutdown()
    assert heard == ["scheme", "sender", "scheme"]


@pytest.mark.parametrize("first", ["scheme", "sender"])
def test_a_logger_of_the_scheme_and_of_its_sender_writes_an_update_once(
    first: str, scheme: SGLangWeightSyncScheme
) -> None:
    rows = Rows()
    with scheme.create_sender() as sender:
        order = [scheme, sender] if first == "scheme" else [sender, scheme]
        for each in order:
            each.register_logger(rows)
        sender.update_weights(kit.llama(1))
    assert [step for step, _ in rows.rows] == [1]


def test_listeners_follow_a_scheme_to_another_collector(scheme: SGLangWeightSyncScheme) -> None:
    rows = Rows()
    scheme.register_logger(rows)
    for _ in range(2):
        collector = collect(scheme)
        collector.update_policy_weights_()
        collector.shutdown()
    assert rows.of("updates") == [(1, 1), (2, 2)]


def test_listeners_stay_with_the_process_that_registered_them(
    scheme: SGLangWeightSyncScheme,
) -> None:
    """A scheme crosses to workers whatever listens to it."""
    scheme.register_post_hook(lambda: None)
    scheme.register_logger(Rows())
    twin = pickle.loads(pickle.dumps(scheme))
    assert twin.listeners is not scheme.listeners
    twin.register_post_hook(lambda: None)


def test_a_hook_that_counts_for_a_driven_collector_is_refused(
    scheme: SGLangWeightSyncScheme,
) -> None:
    """It would count each update twice."""
    collector = collect(scheme)
    with pytest.raises(ConfigurationError, match="counts by itself"):
        scheme.register_post_hook(collector.increment_version)
    collector.shutdown()
