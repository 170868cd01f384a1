"""Section D of the case list: the prefix cache, pauses, and requests in flight."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from typing import Any

import pytest

from tests.integration import kit
from tests.integration.kit import BEGIN, CONTINUE, FLUSH, PAUSE, UPDATE
from weight_update import ConfigurationError, SGLangWeightSyncScheme, UpdateTimeout
from weight_update.engines.sglang.engine import SGLangEngine
from weight_update.options import HttpOptions
from weight_update.reference_engine import Fault, ReferenceEngine
from weight_update.rollouts import salted
from weight_update.waiting import Deadline

from .fake_http import HEALTHY, Answer, Asked, FakeServer
from .trial import MIXED, Trial, once

PROMPTS = [kit.PROMPT, kit.PROMPT[:4], [*kit.PROMPT, 7, 7], [60, 61, 62]]


@pytest.fixture
def at_a(engine: ReferenceEngine) -> ReferenceEngine:
    """The engine on model A, with several prompts and prefixes of each other in its cache."""
    kit.push(engine, kit.llama(0))
    for prompt in PROMPTS:
        engine.generate(prompt, kit.TOKENS)
    return engine


def stale_prefixes(engine: ReferenceEngine) -> int:
    """How many prompts get something else than model B's answer, or hit a cached prefix."""
    stale = 0
    for prompt in PROMPTS:
        answer = engine.generate(prompt, kit.TOKENS)
        stale += answer["output_ids"] != kit.greedy(kit.llama(1), prompt)
    return stale


# ---- C09


@pytest.mark.parametrize("mode", ["retract", "abort"])
@pytest.mark.parametrize("bucket_bytes", [None, 25_000])
def test_c09_no_prefix_of_the_old_weights_is_served_where_the_mode_can_flush(
    mode: str, bucket_bytes: int | None, at_a: ReferenceEngine
) -> None:
    log = kit.Log(at_a)
    with kit.make_sender(at_a, pause_mode=mode, bucket_bytes=bucket_bytes) as sender:
        report = sender.update_weights(kit.llama(1))
    assert report.warnings == ()
    assert stale_prefixes(at_a) == 0
    flushed = [r["json"].get("flush_cache", False) for r in log.records(at_a, UPDATE)]
    assert not any(flushed[:-1])
    flushes = log.records(at_a, FLUSH)
    assert flushed[-1] or flushes
    for flush in flushes:
        assert log.records(at_a, UPDATE)[-1]["t1"] <= flush["t0"]
        assert flush["t1"] <= log.records(at_a, CONTINUE)[0]["t0"]


def test_c09_where_the_mode_cannot_flush_every_report_says_so(at_a: ReferenceEngine) -> None:
    with kit.make_sender(at_a, pause_mode="in_place") as sender:
        report = sender.update_weights(kit.llama(1))
    assert any(at_a.url in w and "may still be served" in w for w in report.warnings)
    assert stale_prefixes(at_a) > 0  # the warning is true


def test_c09_where_a_stale_cache_is_refused_nothing_is_paused(at_a: ReferenceEngine) -> None:
    log = kit.Log(at_a)
    with (
        kit.make_sender(at_a, pause_mode="in_place", stale_cache="refuse") as sender,
        pytest.raises(ConfigurationError, match="flush") as caught,
    ):
        sender.update_weights(kit.llama(1))
    assert at_a.url in str(caught.value)
    assert log.count(at_a, PAUSE) == 0


def test_c09_a_salted_request_stays_clear_of_old_prefixes(at_a: ReferenceEngine) -> None:
    """The means that a caller gets where the cache cannot be flushed."""
    request = {"input_ids": kit.PROMPT, "sampling_params": {"max_new_tokens": kit.TOKENS}}
    request["sampling_params"]["temperature"] = 0.0
    kit.served(at_a)
    with kit.make_sender(at_a, pause_mode="in_place") as sender:
        report = sender.update_weights(kit.llama(1))
    assert any("salted" in warning for warning in report.warnings)
    answer = at_a.call("POST", "/generate", salted(request, report.version))
    assert answer["output_ids"] == kit.tokens_of(1)


def test_c09_a_flush_that_comes_later_ends_the_warning(at_a: ReferenceEngine) -> None:
    with kit.make_sender(at_a, pause_mode="in_place") as sender:
        sender.update_weights(kit.llama(1))
        assert sender.flush_cache() is True
    assert stale_prefixes(at_a) == 0


# ---- C10


@pytest.fixture(scope="module")
def release_0_5_21() -> Iterator[ReferenceEngine]:
    with ReferenceEngine(kit.llama(0), release="0.5.21") as running:
        yield running


@pytest.fixture
def flushed_apart(release_0_5_21: ReferenceEngine) -> Iterator[ReferenceEngine]:
    """An engine whose flush is a call of its own, since no update request may carry it."""
    yield release_0_5_21
    kit.revive(release_0_5_21)


def test_c10_a_refused_flush_is_asked_for_again_with_growing_pauses(
    flushed_apart: ReferenceEngine,
) -> None:
    trial = Trial([flushed_apart])
    flushed_apart.inject(Fault(FLUSH, "refuse", times=5, message="requests are waiting"))
    trial.sender.update_weights(kit.llama(1))
    trial.check_new()
    flushes = trial.log.records(flushed_apart, FLUSH)
    assert [record["status"] for record in flushes] == [400] * 5 + [200]
    pauses = [after["t0"] - before["t1"] for before, after in pairwise(flushes)]
    least = [0.02, 0.05, 0.1, 0.2, 0.5]  # a busy machine only makes them longer
    assert all(pause >= bound for pause, bound in zip(pauses, least, strict=True))


@pytest.mark.parametrize("status", [400, 500, 503])
def test_c10_a_flush_refused_until_the_deadline_counts_as_mixed_in_these_words(
    status: int, flushed_apart: ReferenceEngine
) -> None:
    trial = Trial([flushed_apart])
    flushed_apart.inject(Fault(FLUSH, "refuse", status=status, message="3 requests are waiting"))
    error = trial.fail(2.0)
    assert isinstance(error, UpdateTimeout)
    assert error.phase == "flush"
    assert "weights new, cache stale" in str(error)
    assert "3 requests are waiting" in str(error)
    assert trial.states(error) == [MIXED]
    assert trial.resumes() == [0]
    flushed_apart.clear_faults()
    trial.heal()


SAYS_UPDATED = "Weights were updated, but the cache was not flushed: requests are waiting"


@pytest.mark.parametrize("mode", ["retract", "abort"])
def test_c10_a_flush_refused_inside_the_update_is_asked_for_again_by_the_flush_step(
    mode: str, engine: ReferenceEngine
) -> None:
    trial = Trial([engine], pause_mode=mode)
    engine.inject(once(UPDATE, "refuse", when="before_answer", status=400, message=SAYS_UPDATED))
    engine.inject(Fault(FLUSH, "refuse", times=2, message="requests are waiting"))
    trial.sender.update_weights(kit.llama(1))
    trial.check_new()
    assert trial.log.flags(engine) == [True]
    flushes = trial.log.records(engine, FLUSH)
    assert [record["status"] for record in flushes] == [400, 400, 200]
    assert flushes[-1]["t1"] <= trial.log.records(engine, CONTINUE)[0]["t0"]


@pytest.mark.parametrize(
    ("kind", "status"), [("refuse", 400), ("refuse", 500), ("success_false", 200)]
)
def test_c10_an_update_that_says_the_weights_are_in_is_never_taken_for_old(
    kind: str, status: int, engine: ReferenceEngine
) -> None:
    trial = Trial([engine], pause_mode="abort")
    engine.inject(once(UPDATE, kind, when="before_answer", status=status, message=SAYS_UPDATED))
    engine.inject(Fault(FLUSH, "refuse"))
    error = trial.fail(2.0)
    assert trial.states(error) == [MIXED]
    assert "weights new, cache stale" in str(error)
    engine.clear_faults()
    trial.heal()


def test_c10_no_update_of_a_release_without_sessions_carries_a_flush() -> None:
    """Up to 0.5.19 a flush that fails inside an update ends the whole server."""
    for version in ("0.5.9", "0.5.12", "0.5.19"):
        info = {**HEALTHY, "version": version}
        with FakeServer(info, without_sessions) as server:
            engine = SGLangEngine(server.url, HttpOptions())
            engine.inspect(Deadline(10))
        assert not any(engine.flushes_with_update(m) for m in ("abort", "retract", "in_place"))


def without_sessions(asked: Asked) -> Answer | None:
    return Answer(404, {"detail": "Not Found"}) if asked.path == BEGIN else None


# ---- C17


def test_c17_an_answer_cut_by_the_pause_is_marked_and_can_be_had_whole(
    at_a: ReferenceEngine,
) -> None:
    from weight_update.rollouts import is_aborted, retry_aborted

    request = {"input_ids": [3, 1, 4], "sampling_params": {"max_new_tokens": 600}}
    request["sampling_params"] |= {"temperature": 0.0, "ignore_eos": True}  # type: ignore[operator]
    answers: list[dict[str, Any]] = []

    def generate(body: dict[str, Any]) -> dict[str, Any]:
        answers.append(at_a.call("POST", "/generate", body, timeout=120))
        return answers[-1]

    with ThreadPoolExecutor(1) as pool, kit.make_sender(at_a, pause_mode="abort") as sender:
        sender.init_all_workers_group()
        whole = pool.submit(retry_aborted, generate, request)
        kit.wait_for(lambda: kit.running(at_a))
        report = sender.update_weights(kit.llama(1))
        assert len(whole.result(120)["output_ids"]) == 600
    assert report.in_flight == "aborted"
    assert [is_aborted(answer) for answer in answers] == [True] * (len(answers) - 1) + [False]
    assert answers[-1]["meta_info"]["weight_version"] == str(report.version)


@pytest.mark.parametrize("made", [0, 5])
def test_c17_an_aborted_answer_is_known_by_its_reason_and_not_by_its_length(made: int) -> None:
    from weight_update.rollouts import is_aborted

    reason = {"type": "abort", "message": "Aborted"}
    assert is_aborted({"output_ids": [1] * made, "meta_info": {"finish_reason": reason}})
    length = {"type": "length", "length": made}
    assert not is_aborted({"output_ids": [1] * made, "meta_info": {"finish_reason": length}})


@pytest.mark.parametrize(
    ("mode", "said"), [("abort", "aborted"), ("retract", "retracted"), ("in_place", "frozen")]
)
def test_c17_the_report_says_what_became_of_requests_in_flight(
    mode: str, said: str, engine: ReferenceEngine
) -> None:
    with kit.make_sender(engine, pause_mode=mode) as sender:
        report = sender.update_weights(kit.llama(1))
    assert report.in_flight == report.to_dict()["in_flight"] == said


# ---- C18


class Draining:
    """Loads that fall from poll to poll, on two ranks that end at different times."""

    def __init__(self, route: str, polls: list[tuple[int, int]], listed: bool) -> None:
        self._route, self._left, self._listed = route, list(polls), listed
        self.seen: list[tuple[int, int]] = []

    def __call__(self, asked: Asked) -> Answer | None:
        if asked.path in (BEGIN, *({"/get_load", "/v1/loads"} - {self._route})):
            return Answer(404, {"detail": "Not Found"})
        if asked.path != self._route or asked.method != "GET":
            return None
        self.seen.append(self._left.pop(0) if len(self._left) > 1 else self._left[0])
        rows = [{"dp_rank": i, "num_running_reqs": n} for i, n in enumerate(self.seen[-1])]
        return Answer(200, rows if self._listed else {"loads": rows})


@pytest.mark.parametrize("mode", ["abort", "retract"])
@pytest.mark.parametrize(("route", "listed"), [("/get_load", True), ("/v1/loads", False)])
def test_c18_draining_ends_only_when_every_rank_is_idle(
    mode: str, route: str, listed: bool
) -> None:
    polls = [(3, 1), (1, 0), (0, 1), (0, 0)]
    draining = Draining(route, polls, listed)
    info = {**HEALTHY, "version": "0.5.9", "tp_size": 2, "dp_size": 2, "enable_dp_attention": True}
    with FakeServer(info, draining) as server:
        engine = SGLangEngine(server.url, HttpOptions())
        engine.inspect(Deadline(10))
        engine.drain(mode, Deadline(20))  # type: ignore[arg-type]
        assert draining.seen == polls


def test_c18_an_engine_that_is_never_idle_is_a_timeout_that_counts_its_requests() -> None:
    draining = Draining("/v1/loads", [(2, 0), (0, 1)], listed=False)
    with FakeServer({**HEALTHY, "version": "0.5.9"}, draining) as server:
        engine = SGLangEngine(server.url, HttpOptions())
        engine.inspect(Deadline(10))
        with pytest.raises(UpdateTimeout, match=r"1 request\(s\) still run") as caught:
            engine.drain("abort", Deadline(0.3))
    assert (caught.value.phase, caught.value.engine) == ("drain", server.url)


def test_c18_no_byte_moves_before_the_engine_is_idle(at_a: ReferenceEngine) -> None:
    log = kit.Log(at_a)
    with ThreadPoolExecutor(1) as pool, kit.make_sender(at_a, pause_mode="abort") as sender:
        sender.init_all_workers_group()
        request = pool.submit(at_a.generate, [3, 1, 4], 3000, timeout=120)
        kit.wait_for(lambda: kit.running(at_a))
        sender.update_weights(kit.llama(1))
        request.result(60)
    (generated,) = [
        r for r in log.records(at_a, "/generate") if r["json"]["input_ids"] == [3, 1, 4]
    ]
    assert log.records(at_a, UPDATE)[0]["t0"] >= log.records(at_a, PAUSE)[0]["t1"]
    kit.wait_for(lambda: log.records(at_a, "/generate")[0]["t1"])
    assert generated["t0"] < log.records(at_a, PAUSE)[0]["t0"]


# ---- C81


@pytest.mark.parametrize("role", ["prefill", "decode"])
@pytest.mark.parametrize("mode", ["retract", "in_place"])
def test_c81_a_disaggregated_server_is_refused_before_the_pause_unless_requests_end(
    role: str, mode: str
) -> None:
    with FakeServer({**HEALTHY, "disaggregation_mode": role}) as server:
        scheme = SGLangWeightSyncScheme(server.url, timeout=20.0, pause_mode=mode)  # type: ignore[arg-type]
        with scheme.create_sender() as sender, pytest.raises(ConfigurationError, match="'abort'"):
            sender.update_weights(kit.llama(1))
        assert server.posted() == []
        engine = SGLangEngine(server.url, HttpOptions())
        engine.inspect(Deadline(10))
        assert engine.objection("abort") is None
