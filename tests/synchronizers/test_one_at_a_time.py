"""Several threads, a fork and interrupts: phases of two syncs never undo each other."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from weight_update import ConfigurationError, UpdateTimeout, WeightUpdateError
from weight_update.synchronizers import IPCWeightSynchronizer
from weight_update.waiting import spawn

from .nemo import Journal, NemoPolicy, NemoVLLM
from .test_rows_ours import EVERY
from .test_rows_ours import made as ours

SECONDS = 30.0


def made(**options: Any) -> tuple[IPCWeightSynchronizer, Journal]:
    journal = Journal()
    return IPCWeightSynchronizer(NemoPolicy(journal), NemoVLLM(journal), **options), journal


class Hook:
    """A timer that does something in the middle of a sync."""

    def __init__(self, call: Any) -> None:
        self._call = call

    @contextmanager
    def time(self, label: str) -> Iterator[None]:
        self._call()
        yield


def test_a_second_thread_waits_until_the_first_has_restored_its_phases():
    sync, journal = made()
    inside, go_on = threading.Event(), threading.Event()

    def hold() -> None:
        inside.set()
        assert go_on.wait(SECONDS)

    first = spawn(lambda: sync.sync_weights(timer=Hook(hold)))
    assert inside.wait(SECONDS)
    second = spawn(sync.sync_weights)
    go_on.set()
    first.result(SECONDS)
    second.result(SECONDS)
    phases = [call for call in journal.take() if call in ("P.offload", "P.restore")]
    assert phases == ["P.offload", "P.restore"] * 2
    assert not sync.is_stale


def test_a_second_thread_does_not_wait_for_ever_and_changes_no_phase():
    sync, journal = made(refit_timeout_s=0.1)
    errors: list[WeightUpdateError] = []

    def another() -> None:
        threading.Thread(target=lambda: errors.append(refused(sync)), daemon=True).start()
        assert wait_until(lambda: bool(errors))

    sync.sync_weights(timer=Hook(another))
    assert isinstance(errors[0], UpdateTimeout)
    assert journal.count("P.offload") == 1


def refused(sync: Any) -> WeightUpdateError:
    with pytest.raises(WeightUpdateError) as caught:
        sync.sync_weights()
    return caught.value


def wait_until(condition: Any) -> bool:
    ticks, never = range(int(SECONDS * 100)), threading.Event()
    return any(condition() or never.wait(0.01) for _ in ticks)


def test_a_hook_of_a_sync_cannot_begin_another():
    sync, journal = made()
    with pytest.raises(ConfigurationError, match="a hook of a running update"):
        sync.sync_weights(timer=Hook(sync.sync_weights))
    assert journal.take()[-2:] == ["P.restore", "G.prepare kv_cache"]
    sync.sync_weights()


def test_a_sync_that_began_before_a_shutdown_does_not_make_it_fresh():
    sync, _ = made()
    sync.sync_weights(timer=Hook(sync.shutdown))
    assert sync.is_stale


@EVERY
def test_a_fork_is_refused_before_any_phase(row: str, monkeypatch: pytest.MonkeyPatch):
    sync, journal = ours(row)
    child = os.getpid() + 1
    monkeypatch.setattr(os, "getpid", lambda: child)
    for call in (sync.sync_weights, sync.init_communicator):
        with pytest.raises(ConfigurationError, match="does not survive a fork"):
            call()
    assert journal.take() == []


def test_an_interrupt_while_phases_are_restored_is_not_swallowed():
    sync, journal = made()
    journal.fail("P.stream")
    journal.faults["P.restore"] = [KeyboardInterrupt()]  # type: ignore[list-item]
    with pytest.raises(KeyboardInterrupt) as caught:
        sync.sync_weights()
    assert any("P.stream broke" in note for note in caught.value.__notes__)
    assert journal.take()[-1] == "G.prepare kv_cache"


def test_of_two_steps_that_fail_afterwards_the_second_is_noted():
    sync, journal = made()
    journal.fail("P.restore")
    journal.fail("G.prepare kv_cache")
    with pytest.raises(WeightUpdateError, match=r"P\.restore broke") as caught:
        sync.sync_weights()
    assert any("G.prepare kv_cache broke" in note for note in caught.value.__notes__)
