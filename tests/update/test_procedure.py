"""The procedure and the rule of the four states, on engines inside the process."""

from __future__ import annotations

import gc
import importlib.util
import itertools
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from weight_update import EngineState, UpdateTimeout, WeightUpdateError
from weight_update.facts import Intake
from weight_update.report import Progress
from weight_update.update.fleet import Fleet
from weight_update.update.planning import Payload
from weight_update.update.push import Push
from weight_update.waiting import Deadline
from weight_update.weights.extract import extract_weights

_spec = importlib.util.spec_from_file_location("fakes", Path(__file__).parent / "fakes.py")
assert _spec is not None
assert _spec.loader is not None
fakes = sys.modules["fakes"] = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(fakes)
house = fakes.house

BEFORE_ANY_BYTE = ("pause", "drain", "begin")
AFTER_ALL_BYTES = ("flush", "stamp", "resume")


def wait_for(condition: Callable[[], Any]) -> None:
    end = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < end, "condition never came true"
        time.sleep(0.01)


def failure_of(home: Any) -> WeightUpdateError:
    with pytest.raises(WeightUpdateError) as failure:
        home.push()
    assert failure.value.report is not None
    return failure.value


def states(error: WeightUpdateError) -> list[EngineState]:
    assert error.report is not None
    return [outcome.state for outcome in error.report.engines.values()]


def test_the_steps_run_in_order_on_every_engine() -> None:
    home = house(2)

    report = home.push()

    expected = ["observe", "inspect", "join", "pause", "drain", "begin", *["apply"] * 4]
    expected += ["end", "flush", *["observe", "stamp"], "resume", "observe"]
    calls = [engine.calls for engine in home.engines]
    side_by_side = slice(-4, -2)  # the look and the stamp
    for asked in calls:
        asked[side_by_side] = sorted(asked[side_by_side])
    assert calls == [expected] * 2
    assert report.version == 1
    assert report.buckets == 4
    assert [outcome.state for outcome in report.engines.values()] == [EngineState.NEW] * 2


def test_the_version_is_counted_after_every_label_and_before_any_continues() -> None:
    home = house(3)
    seen: list[Any] = []

    def count(version: int) -> list[str]:
        seen.extend((engine.shown, engine.paused) for engine in home.engines)
        return []

    weights = fakes.extract_weights({"a": fakes.torch.zeros(1)})
    home.updater.update(Push(lambda: Payload(weights), count))

    assert seen == [("1", True)] * 3


@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.parametrize("fault", ["refuse", "reset", "late", "bug"])
@pytest.mark.parametrize("call", BEFORE_ANY_BYTE)
def test_a_failure_before_any_byte_resumes_everyone_on_the_old_weights(
    call: str, fault: str, size: int
) -> None:
    home = house(size)
    home.engines[-1].fail(call, fault)

    error = failure_of(home)

    assert states(error) == [EngineState.OLD] * size
    assert [engine.calls.count("resume") for engine in home.engines] == [1] * size
    assert not any(engine.paused for engine in home.engines)
    assert home.counted == []
    assert home.updater.version == 0


@pytest.mark.parametrize("size", [1, 3])
def test_a_refused_first_bucket_leaves_the_refuser_old(size: int) -> None:
    home = house(size)
    home.engines[-1].fail("apply", "refuse")

    error = failure_of(home)

    assert states(error)[-1] is EngineState.OLD
    assert error.phase == "transfer"
    assert error.engine == home.engines[-1].url
    assert not home.engines[-1].paused
    assert home.groups[0].given_up


def test_nobody_leaves_a_group_where_there_was_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fakes.FakeGroup, "name", "")
    home = house(2)
    home.engines[-1].fail("apply", "refuse")

    failure_of(home)
    home.push()

    calls = {call for engine in home.engines for call in engine.calls}
    assert not calls & {"join", "leave"}


@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.parametrize(
    ("fault", "after"),
    [("refuse", 1), ("refuse", 3), ("partial", 0), ("partial", 2), ("reset", 0), ("late", 3)],
)
@pytest.mark.parametrize("on_failure", ["hold", "resume"])
def test_mixed_weights_are_held_unless_told_otherwise(
    fault: str, after: int, size: int, on_failure: str
) -> None:
    home = house(size, on_failure=on_failure)
    home.engines[-1].fail("apply", fault, after=after)

    error = failure_of(home)

    assert states(error)[-1] is EngineState.MIXED
    assert home.engines[-1].paused is (on_failure == "hold")
    assert ("paused" in str(error)) is (on_failure == "hold")
    assert home.updater.version == 0


@pytest.mark.parametrize("call", AFTER_ALL_BYTES)
@pytest.mark.parametrize("size", [1, 3])
def test_an_engine_with_everything_is_new_and_resumed_whatever_fails_afterwards(
    call: str, size: int
) -> None:
    home = house(size)
    home.engines[-1].fail(call, "refuse")

    error = failure_of(home)

    assert states(error) == [EngineState.NEW] * size
    assert not any(engine.paused for engine in home.engines)


def test_a_cache_that_cannot_be_flushed_makes_an_engine_mixed_in_so_many_words() -> None:
    home = house(2)
    home.engines[1].faults["flush"] = [fakes.refused(home.engines[1].url) for _ in range(9)]

    error = failure_of(home)

    assert states(error) == [EngineState.NEW, EngineState.MIXED]
    assert "weights new, cache stale" in str(error)
    assert home.engines[1].paused


def test_a_mixed_engine_stays_mixed_when_the_next_update_fails_early() -> None:
    home = house(1)
    home.engines[0].fail("apply", "refuse", after=2)
    failure_of(home)
    home.engines[0].fail("begin", "refuse")

    error = failure_of(home)

    assert states(error) == [EngineState.MIXED]
    assert home.engines[0].paused


@pytest.mark.parametrize("fault", ["refuse", "partial", "reset", "late"])
@pytest.mark.parametrize("call", [*BEFORE_ANY_BYTE, "apply", "end", *AFTER_ALL_BYTES])
@pytest.mark.parametrize("size", [1, 3])
def test_the_next_update_heals_everyone(call: str, fault: str, size: int) -> None:
    home = house(size)
    home.engines[-1].fail(call, fault)
    failed_with = failure_of(home)
    counted_before = failed_with.report.version if failed_with.report else 0

    report = home.push()

    assert [outcome.state for outcome in report.engines.values()] == [EngineState.NEW] * size
    assert not any(engine.paused or engine.open for engine in home.engines)
    assert report.version > counted_before
    assert {engine.shown for engine in home.engines} == {str(report.version)}


def test_a_dead_engine_is_unreachable_and_the_others_go_on() -> None:
    home = house(3)
    home.push()
    home.engines[1].dead = True

    error = failure_of(home)

    assert states(error)[1] is EngineState.UNREACHABLE
    assert not home.engines[0].paused
    assert not home.engines[2].paused


def test_a_session_that_a_dead_trainer_left_open_taints_the_engine_until_all_is_sent() -> None:
    home = house(1)
    home.engines[0].open = True
    home.engines[0].fail("apply", "refuse")

    error = failure_of(home)

    assert states(error) == [EngineState.MIXED]
    assert "another trainer left its update open" in str(error)


def test_bytes_that_never_leave_end_at_the_deadline_and_nothing_is_believed() -> None:
    home = house(2, timeout=2.0)
    home.push()
    home.groups[0].stuck.set()

    error = failure_of(home)

    assert isinstance(error, UpdateTimeout)
    assert states(error) == [EngineState.MIXED] * 2


def test_an_engine_that_went_back_to_its_first_label_is_joined_anew() -> None:
    home = house(2)
    home.push()
    home.engines[0].shown = "default"

    report = home.push()

    assert len(home.groups) == 2
    assert home.groups[0].given_up
    assert report.version == 2


def test_the_version_goes_on_from_the_highest_label() -> None:
    home = house(2)
    home.engines[1].shown = "41"

    assert home.push().version == 42


def test_an_interrupt_leaves_a_known_state_and_says_so() -> None:
    home = house(1)

    def interrupt(version: int) -> list[str]:
        raise KeyboardInterrupt

    weights = fakes.extract_weights({"a": fakes.torch.zeros(1)})
    with pytest.raises(KeyboardInterrupt) as raised:
        home.updater.update(Push(lambda: Payload(weights), interrupt))

    assert not home.engines[0].paused
    assert "new" in raised.value.__notes__[0]


def test_a_second_update_waits_for_the_first_no_longer_than_its_deadline() -> None:
    home = house(1, timeout=0.2)
    home.updater._busy.acquire()

    with pytest.raises(UpdateTimeout, match="another update"):
        home.push()


def test_engines_that_cannot_flush_are_named_in_a_warning() -> None:
    home = house(2)
    home.engines[1].can = False

    report = home.push()

    assert "Skipping the SGLang radix-cache flush" in report.warnings[0]
    assert home.engines[1].url in report.warnings[0]
    assert home.engines[0].url not in report.warnings[0]


@pytest.mark.parametrize("pair", list(itertools.combinations(["pause", "apply", "stamp"], 2)))
def test_two_faults_in_a_row_are_healed_as_one(pair: tuple[str, str]) -> None:
    home = house(2)
    for call in pair:
        home.engines[0].fail(call, "refuse")
        failure_of(home)

    assert home.push().engines[home.engines[0].url].state is EngineState.NEW


def test_a_warm_up_neither_heals_nor_resumes_a_mixed_engine() -> None:
    home = house(1)
    home.engines[0].fail("apply", "refuse", after=2)
    failure_of(home)

    home.updater.connect(fakes.torch.device("cpu"))
    wire = home.updater._wire
    wire._try(Fleet(home.updater.roster.members), fakes.Deadline(5))

    assert home.updater.engines[home.engines[0].url].state is EngineState.MIXED
    assert home.engines[0].paused


def test_a_failed_update_reports_what_this_update_did_not_what_the_last_did() -> None:
    home = house(2)
    home.push()
    home.engines[1].fail("observe", "refuse")

    error = failure_of(home)

    assert states(error)[0] is EngineState.OLD
    assert error.report is not None
    assert error.report.version == 1


class _Held:
    """Holds one call of an engine back until the test lets it go.

    The future of the call that is held is kept, since the updater forgets it with its update.
    """

    def __init__(
        self, engine: Any, call: str, *, then: Exception | None = None, member: Any = None
    ) -> None:
        self.gate = threading.Event()
        self.member, self.future = member, None
        self._enter, self._call, self._then = engine._enter, call, then
        self._spent = False
        engine._enter = self

    def __call__(self, call: str) -> None:
        self._enter(call)
        if call == self._call and not self._spent:
            self._spent = True
            if self.member is not None:
                wait_for(lambda: self.member.call is not None)
                self.future = self.member.call
            self.gate.wait(20)
            if self._then is not None:
                raise self._then


@pytest.mark.parametrize("fails", [True, False])
def test_an_answer_that_comes_after_its_attempt_changes_nothing_in_the_next(fails: bool) -> None:
    home = house(2)
    late = fakes.FAULTS["reset"](home.engines[1].url) if fails else None
    held = _Held(home.engines[1], "apply", then=late, member=home.updater.roster.members[1])
    home.engines[0].fail("apply", "refuse")
    assert states(failure_of(home))[1] is EngineState.MIXED
    home.engines[1].fail("apply", "refuse", after=3)
    second = _Held(home.engines[0], "begin")

    def let_go() -> None:
        wait_for(lambda: home.engines[0].calls[-1] == "begin")  # the next attempt is under way
        held.gate.set()
        wait_for(held.future.done)
        second.gate.set()

    threading.Thread(target=let_go, daemon=True).start()

    error = failure_of(home)

    assert states(error)[1] is EngineState.MIXED
    assert home.engines[1].paused
    report = home.push()
    assert not any(outcome.paused for outcome in report.engines.values())


def test_a_push_that_lacks_weights_of_the_failed_one_does_not_heal() -> None:
    home = house(2)
    home.engines[0].fail("apply", "refuse", after=2)
    failure_of(home)
    some = fakes.extract_weights({"a": fakes.torch.zeros(2)})

    with pytest.raises(WeightUpdateError, match="lacks 2 of the tensors") as failure:
        home.updater.update(Push(lambda: Payload(some, whole=False), lambda version: ()))

    assert failure.value.phase == "plan"
    assert home.engines[0].paused
    assert home.push().engines[home.engines[0].url].state is EngineState.NEW


@pytest.mark.parametrize("call", ["apply", "recover"])
def test_a_bug_in_a_client_is_never_taken_for_a_clean_engine(call: str) -> None:
    home = house(1)
    home.engines[0].fail("apply", "refuse" if call == "recover" else "bug", after=2)
    if call == "recover":
        home.engines[0].fail("recover", "bug")

    error = failure_of(home)

    assert states(error)[0] in (EngineState.MIXED, EngineState.UNREACHABLE)
    assert home.engines[0].paused


def test_a_slow_close_still_leaves_time_to_resume_a_clean_engine() -> None:
    home = house(1)
    home.engines[0].fail("begin", "refuse")
    home.engines[0].fail("recover", "late")

    error = failure_of(home)

    assert states(error) == [EngineState.OLD]
    assert not home.engines[0].paused


def test_an_engine_that_is_late_with_a_pause_still_drops_the_group() -> None:
    """No late request names it, so that dropping it ends no server."""
    home = house(1)
    home.engines[0].ends_without_group = True
    home.engines[0].fail("pause", "late")
    failure_of(home)

    home.updater.shutdown()

    assert "leave" in home.engines[0].calls


def test_a_look_that_fails_while_another_engine_hangs_ends_within_two_seconds() -> None:
    home = house(2)
    home.push()
    lost, hanging = home.engines
    lost.dead = True

    def hang(deadline: Deadline, **_: Any) -> Any:
        time.sleep(deadline.remaining())
        raise fakes.FAULTS["late"](hanging.url)

    hanging.observe = hanging.label = hang  # type: ignore[method-assign]
    start = time.monotonic()

    assert states(failure_of(home)) == [EngineState.UNREACHABLE] * 2
    assert time.monotonic() - start < 2


def test_collectors_that_hang_do_not_keep_the_engines_paused() -> None:
    home = house(1, timeout=4.0)
    weights = fakes.extract_weights({"a": fakes.torch.zeros(1)})
    release = threading.Event()

    def hang(version: int) -> list[str]:
        release.wait(20)
        return []

    report = home.updater.update(Push(lambda: Payload(weights), hang))
    release.set()

    assert not home.engines[0].paused
    assert "did not count the version in time" in report.warnings[0]


def test_an_engine_that_was_lost_is_joined_anew_once_it_is_back() -> None:
    home = house(2)
    home.push()
    home.engines[1].fail("stamp", "reset")
    home.engines[1].dead = False
    home.engines[1].faults["resume"] = [fakes.FAULTS["reset"](home.engines[1].url)]
    home.engines[1].faults["label"] = [fakes.FAULTS["reset"](home.engines[1].url)]

    error = failure_of(home)

    assert states(error)[1] is EngineState.UNREACHABLE
    home.push()
    assert len(home.groups) == 2


def test_a_survivor_is_known_to_serve_under_an_older_label_until_the_next_stamp() -> None:
    home = house(2)
    home.push()
    home.engines[1].fail("flush", "partial")
    home.engines[1].faults["flush"] *= 2
    first = failure_of(home)
    home.engines[1].fail("begin", "refuse")
    second = failure_of(home)

    url = home.engines[0].url
    for error in (first, second):
        assert error.report is not None
        assert "older label" in str(error.report.engines[url])
    assert "older label" not in str(home.push().engines[url])


def test_making_the_group_anew_forgets_no_doubt() -> None:
    home = house(1)
    home.engines[0].fail("apply", "refuse", after=2)
    failure_of(home)

    home.updater.connect(fakes.torch.device("cpu"))
    home.engines[0].fail("begin", "refuse")

    assert states(failure_of(home)) == [EngineState.MIXED]
    assert home.engines[0].paused


def test_a_partial_push_into_an_update_that_another_trainer_left_open_is_refused() -> None:
    home = house(1)
    home.engines[0].open = True
    some = fakes.extract_weights({"a": fakes.torch.zeros(2)})

    with pytest.raises(WeightUpdateError, match="another trainer") as failure:
        home.updater.update(Push(lambda: Payload(some, whole=False), lambda version: ()))

    assert states(failure.value) == [EngineState.MIXED]
    assert home.engines[0].paused
    assert home.push().engines[home.engines[0].url].state is EngineState.NEW


def test_a_restart_is_noted_although_another_engine_fails_in_the_same_look() -> None:
    home = house(2)
    home.push()
    home.engines[0].fail("apply", "refuse", after=2)
    failure_of(home)
    home.engines[0].shown, home.engines[0].paused = "default", False
    home.engines[1].dead = True

    outcomes = failure_of(home).report

    assert outcomes is not None
    assert outcomes.engines[home.engines[0].url].state is EngineState.OLD
    assert outcomes.engines[home.engines[1].url].state is EngineState.UNREACHABLE


def test_an_engine_that_dies_in_the_join_is_reported_as_lost() -> None:
    home = house(2)
    home.engines[1].fail("join", "reset")
    home.engines[1].fail("observe", "reset", after=1)
    home.engines[1].fail("label", "reset")

    assert states(failure_of(home)) == [EngineState.OLD, EngineState.UNREACHABLE]


def test_a_sender_dropped_without_a_shutdown_leaves_no_group_behind() -> None:
    home = house(1)
    home.push()
    group, engine = home.groups[0], home.engines[0]

    del home

    # A thread that has just given its result may hold the sender for a moment yet.
    wait_for(lambda: gc.collect() >= 0 and group.given_up)
    wait_for(lambda: engine.calls[-1] == "leave")


def test_a_shutdown_during_the_join_leaves_a_sender_that_works() -> None:
    home = house(1)
    held = _Held(home.engines[0], "join")

    def shut_down() -> None:
        wait_for(lambda: "join" in home.engines[0].calls)
        home.updater.shutdown()
        held.gate.set()

    threading.Thread(target=shut_down, daemon=True).start()

    assert "shut down while it connected" in str(failure_of(home))
    assert home.groups[0].given_up
    assert home.push().version == 1


def test_a_hook_that_calls_its_sender_is_refused_at_once() -> None:
    home = house(1)
    caught: list[WeightUpdateError] = []

    def call_again(_: Progress) -> None:
        try:
            home.push()
        except WeightUpdateError as error:
            caught.append(error)

    weights = extract_weights({"a": torch.zeros(2)})
    home.updater.update(Push(lambda: Payload(weights), lambda _: [], progress=call_again))

    assert "a hook of a running update called its sender" in str(caught[0])
    assert home.push().version == 2


def test_a_shape_that_an_engine_did_not_take_before_is_refused_beforehand() -> None:
    home = house(2)
    home.push()
    other = fakes.extract_weights({name: fakes.torch.zeros(2 + (name == "c")) for name in "abcd"})

    with pytest.raises(WeightUpdateError, match=r"'c' is \(3,\) now") as failure:
        home.updater.update(Push(lambda: Payload(other), lambda _: []))

    assert failure.value.phase == "plan"
    assert not any(engine.paused for engine in home.engines)


def test_of_many_wrong_shapes_the_first_few_are_told() -> None:
    home = house(1)
    home.push()
    other = fakes.extract_weights({name: fakes.torch.zeros(3) for name in "abcd"})

    with pytest.raises(WeightUpdateError, match=r"4 weight\(s\) .*'c' is .*; \.\.\.") as failure:
        home.updater.update(Push(lambda: Payload(other), lambda _: []))

    assert "'d'" not in str(failure.value)


def test_a_restarted_engine_may_take_other_shapes() -> None:
    home = house(1)
    home.push()
    home.engines[0].instance, home.engines[0].shown = "second", "default"
    other = fakes.extract_weights({name: fakes.torch.zeros(3) for name in "abcd"})

    assert home.updater.update(Push(lambda: Payload(other), lambda _: [])).version == 2


def test_a_pause_that_was_never_answered_is_told_of() -> None:
    home = house(1)
    home.engines[0].fail("pause", "late")

    (outcome,) = failure_of(home).report.engines.values()

    assert (outcome.state, outcome.paused) == (EngineState.OLD, True)
    assert "may still take effect" in outcome.detail
    assert not home.push().engines[outcome.url].paused


def test_an_engine_that_never_answers_leaves_time_for_a_quorum() -> None:
    home = house(3, quorum=2, timeout=2.0)
    release = threading.Event()
    home.engines[2].workers = lambda deadline: release.wait(20) and ()
    home.engines[2].dead = True

    report = home.push()
    release.set()

    states_ = [report.engines[engine.url].state for engine in home.engines]
    assert states_ == [EngineState.NEW, EngineState.NEW, EngineState.UNREACHABLE]


def test_an_engine_whose_model_cannot_be_looked_at_may_be_quantised_and_the_report_says_so():
    home = fakes.house(2)
    home.engines[1].intake = Intake(unread=True)
    warnings = home.push().warnings
    assert [text.partition(": ")[0] for text in warnings] == [home.engines[1].url]
    assert "not known whether its checkpoint is quantised" in warnings[0]
