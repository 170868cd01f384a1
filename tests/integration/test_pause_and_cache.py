"""What an update does to requests in flight and to the prefix cache, in each pause mode."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest

from weight_update import ConfigurationError
from weight_update.reference_engine import Fault, ReferenceEngine

from . import kit
from .kit import BEGIN, CONTINUE, END, FLUSH, PAUSE, STAMP, UPDATE

SKIPPED = "Skipping the SGLang radix-cache flush"
PAUSE_VARIABLE = "TORCHRL_SGLANG_PAUSE_GENERATION_MODE"
FLUSH_VARIABLE = "TORCHRL_SGLANG_WEIGHT_SYNC_FLUSH_CACHE"


class InFlight:
    """A long request that runs while something else happens."""

    def __init__(self, engine: ReferenceEngine, pool: ThreadPoolExecutor) -> None:
        self._engine = engine
        self._answer = pool.submit(engine.generate, [3, 1, 4], 3000, rid="long")
        kit.wait_for(lambda: kit.running(engine))

    def cut(self) -> dict[str, Any]:
        """End it after a few more tokens, unless it has ended, and return its answer."""
        enough = kit.tokens(self._engine) + 8
        kit.wait_for(lambda: self._answer.done() or kit.tokens(self._engine) >= enough)
        if not self._answer.done():
            self._engine._exchange("POST", "/abort_request", {"rid": "long"}, 60)
        return dict(self._answer.result(60))


@contextmanager
def long_request(engine: ReferenceEngine) -> Iterator[InFlight]:
    with ThreadPoolExecutor(1) as pool:
        yield InFlight(engine, pool)


@pytest.fixture
def at_a(engine: ReferenceEngine) -> ReferenceEngine:
    """The engine on model A, with the prompt in its cache."""
    kit.push(engine, kit.llama(0))
    kit.served(engine)
    return engine


@pytest.fixture(scope="module")
def older() -> Iterator[ReferenceEngine]:
    """An engine of a release without sessions."""
    with ReferenceEngine(kit.llama(0), release="0.5.15") as running:
        yield running


@pytest.fixture
def old_at_a(older: ReferenceEngine) -> Iterator[ReferenceEngine]:
    kit.push(older, kit.llama(0))
    older.call("POST", FLUSH)  # under retract this release keeps its cache
    yield older
    kit.revive(older)


def is_stale(engine: ReferenceEngine) -> bool:
    """Whether a prefix made by model A is served to model B."""
    answer = engine.generate(kit.PROMPT, kit.TOKENS)
    hit = answer["meta_info"]["cached_tokens"] > 0
    assert hit == (answer["output_ids"] != kit.tokens_of(1))
    return bool(hit)


def versions(answer: dict[str, Any]) -> list[dict[str, Any]]:
    return list(answer["meta_info"]["weight_versions"])


# ---- requests in flight


def test_a_retracted_request_continues_on_the_new_weights(at_a: ReferenceEngine) -> None:
    """C17, C31: both versions are in its spans, and from the second on it is model B's."""
    before = kit.label(at_a)
    with long_request(at_a) as request, kit.make_sender(at_a) as sender:
        report = sender.update_weights(kit.llama(1))
        answer = request.cut()
    assert [span["version"] for span in versions(answer)] == [before, str(report.version)]
    assert answer["meta_info"]["num_retractions"] == 1
    # The first token after the swap is computed anew, from the prompt on.
    start = versions(answer)[1]["start"]
    prefix = [3, 1, 4, *answer["output_ids"][:start]]
    assert kit.greedy(kit.llama(1), prefix, 4) == answer["output_ids"][start : start + 4]


def test_a_frozen_request_continues_and_its_spans_show_both_versions(
    at_a: ReferenceEngine,
) -> None:
    """C31: ``in_place`` neither ends nor recomputes it."""
    before = kit.label(at_a)
    with long_request(at_a) as request, kit.make_sender(at_a, pause_mode="in_place") as sender:
        report = sender.update_weights(kit.llama(1))
        answer = request.cut()
    assert [span["version"] for span in versions(answer)] == [before, str(report.version)]
    assert answer["meta_info"]["num_retractions"] == 0


def test_an_aborted_request_says_so_and_has_only_old_tokens(at_a: ReferenceEngine) -> None:
    """C17: its finish reason tells it from a sample."""
    before = kit.label(at_a)
    with long_request(at_a) as request, kit.make_sender(at_a, pause_mode="abort") as sender:
        sender.update_weights(kit.llama(1))
        answer = request.cut()
    assert answer["meta_info"]["finish_reason"]["type"] == "abort"
    assert [span["version"] for span in versions(answer)] == [before]


@pytest.mark.parametrize("mode", ["retract", "in_place"])
def test_no_update_ends_a_request_that_the_mode_keeps(mode: str, at_a: ReferenceEngine) -> None:
    """C31: neither the pause nor the label aborts it; it ends by its own length."""
    with ThreadPoolExecutor(1) as pool, kit.make_sender(at_a, pause_mode=mode) as sender:
        request = pool.submit(at_a.generate, [3, 1, 4], 2000, timeout=120)
        kit.wait_for(lambda: kit.running(at_a))
        sender.update_weights(kit.llama(1))
        answer = request.result(120)
    assert answer["meta_info"]["finish_reason"]["type"] == "length"
    assert len(answer["output_ids"]) == 2000


# ---- the cache


@pytest.mark.parametrize("mode", ["retract", "abort"])
def test_the_last_bucket_carries_the_flush(mode: str, at_a: ReferenceEngine) -> None:
    """C09: only the last one, no second call is needed, and no old prefix is ever served."""
    log = kit.Log(at_a)
    with kit.make_sender(at_a, pause_mode=mode, bucket_bytes=20_000) as sender:
        report = sender.update_weights(kit.llama(1))
    assert report.warnings == ()
    assert log.flags(at_a) == [False] * (report.buckets - 1) + [True]
    assert log.count(at_a, FLUSH) == 0
    assert not is_stale(at_a)


def test_a_release_that_ends_over_a_refused_flush_is_flushed_by_a_call_of_its_own() -> None:
    """C10: it has sessions, yet no update request carries the flush; it follows the last one."""
    with (
        ReferenceEngine(kit.llama(0), release="0.5.21") as fragile,
        kit.make_sender(fragile) as sender,
    ):
        kit.served(fragile)
        log = kit.Log(fragile)
        sender.update_weights(kit.llama(1))
        assert log.steps(fragile) == [PAUSE, BEGIN, UPDATE, END, FLUSH, STAMP, CONTINUE]
        assert not any(log.flags(fragile))
        assert not is_stale(fragile)


def test_the_cache_is_flushed_although_retracted_requests_wait(at_a: ReferenceEngine) -> None:
    """C10: on this release a paused engine does not count its queue."""
    with long_request(at_a) as request, kit.make_sender(at_a) as sender:
        sender.update_weights(kit.llama(1))
        request.cut()
    assert not is_stale(at_a)


def test_frozen_requests_leave_the_cache_stale_and_that_is_said(
    at_a: ReferenceEngine, caplog: pytest.LogCaptureFixture
) -> None:
    """C09: a warning in every report, and once in the log."""
    log = kit.Log(at_a)
    with kit.make_sender(at_a, pause_mode="in_place") as sender, caplog.at_level(logging.WARNING):
        reports = [sender.update_weights(kit.llama(1)) for _ in range(2)]
    assert all(SKIPPED in report.warnings[0] for report in reports)
    assert caplog.text.count(SKIPPED) == 1
    assert SKIPPED in str(reports[0])
    assert log.flushes(at_a) == 0
    assert is_stale(at_a)
    kit.push(at_a, kit.llama(1))
    assert not is_stale(at_a)


def test_no_flush_is_sent_when_none_is_wanted(at_a: ReferenceEngine) -> None:
    log = kit.Log(at_a)
    with kit.make_sender(at_a, flush_cache_on_update=False) as sender:
        report = sender.update_weights(kit.llama(1))
    assert log.flushes(at_a) == 0
    assert "may still be served" in report.warnings[0]
    assert is_stale(at_a)


def test_the_sender_flushes_on_demand(at_a: ReferenceEngine) -> None:
    with kit.make_sender(at_a, flush_cache_on_update=False) as sender:
        sender.update_weights(kit.llama(1))
        assert sender.flush_cache() is True
    assert not is_stale(at_a)


def test_a_flush_on_demand_that_is_refused_is_false_and_logged(
    at_a: ReferenceEngine, caplog: pytest.LogCaptureFixture
) -> None:
    at_a.inject(Fault(FLUSH, "refuse", times=1))
    with kit.make_sender(at_a) as sender, caplog.at_level(logging.WARNING):
        assert sender.flush_cache() is False
    assert "not flushed" in caplog.text


# ---- the environment, read anew at every send


def test_the_environment_switches_the_mode_of_the_next_update(
    at_a: ReferenceEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = kit.Log(at_a)
    monkeypatch.delenv(PAUSE_VARIABLE, raising=False)
    with kit.make_sender(at_a) as sender:
        for value in ("", " In_Place ", "abort"):
            monkeypatch.setenv(PAUSE_VARIABLE, value)
            sender.update_weights(kit.llama(1))
    modes = [body["mode"] for body in log.bodies(at_a, PAUSE)]
    assert modes == ["retract", "in_place", "abort"]


def test_an_argument_wins_over_the_mode_of_the_environment(
    at_a: ReferenceEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = kit.Log(at_a)
    monkeypatch.setenv(PAUSE_VARIABLE, "abort")
    with kit.make_sender(at_a, pause_mode="in_place") as sender:
        sender.update_weights(kit.llama(1))
    assert log.bodies(at_a, PAUSE) == [{"mode": "in_place"}]


def test_the_environment_wins_over_the_flush_argument_both_ways(
    at_a: ReferenceEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = kit.Log(at_a)
    with kit.make_sender(at_a, flush_cache_on_update=False) as sender:
        monkeypatch.setenv(FLUSH_VARIABLE, "yes")
        sender.update_weights(kit.llama(1))
        assert log.flushes(at_a) == 1
    with kit.make_sender(at_a) as sender:
        monkeypatch.setenv(FLUSH_VARIABLE, "0")
        sender.update_weights(kit.llama(1))
        assert log.flushes(at_a) == 1


@pytest.mark.parametrize("variable", [PAUSE_VARIABLE, FLUSH_VARIABLE])
def test_an_unreadable_variable_is_an_error_before_any_pause(
    variable: str, at_a: ReferenceEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    with kit.make_sender(at_a) as sender:
        sender.init_all_workers_group()
        log = kit.Log(at_a)
        monkeypatch.setenv(variable, "retarct")
        with pytest.raises(ConfigurationError, match="retarct"):
            sender.update_weights(kit.llama(1))
    assert log.count(at_a, PAUSE) == 0


# ---- draining


@pytest.mark.parametrize("kind", ["refuse", "non_json", "success_false"])
def test_a_load_route_that_tells_nothing_is_no_obstacle(kind: str, at_a: ReferenceEngine) -> None:
    """C02, C03: the count is information; the order of commands does the rest."""
    at_a.inject(Fault("/v1/loads", kind, status=500))  # type: ignore[arg-type]
    with kit.make_sender(at_a, pause_mode="abort") as sender:
        sender.update_weights(kit.llama(1))
    assert kit.served(at_a) == kit.tokens_of(1)


# ---- a release without sessions


def test_an_older_release_is_updated_without_sessions(old_at_a: ReferenceEngine) -> None:
    """C03: no call to a route that it lacks, and none at all after the pause that could 404."""
    log = kit.Log(old_at_a)
    with kit.make_sender(old_at_a, bucket_bytes=20_000) as sender:
        report = sender.update_weights(kit.llama(1))
    assert (log.count(old_at_a, BEGIN), log.count(old_at_a, END)) == (0, 0)
    assert log.count(old_at_a, "/get_load") + log.count(old_at_a, "/v1/loads") >= 1
    assert kit.label(old_at_a) == str(report.version)
    assert kit.served(old_at_a) == kit.tokens_of(1)


def test_an_older_release_keeps_its_cache_under_retract_and_that_is_said(
    old_at_a: ReferenceEngine,
) -> None:
    """C09: this release cannot flush while requests wait, so it is not asked to."""
    kit.served(old_at_a)
    log = kit.Log(old_at_a)
    with kit.make_sender(old_at_a) as sender:
        report = sender.update_weights(kit.llama(1))
    assert SKIPPED in report.warnings[0]
    assert log.flushes(old_at_a) == 0
    assert is_stale(old_at_a)


def test_an_older_release_is_flushed_by_a_call_of_its_own_under_abort(
    old_at_a: ReferenceEngine,
) -> None:
    """C10: a flush refused inside an update would end this server."""
    kit.served(old_at_a)
    log = kit.Log(old_at_a)
    with kit.make_sender(old_at_a, pause_mode="abort") as sender:
        sender.update_weights(kit.llama(1))
    assert not any(log.flags(old_at_a))
    assert log.count(old_at_a, FLUSH) == 1
    assert not is_stale(old_at_a)


def test_an_older_release_takes_an_update_with_requests_in_flight(
    old_at_a: ReferenceEngine,
) -> None:
    """C18: its count of running requests is waited for, and the request goes on."""
    with long_request(old_at_a) as request, kit.make_sender(old_at_a) as sender:
        report = sender.update_weights(kit.llama(1))
        answer = request.cut()
    assert answer["meta_info"]["num_retractions"] == 1
    assert answer["meta_info"]["weight_version"] == str(report.version)


def test_an_older_and_a_newer_release_are_updated_together(
    old_at_a: ReferenceEngine, at_a: ReferenceEngine
) -> None:
    """C03: each engine of a fleet is spoken to as its own release wants it."""
    log = kit.Log(old_at_a, at_a)
    with kit.make_sender([old_at_a, at_a]) as sender:
        report = sender.update_weights(kit.llama(1))
    assert (log.count(old_at_a, BEGIN), log.count(at_a, BEGIN)) == (0, 1)
    assert (log.flushes(old_at_a), log.flushes(at_a)) == (0, 1)
    (warning,) = report.warnings
    assert old_at_a.url in warning
    assert at_a.url not in warning
