"""The SGLang rows over NeMo-RL's own objects: what is called, in which order, whatever fails."""

from __future__ import annotations

from concurrent.futures import Future
from typing import Any
from unittest.mock import MagicMock

import pytest

from weight_update import ConfigurationError, EngineState, MissingSetting, WeightUpdateError
from weight_update.synchronizers import (
    SGLangColocatedWeightSynchronizer,
    SGLangDisaggregatedWeightSynchronizer,
)

from .nemo import (
    FREE_BYTES,
    INFO_BYTES,
    Journal,
    LaterNemoSGLang,
    NemoPolicy,
    NemoSGLang,
    done,
    failed,
)

Kind = type[SGLangColocatedWeightSynchronizer] | type[SGLangDisaggregatedWeightSynchronizer]
COLOCATED, APART = SGLangColocatedWeightSynchronizer, SGLangDisaggregatedWeightSynchronizer
BOTH = pytest.mark.parametrize("kind", [COLOCATED, APART])

PREPARE = ["G.prepare weights", "P.free", "G.engines"]
CONNECT = ["P.connect", "G.clear"]
SEND = ["G.pause", "G.begin", "P.send", "G.end", "G.invalidate", "G.continue"]
LEAVE = {COLOCATED: ["P.restore", "G.prepare kv_cache"], APART: ["G.prepare kv_cache"]}
ENTER = {COLOCATED: ["P.offload"], APART: []}


def made(kind: Kind, *, new: int = 2, later: bool = False, **options: Any) -> tuple[Any, Journal]:
    journal = Journal()
    generation = (LaterNemoSGLang if later else NemoSGLang)(journal, new)
    return kind(NemoPolicy(journal), generation, **options), journal


@BOTH
def test_the_first_refit_connects_and_the_next_does_not(kind: Kind):
    sync, journal = made(kind)
    sync.sync_weights()
    assert journal.take() == ENTER[kind] + PREPARE + CONNECT + SEND + LEAVE[kind]
    sync.sync_weights()
    assert journal.take() == ENTER[kind] + PREPARE + SEND + LEAVE[kind]


@BOTH
def test_an_engine_that_restarted_is_connected_to(kind: Kind):
    sync, journal = made(kind)
    sync.sync_weights()
    journal.take()
    sync.generation.new = 1
    sync.sync_weights()
    assert journal.take() == ENTER[kind] + PREPARE + CONNECT + SEND + LEAVE[kind]


@BOTH
@pytest.mark.parametrize("later", [False, True])
def test_both_forms_of_the_accessor_are_taken(kind: Kind, later: bool):
    sync, journal = made(kind, later=later)
    sync.sync_weights()
    sent = journal.arguments["P.send"]
    assert sent["engines"] == ["engine 0", "engine 1"]
    assert journal.arguments["P.connect"]["counts"] == [2, 2]
    if kind is APART:
        assert sent["lock"] == "the lock"


@BOTH
def test_the_policy_is_told_precision_and_size(kind: Kind, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("NRL_REFIT_BUFFER_MEMORY_RATIO", "0.5")
    sync, journal = made(kind)
    sync.sync_weights()
    sent = journal.arguments["P.send"]
    assert sent["buffer_size_bytes"] == FREE_BYTES // 2
    assert sent["precision"] == "bf16"
    assert sent["quantization"] == {"scheme": "bf16", "group_size": 16}


@BOTH
def test_a_size_that_is_given_needs_no_look_at_memory(kind: Kind):
    sync, journal = made(kind, refit_buffer_size_gb=2)
    sync.sync_weights()
    assert journal.arguments["P.send"]["buffer_size_bytes"] == 2 * 1024**3
    assert "P.free" not in journal.calls


@BOTH
def test_the_first_thing_is_what_will_come(kind: Kind):
    sync, journal = made(kind)
    sync.init_communicator()
    assert journal.take() == ["P.info", "G.info"]
    assert sync.sync_weights()["bytes"] == INFO_BYTES


# What fails, how often, and what is called from there on before the phases end.
FAILURES = [
    ("G.prepare weights", 1, []),
    ("P.free", 1, []),
    ("G.engines", 1, []),
    ("P.connect", 1, []),
    ("G.clear", 1, []),
    ("G.pause", 1, ["G.continue"]),
    ("G.begin", 1, ["G.continue"]),
    ("P.send", 1, ["G.end"]),
    ("G.end", 1, ["G.end", "G.invalidate", "G.continue"]),
    ("G.end", 9, ["G.end"]),
    ("G.invalidate", 1, ["G.invalidate", "G.continue"]),
    ("G.invalidate", 9, ["G.invalidate"]),
    ("G.continue", 1, ["G.continue"]),
]


@BOTH
@pytest.mark.parametrize(("step", "times", "then"), FAILURES)
def test_after_a_failure_phases_are_restored(kind: Kind, step: str, times: int, then: list[str]):
    sync, journal = made(kind)
    journal.fail(step, times=times)
    with pytest.raises(WeightUpdateError, match=f"{step} broke") as caught:
        sync.sync_weights()
    called = journal.take()
    assert called[called.index(step) + 1 :] == then + LEAVE[kind]
    assert isinstance(caught.value.__cause__, RuntimeError)
    assert caught.value.report is not None
    assert sync.is_stale
    journal.faults.clear()
    sync.sync_weights()
    assert not sync.is_stale


STATES = [
    ("G.pause", 1, EngineState.OLD, False),
    ("G.begin", 1, EngineState.OLD, False),
    ("P.send", 1, EngineState.MIXED, True),
    ("G.end", 1, EngineState.NEW, False),
    ("G.end", 9, EngineState.MIXED, True),
    ("G.invalidate", 1, EngineState.NEW, False),
    ("G.invalidate", 9, EngineState.MIXED, True),
]


@BOTH
@pytest.mark.parametrize(("step", "times", "state", "paused"), STATES)
def test_a_mixed_engine_is_held(
    kind: Kind, step: str, times: int, state: EngineState, paused: bool
):
    sync, journal = made(kind)
    journal.fail(step, times=times)
    with pytest.raises(WeightUpdateError) as caught:
        sync.sync_weights()
    (outcome,) = caught.value.report.engines.values()
    assert (outcome.state, outcome.paused) == (state, paused)
    assert ("G.continue" in journal.calls) is not paused


@BOTH
def test_the_next_refit_heals_an_engine_that_was_held(kind: Kind):
    sync, journal = made(kind)
    journal.fail("P.send")
    with pytest.raises(WeightUpdateError):
        sync.sync_weights()
    journal.take()
    sync.sync_weights()
    called = journal.take()
    assert called == ENTER[kind] + PREPARE + CONNECT + SEND + LEAVE[kind], "and it connects anew"


def test_a_trainer_that_could_not_offload_is_restored_and_engines_are_left_alone():
    sync, journal = made(COLOCATED)
    journal.fail("P.offload")
    with pytest.raises(WeightUpdateError, match=r"offload_before_refit\(\) failed"):
        sync.sync_weights()
    assert journal.take() == ["P.offload", "P.restore"]


def test_engines_get_their_cache_though_the_trainer_could_not_be_restored():
    sync, journal = made(COLOCATED)
    journal.fail("P.restore")
    with pytest.raises(WeightUpdateError, match=r"offload_after_refit\(\) failed"):
        sync.sync_weights()
    assert journal.take()[-2:] == LEAVE[COLOCATED]
    assert sync.is_stale


def test_what_failed_first_is_raised_and_what_failed_then_is_noted():
    sync, journal = made(COLOCATED)
    journal.fail("P.send")
    journal.fail("P.restore")
    with pytest.raises(WeightUpdateError, match=r"P\.send broke") as caught:
        sync.sync_weights()
    assert any("P.restore broke" in note for note in caught.value.__notes__)


@BOTH
def test_a_worker_that_fails_is_the_cause(kind: Kind):
    sync, journal = made(kind)
    cause = ValueError("out of memory on rank 3")
    journal.futures["P.send"] = [done(None), failed(cause)]
    with pytest.raises(RuntimeError, match=r"Weight transfer failed: .*rank 3") as caught:
        sync.sync_weights()
    assert caught.value.__cause__ is cause


@BOTH
@pytest.mark.parametrize("answer", [[], [done(False)], done(False), [[done(True)], [done(0)]]])
def test_a_policy_of_which_nobody_sent_failed(kind: Kind, answer: Any):
    sync, journal = made(kind)
    journal.futures["P.send"] = answer
    with pytest.raises(WeightUpdateError, match="Weight transfer failed"):
        sync.sync_weights()
    assert sync.is_stale


@BOTH
def test_no_worker_answers_within_the_time_that_is_given(kind: Kind):
    sync, journal = made(kind, refit_timeout_s=0.1)
    journal.futures["P.send"] = [Future()]
    with pytest.raises(TimeoutError, match="did not answer within"):
        sync.sync_weights()
    assert journal.take()[-len(LEAVE[kind]) :] == LEAVE[kind]


# -- refused before any phase -------------------------------------------------------------


@BOTH
@pytest.mark.parametrize("free", [None, "much", [], float("inf")])
def test_a_policy_that_does_not_know_its_free_memory_is_told_so(kind: Kind, free: Any):
    sync, journal = made(kind)
    sync.policy.get_free_memory_bytes = lambda: free
    with pytest.raises(ConfigurationError, match="which is no number of bytes"):
        sync.sync_weights()
    assert journal.take()[-len(LEAVE[kind]) :] == LEAVE[kind]


@BOTH
def test_scales_of_a_cache_are_refused(kind: Kind):
    sync, journal = made(kind)
    with pytest.raises(ValueError, match=r"do not support kv_scales; got \['a', 'b'\]"):
        sync.sync_weights(kv_scales={"b": 1.0, "a": 0.5})
    assert journal.take() == []


@BOTH
@pytest.mark.parametrize("without", ["quantization", "scheme"])
def test_quantization_has_to_be_said(kind: Kind, without: str):
    sync, journal = made(kind)
    settings = sync.generation.sglang_cfg["sglang_cfg"]
    (settings if without == "quantization" else settings["quantization"]).pop(without)
    with pytest.raises(KeyError, match=without) as caught:
        sync.sync_weights()
    assert isinstance(caught.value, MissingSetting)
    assert journal.take() == []


@BOTH
def test_an_unknown_quantization_is_refused(kind: Kind):
    sync, journal = made(kind)
    sync.generation.sglang_cfg["sglang_cfg"]["quantization"]["scheme"] = "fp7"
    with pytest.raises(ValueError, match="must be one of bf16, mxfp8, nvfp4"):
        sync.sync_weights()
    assert journal.take() == []


@BOTH
@pytest.mark.parametrize(
    ("ratio", "words"), [("much", "must be a valid float"), ("0", "must be > 0")]
)
def test_an_unreadable_share_is_refused(
    kind: Kind, ratio: str, words: str, monkeypatch: pytest.MonkeyPatch
):
    sync, journal = made(kind)
    monkeypatch.setenv("NRL_REFIT_BUFFER_MEMORY_RATIO", ratio)
    with pytest.raises(ValueError, match=f"NRL_REFIT_BUFFER_MEMORY_RATIO {words}"):
        sync.sync_weights()
    assert journal.take() == []


@BOTH
def test_a_pause_that_keeps_the_cache_is_refused(kind: Kind):
    journal = Journal()
    generation = NemoSGLang(journal)
    generation.pause_generation_mode = "in_place"
    with pytest.raises(ValueError, match="unsafe for weight refit"):
        kind(NemoPolicy(journal), generation)
    assert journal.take() == []


@BOTH
def test_sides_that_cannot_hand_over_are_refused(kind: Kind):
    with pytest.raises(ConfigurationError, match=r"a object has no update_weights_to_sglang"):
        kind(object(), NemoSGLang(Journal()))


@BOTH
@pytest.mark.parametrize("seconds", [0, -1.0, float("nan"), "10", 1e30, 10**400])
def test_a_time_that_is_none_is_refused(kind: Kind, seconds: Any):
    with pytest.raises(ConfigurationError, match="refit_timeout_s"):
        made(kind, refit_timeout_s=seconds)


# -- engines that NeMo-RL restarts --------------------------------------------------------


@BOTH
def test_dead_engines_are_restarted_first_where_that_is_configured(kind: Kind):
    sync, journal = made(kind)
    settings = {"use_fault_tolerance": True}
    sync.generation.sglang_cfg["sglang_cfg"]["sglang_fault_tolerance_config"] = settings
    sync.sync_weights()
    start = [*ENTER[kind], "G.recover", *PREPARE]
    assert journal.take()[: len(start)] == start


@BOTH
def test_engines_that_could_not_be_restarted_are_asked_nothing(kind: Kind):
    sync, journal = made(kind)
    settings = {"use_fault_tolerance": True}
    sync.generation.sglang_cfg["sglang_cfg"]["sglang_fault_tolerance_config"] = settings
    journal.fail("G.recover")
    with pytest.raises(WeightUpdateError, match=r"G\.recover broke"):
        sync.sync_weights()
    assert journal.take() == (
        ["P.offload", "G.recover", "P.restore"] if kind is COLOCATED else ["G.recover"]
    )


@BOTH
def test_membership_is_the_generations(kind: Kind):
    sync, _ = made(kind)
    assert sync.reconcile_communicator([0], force=True) is None


# -- mocks, which have every name ---------------------------------------------------------


def mocked(answer: Any, method: str) -> tuple[MagicMock, MagicMock]:
    policy, generation = MagicMock(), MagicMock()
    policy.get_free_memory_bytes.return_value = FREE_BYTES
    generation.sglang_cfg = {"sglang_cfg": {"quantization": {"scheme": "bf16"}}}
    generation.pause_generation_mode = "abort"
    getattr(generation, method).return_value = answer
    return policy, generation


@BOTH
@pytest.mark.parametrize(
    ("method", "answer"),
    [
        ("get_updatable_engines", (["e"], 1, [1], [0])),
        ("get_updatable_engines_and_lock", (["e"], "lock", 1, [1], [0])),
    ],
)
def test_of_a_mock_the_answer_tells_which_form_it_is(kind: Kind, method: str, answer: Any):
    policy, generation = mocked(answer, method)
    sync = kind(policy, generation)
    sync.sync_weights()
    generation.pause_generation.assert_called_once_with(mode="abort")
    generation.clear_updatable_num_new_engines.assert_called_once_with()
    generation.continue_generation.assert_called_once_with()
    assert not sync.is_stale


@BOTH
def test_of_a_mock_without_an_answer_it_is_said_what_is_missing(kind: Kind):
    policy, generation = mocked(None, "prepare_refit_info")
    with pytest.raises(ConfigurationError, match="does not say which engines there are"):
        kind(policy, generation).sync_weights()
    generation.pause_generation.assert_not_called()
