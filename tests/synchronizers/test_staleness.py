"""Staleness: true until a success, and true again from the start of every sync."""

from __future__ import annotations

from contextlib import contextmanager
from typing import Any

import pytest

from weight_update import WeightUpdateError
from weight_update.synchronizers import IPCWeightSynchronizer

from .nemo import Journal, NemoPolicy, NemoVLLM

STEPS = [
    "P.offload",
    "G.prepare weights",
    "P.free",
    "P.stream",
    "G.open",
    "P.restore",
    "G.prepare kv_cache",
]


def fresh() -> tuple[IPCWeightSynchronizer, Journal]:
    journal = Journal()
    sync = IPCWeightSynchronizer(NemoPolicy(journal), NemoVLLM(journal))
    sync.sync_weights()
    assert not sync.is_stale
    return sync, journal


@pytest.mark.parametrize("step", STEPS)
def test_a_failure_after_a_success_leaves_it_stale(step: str):
    sync, journal = fresh()
    journal.fail(step)
    with pytest.raises(WeightUpdateError):
        sync.sync_weights()
    assert sync.is_stale
    sync.sync_weights()
    assert not sync.is_stale


def test_it_is_stale_while_a_sync_runs():
    sync, _ = fresh()
    seen: list[bool] = []

    class Looking:
        @contextmanager
        def time(self, label: str) -> Any:
            seen.append(sync.is_stale)
            yield

    sync.sync_weights(timer=Looking())
    assert seen == [True]


def test_a_shutdown_leaves_it_stale_and_may_be_repeated():
    sync, _ = fresh()
    sync.shutdown()
    sync.shutdown()
    assert sync.is_stale


def test_an_interrupt_leaves_it_stale_and_phases_restored():
    sync, journal = fresh()
    journal.take()
    journal.faults["P.free"] = [KeyboardInterrupt()]  # type: ignore[list-item]
    with pytest.raises(KeyboardInterrupt):
        sync.sync_weights()
    assert sync.is_stale
    assert journal.take()[-2:] == ["P.restore", "G.prepare kv_cache"]


def test_the_transfer_is_timed_under_one_label_with_the_look_at_memory():
    sync, journal = fresh()
    journal.take()

    class Timing:
        @contextmanager
        def time(self, label: str) -> Any:
            journal.note(label)
            yield
            journal.note("end")

    sync.sync_weights(timer=Timing())
    called = journal.take()
    label = "prepare_for_generation/transfer_and_update_weights"
    assert called[called.index(label) : called.index("end")] == [
        label,
        "P.free",
        "P.stream",
        "G.open",
    ]


def test_a_logger_gets_numbers():
    sync, _ = fresh()
    numbers = sync.sync_weights()
    assert numbers is not None
    assert numbers["version"] == 2.0
    assert numbers["transfer_seconds"] >= 0.0
    assert all(isinstance(value, float) for value in numbers.values())
