"""A short soak holds, and each of its checks notices what it is there for."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.cli.kit import run
from weight_update import EngineOutcome, EngineState, UpdateReport
from weight_update.bench.soak.checks import Ledger, Seen, lies_in, unhealed
from weight_update.bench.soak.faults import troubles
from weight_update.bench.soak.models import PROMPTS, Judge, Stretch
from weight_update.bench.soak.plot import plot
from weight_update.bench.soak.run import Sample, SoakJob, SoakResult, Struck, run_soak
from weight_update.bench.soak.traffic import TOKENS, Answer
from weight_update.bench.soak.vitals import ENOUGH_SAMPLES, Vitals, trends, vitals_of

URL = "http://a:1"

# A busy machine may overrun a deadline and be slow to answer; how far is told by the long run.
SHORT = SoakJob(updates=30, clients=1, seed=369, busy=True, sample_every=2)


# -- the run ---------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def result() -> SoakResult:
    return run_soak(SHORT, lambda _: None)


def test_nothing_is_wrong_in_a_short_soak(result: SoakResult):
    assert result.problems == []


def test_updates_are_disturbed_and_go_on_succeeding(result: SoakResult):
    assert result.struck
    assert result.succeeded >= SHORT.updates - len(result.struck)


def test_every_request_is_answered(result: SoakResult):
    assert result.answers["answers"] == result.answers["asked"] > 0


def test_answers_across_updates_are_judged_token_by_token(result: SoakResult):
    judged = result.answers["made by the versions they name"]

    assert result.answers["of several versions"] > 0
    assert judged > 0.5 * result.answers["answers"]


def test_undisturbed_threads_and_descriptors_of_the_trainer_are_flat():
    trends = run_soak(replace(SHORT, faults=0.0), lambda _: None).trends
    mine = [trend for trend in trends if "the trainer" in trend.what]

    assert len(mine) == 4
    assert all(trend.flat for trend in mine), mine


def test_disturbed_all_is_flat_but_for_connections_that_are_opened_again(result: SoakResult):
    """An engine that restarts has none at first; a leak has one more with every update."""
    *flat, descriptors = sorted(
        (trend for trend in result.trends if "the trainer" in trend.what),
        key=lambda trend: trend.what.startswith("descriptors"),
    )
    updates_between = SHORT.updates * 3 // 5

    assert len(flat) == 3
    assert all(trend.flat for trend in flat), flat
    assert descriptors.late - descriptors.early < updates_between / 2


def test_the_result_is_json_data_with_a_row_a_process_and_look(result: SoakResult):
    data = result.to_dict()

    assert len(data["rows"]) == SHORT.updates // SHORT.sample_every * (1 + SHORT.engines)
    assert data["settings"]["seed"] == SHORT.seed
    assert data["versions"]["torch"] == torch.__version__


# -- what is noticed -------------------------------------------------------------------------


@pytest.fixture(scope="module")
def judge() -> Judge:
    return Judge()


@pytest.fixture
def ledger(judge: Judge) -> Ledger:
    """One engine that served model 1 as version 1, then model 2 as version 2."""
    book = Ledger(judge)
    book.note(URL, Seen(False, "1", False, 1), "retract")
    book.note(URL, Seen(False, "2", False, 2), "retract")
    return book


def answer(judge: Judge, **changes: Any) -> Answer:
    right = Answer(URL, 0, "1", judge.greedy(1, 0, TOKENS), [("1", 0, TOKENS)])
    return replace(right, **changes)


def test_a_right_answer_is_right(judge: Judge, ledger: Ledger):
    assert list(ledger.faults_of(answer(judge))) == []
    assert ledger.counts["made by the versions they name"] == 1


def wrong_answers(judge: Judge) -> dict[str, Answer]:
    ids = judge.greedy(1, 0, TOKENS)
    torn = [*ids[:-1], (ids[-1] + 1) % 64]
    return {
        "not of the versions it names": answer(judge, spans=[("2", 0, TOKENS)]),
        "names: Answer": answer(judge, output=torn),
        "never served": answer(judge, spans=[("3", 0, TOKENS)]),
        "of 24 tokens": answer(judge, output=ids[:-1]),
        "versions of 20": answer(judge, spans=[("1", 0, 20)]),
        "lost: gone": answer(judge, trouble="gone"),
        "never killed": answer(judge, drops=1),
    }


@pytest.mark.parametrize(
    "words",
    [
        "not of the versions it names",
        "names: Answer",
        "never served",
        "of 24 tokens",
        "versions of 20",
        "lost: gone",
        "never killed",
    ],
)
def test_a_wrong_answer_is_noticed(words: str, judge: Judge, ledger: Ledger):
    assert words in "; ".join(ledger.faults_of(wrong_answers(judge)[words]))


def test_a_broken_connection_is_forgiven_if_the_engine_was_killed(judge: Judge, ledger: Ledger):
    ledger.killed(URL)

    assert list(ledger.faults_of(answer(judge, drops=1))) == []


def continued(judge: Judge, *, carried: bool) -> list[int]:
    """Twelve tokens of model 1, then twelve of model 2 over its or its own keys and values."""
    head = judge.greedy(1, 3, 12)
    past = None
    with torch.inference_mode():
        if carried:
            ids = torch.tensor([[*PROMPTS[3], *head[:-1]]])
            past = judge.models[1](input_ids=ids, use_cache=True).past_key_values
        tokens = [*PROMPTS[3], *head]
        for _ in range(12):
            done = 0 if past is None else past.get_seq_length()
            out = judge.models[2](
                input_ids=torch.tensor([tokens[done:]]), past_key_values=past, use_cache=True
            )
            past = out.past_key_values
            tokens.append(int(out.logits[0, -1].argmax()))
    return tokens[len(PROMPTS[3]) :]


def test_tokens_over_old_keys_and_values_are_told_from_recomputed_ones(judge: Judge):
    stretches = [Stretch(1, 0, 12), Stretch(2, 12, TOKENS)]
    frozen = [stretches[0], replace(stretches[1], carried=True)]
    recomputed, carried = continued(judge, carried=False), continued(judge, carried=True)

    assert recomputed != carried
    assert judge.made_by(3, recomputed, stretches)
    assert judge.made_by(3, carried, frozen)
    assert not judge.made_by(3, carried, stretches)


NEW = EngineOutcome(URL, EngineState.NEW, "2", paused=False)
HOLDS_NEW = Seen(False, "2", False, 2)
HELD_OLD = Seen(False, "1", False, 1)


def report(outcome: EngineOutcome) -> UpdateReport:
    return UpdateReport(2, 1, 1, 1, {}, {URL: outcome})


def test_a_true_report_is_believed():
    assert not list(lies_in(report(NEW), {URL: HOLDS_NEW}, {URL: HELD_OLD}, 2))
    assert not list(unhealed(report(NEW), {URL: HOLDS_NEW}, 2))


@pytest.mark.parametrize(
    ("outcome", "seen", "words"),
    [
        (NEW, replace(HOLDS_NEW, seed=1), "it holds model 1, and model 2 was pushed"),
        (NEW, replace(HOLDS_NEW, seed=None), "it holds a mixture"),
        (NEW, replace(HOLDS_NEW, label="1"), "it shows version 1"),
        (NEW, replace(HOLDS_NEW, paused=True), "it is paused"),
        (replace(NEW, paused=True), HOLDS_NEW, "it is not paused"),
        (replace(NEW, state=EngineState.OLD), HOLDS_NEW, "and held model 1"),
        (replace(NEW, state=EngineState.MIXED), HOLDS_NEW, "mixed and not held"),
        (replace(NEW, state=EngineState.UNREACHABLE), HOLDS_NEW, "it answers"),
    ],
)
def test_a_false_report_is_noticed(outcome: EngineOutcome, seen: Seen, words: str):
    lies = list(lies_in(report(outcome), {URL: seen}, {URL: HELD_OLD}, 2))

    assert words in "; ".join(lies)


def test_on_a_busy_machine_an_engine_may_be_called_lost_that_answers_afterwards():
    lost = replace(NEW, state=EngineState.UNREACHABLE)
    silent = report(replace(lost, detail="no answer while it was being settled"))

    assert not list(lies_in(silent, {URL: HOLDS_NEW}, {URL: HELD_OLD}, 2, busy=True))
    assert list(lies_in(silent, {URL: HOLDS_NEW}, {URL: HELD_OLD}, 2))
    assert list(lies_in(report(lost), {URL: HOLDS_NEW}, {URL: HELD_OLD}, 2, busy=True))


def test_an_engine_that_an_undisturbed_update_left_behind_is_noticed():
    assert list(unhealed(report(NEW), {URL: HELD_OLD}, 2))


# -- what is measured ------------------------------------------------------------------------


def steady(count: int = 50) -> list[Vitals]:
    return [Vitals(400_000_000, 7, 30, 0)] * count


@pytest.mark.parametrize(
    ("growth", "figure"),
    [
        (lambda i: Vitals(400_000_000 + 2_000_000 * i, 7, 30, 0), "memory"),
        (lambda i: Vitals(400_000_000, 7 + i // 5, 30, 0), "threads"),
        (lambda i: Vitals(400_000_000, 7, 30 + i // 4, 0), "descriptors"),
        (lambda i: Vitals(400_000_000, 7, 30 + i // 8, i // 8), "CLOSE_WAIT"),
    ],
)
def test_what_grows_is_not_flat(growth: Any, figure: str):
    leaking = trends("it", [growth(index) for index in range(50)])

    assert [figure in trend.what for trend in leaking if not trend.flat] == [True]


def test_what_stays_is_flat():
    assert all(trend.flat for trend in trends("it", steady()))


def test_a_full_pool_of_idle_connections_is_flat():
    pooled = [Vitals(400_000_000, 7, 30 + min(i, 4), min(i, 4)) for i in range(50)]

    assert all(trend.flat for trend in trends("it", pooled))


def test_a_few_samples_are_not_judged():
    assert trends("it", steady(ENOUGH_SAMPLES - 1)) == []


def test_an_engine_is_judged_by_its_longest_life():
    short = [Sample(i, "engine 0", 1, Vitals(10, 99, 99, 0)) for i in range(10)]
    long = [Sample(10 + i, "engine 0", 2, vitals) for i, vitals in enumerate(steady())]

    assert {trend.early for trend in SoakResult(SHORT, samples=[*short, *long]).trends} <= {
        *(400.0, 7.0, 30.0, 0.0)
    }


def test_a_pipe_shows_in_the_descriptors():
    before = vitals_of(os.getpid())
    ends = os.pipe()
    after = vitals_of(os.getpid())
    for end in ends:
        os.close(end)

    assert before is not None
    assert after is not None
    assert after.fds == before.fds + 2


def test_a_process_that_ended_has_no_vitals():
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()

    assert vitals_of(process.pid) is None


def test_growth_fails_the_run():
    leaking = [Vitals(400_000_000, 7 + index, 30, 0) for index in range(50)]
    samples = [Sample(index, "the trainer", 1, vitals) for index, vitals in enumerate(leaking)]

    assert not SoakResult(SHORT, samples=samples).ok


def test_the_picture_shows_every_process_and_fault(tmp_path: Path):
    samples = [
        Sample(i, name, 1, v)
        for name in ("the trainer", "engine 0")
        for i, v in enumerate(steady(20))
    ]
    struck = [Struck(3, 0, "kill", "succeeded", True), Struck(5, 0, "slow", "succeeded", False)]
    plot(SoakResult(SHORT, samples=samples, struck=struck), tmp_path / "soak.svg")

    drawn = (tmp_path / "soak.svg").read_text()
    assert "<svg" in drawn
    assert "engine 0" in drawn


# -- the command -----------------------------------------------------------------------------


def test_every_step_of_an_update_has_its_troubles():
    named = {each.fault.path for kind in troubles().values() for each in kind if each.fault}

    assert len(named) == 9


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--engines", "1"), "two engines at least"),
        (("--updates", "0"), "updates"),
        (("--faults", "2"), "faults"),
    ],
)
def test_a_soak_that_cannot_be_run_is_refused_at_once(arguments: tuple[str, ...], words: str):
    done = run("bench", "soak", *arguments)

    assert done.code == 2
    assert words in done.err
