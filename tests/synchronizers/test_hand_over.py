"""The hand-over: two sides as one engine of the one update procedure."""

from __future__ import annotations

import threading
from concurrent.futures import Future
from typing import Any

import pytest

from weight_update import ConfigurationError, EngineState, WeightUpdateError
from weight_update.options import FLUSH_VARIABLE
from weight_update.synchronizers import (
    IPCWeightSynchronizer,
    SGLangDisaggregatedWeightSynchronizer,
)
from weight_update.synchronizers.exchange import Refit
from weight_update.synchronizers.hand_over import hand_over
from weight_update.synchronizers.rows.vllm import IPCExchange

from .nemo import INFO_BYTES, Journal, NemoPolicy, NemoSGLang, NemoVLLM


def sglang() -> tuple[SGLangDisaggregatedWeightSynchronizer, Journal]:
    journal = Journal()
    made = SGLangDisaggregatedWeightSynchronizer(NemoPolicy(journal), NemoSGLang(journal))
    return made, journal


def test_the_report_is_that_of_any_update():
    sync, _ = sglang()
    sync.init_communicator()
    sync.sync_weights()
    sync.sync_weights()
    report = sync.report
    assert report is not None
    assert (report.version, report.bytes, report.pause_mode) == (2, INFO_BYTES, "retract")
    (name,) = report.engines
    assert name.startswith("NemoSGLang-")
    assert report.engines[name].state is EngineState.NEW
    assert report.warnings == ()


def test_what_is_not_told_counts_no_bytes():
    sync, _ = sglang()
    sync.policy.prepare_refit_info = lambda: None
    sync.init_communicator()
    numbers = sync.sync_weights()
    assert numbers is not None
    assert numbers["bytes"] == 0.0


def test_a_mode_that_only_the_generation_knows_is_its_own():
    journal = Journal()
    generation = NemoSGLang(journal)
    generation.pause_generation_mode = "drain"
    SGLangDisaggregatedWeightSynchronizer(NemoPolicy(journal), generation).sync_weights()
    assert journal.arguments["G.pause"] == {"mode": "drain"}


def test_a_generation_that_keeps_its_cache_is_not_asked_to_empty_it():
    journal = Journal()
    generation: Any = NemoSGLang(journal)
    generation.kv_policy = "keep"
    sync = SGLangDisaggregatedWeightSynchronizer(NemoPolicy(journal), generation)
    sync.sync_weights()
    assert "G.invalidate" not in journal.calls
    assert sync.report is not None
    assert "was not flushed, as configured" in sync.report.warnings[0]


def test_the_environment_may_keep_the_cache(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv(FLUSH_VARIABLE, "no")
    sync, journal = sglang()
    sync.sync_weights()
    assert "G.invalidate" not in journal.calls


def test_a_cache_that_is_not_emptied_fails_the_refit():
    sync, journal = sglang()
    sync.generation.flushes = False
    with pytest.raises(RuntimeError, match="KV cache invalidation failed") as caught:
        sync.sync_weights()
    assert isinstance(caught.value, WeightUpdateError)
    assert "G.continue" not in journal.calls, "prefixes of older weights would be used"


def test_two_refits_of_two_jobs_do_not_wait_for_each_other():
    waiting, going = sglang(), sglang()
    answer: Future[None] = Future()
    waiting[1].futures["P.send"] = [answer]
    first = threading.Thread(target=waiting[0].sync_weights)
    first.start()
    going[0].sync_weights()
    answer.set_result(None)
    first.join(30)
    assert not waiting[0].is_stale
    assert not going[0].is_stale


def test_an_end_of_the_same_update_is_not_asked_for_if_it_never_began():
    sync, journal = sglang()
    journal.fail("G.begin")
    with pytest.raises(WeightUpdateError):
        sync.sync_weights()
    assert "G.end" not in journal.calls


def test_a_success_counts_and_a_failure_does_not():
    sync, journal = sglang()
    sync.sync_weights()
    journal.fail("P.send")
    with pytest.raises(WeightUpdateError) as caught:
        sync.sync_weights()
    assert caught.value.report is not None
    assert caught.value.report.version == 1
    sync.sync_weights()
    assert sync.report is not None
    assert sync.report.version == 2


def test_an_error_before_the_update_tells_what_engines_hold():
    journal = Journal()
    sync = IPCWeightSynchronizer(NemoPolicy(journal), NemoVLLM(journal))
    sync.sync_weights()
    journal.fail("G.prepare weights")
    with pytest.raises(WeightUpdateError) as caught:
        sync.sync_weights()
    assert caught.value.report is not None
    assert caught.value.report.version == 1
    assert len(caught.value.report.engines) == 1


def test_weights_of_workers_are_not_copied_here():
    with pytest.raises(ConfigurationError, match="are not here"):
        hand_over(IPCExchange(NemoPolicy(Journal()), NemoVLLM(Journal()))).snapshot(Refit(1))
