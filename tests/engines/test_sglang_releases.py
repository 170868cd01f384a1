"""Older SGLang releases: what the library takes them to be able to do is what they do.

They have no update sessions. 0.5.9 counts its running requests when it is asked; 0.5.15 shows what
it counted some steps ago, and refuses to flush its prefix cache while retracted requests wait. Each
runs in its own environment with its own transformers, one server a release.
"""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from weight_update import EngineState, SGLangWeightSender, SGLangWeightSyncScheme, WeightUpdateError
from weight_update.engines.sglang.capabilities import running_requests
from weight_update.engines.sglang.engine import SGLangEngine
from weight_update.options import HttpOptions, PauseMode
from weight_update.report import Progress
from weight_update.rollouts import salted
from weight_update.waiting import Deadline

from .long_request import LongRequest
from .models import SEED_A, SEED_B, greedy, shortfall, tiny_llama
from .sglang_server import SGLangServer


@dataclass(frozen=True)
class Expected:
    """What was read of a release in its source, and is shown here."""

    flush_under_retract: bool
    brackets_ipv6: bool
    live_loads: bool
    separates_salted_prefixes: bool


RELEASES = {
    "0.5.15.post1": Expected(
        flush_under_retract=False,
        brackets_ipv6=False,
        live_loads=False,
        separates_salted_prefixes=True,
    ),
    "0.5.9": Expected(
        flush_under_retract=True,
        brackets_ipv6=True,
        live_loads=True,
        separates_salted_prefixes=False,
    ),
}
MODES: tuple[PauseMode, ...] = ("retract", "in_place", "abort")
SEEN = [3, 14, 15, 92, 65, 35, 89]
FRESH = [27, 18, 28, 182, 84, 59]
NEAR_TIE = 1e-3
STALE = "prefixes cached under the old weights may still be served"

pytestmark = pytest.mark.parametrize("older", RELEASES, indirect=True)


@pytest.fixture
def at_a(older_at_a: SGLangServer) -> SGLangServer:
    return older_at_a


def sender_of(server: SGLangServer, **settings: Any) -> SGLangWeightSender:
    return SGLangWeightSyncScheme(server.url, timeout=60, **settings).create_sender()


def serves(server: SGLangServer, seed: int, prompt: list[int] = SEEN) -> bool:
    return server.generate(prompt, 24) == greedy(tiny_llama(seed), prompt, 24)


def test_updates_by_disk_arrive_and_a_folder_that_is_gone_leaves_the_old_weights(
    at_a: SGLangServer, tmp_path: Path
) -> None:
    def hide(now: Progress) -> None:
        for file in tmp_path.glob("*/version-*/*.safetensors") if now.phase == "pause" else ():
            file.unlink()

    with sender_of(at_a, transport="disk", directory=tmp_path, pause_mode="abort") as sender:
        for seed in (SEED_B, SEED_A):
            report = sender.update_weights(tiny_llama(seed))
            assert serves(at_a, seed)
            assert at_a.label() == str(report.version)
        with pytest.raises(WeightUpdateError, match="weights iterator") as caught:
            sender.update_weights(tiny_llama(SEED_B), progress=hide)
        assert caught.value.report.engines[at_a.url].state is EngineState.OLD
        assert serves(at_a, SEED_A)
    assert list(tmp_path.iterdir()) == []


def is_told_of_stale_prefixes(warnings: tuple[str, ...]) -> bool:
    return any(STALE in warning for warning in warnings)


@contextmanager
def inspected(server: SGLangServer) -> Iterator[SGLangEngine]:
    engine = SGLangEngine(server.url, HttpOptions())
    try:
        engine.inspect(Deadline(60))
        yield engine
    finally:
        engine.close()


@contextmanager
def paused_under_load(server: SGLangServer) -> Iterator[LongRequest]:
    """A server that retracted a request."""
    request = LongRequest(server.url, SEEN)
    request.wait_for(4)
    server.post("pause_generation", {"mode": "retract"})
    try:
        yield request
    finally:
        server.post("continue_generation", {})
        request.cut()


# ---- what the library finds


def test_the_release_and_its_single_rank_are_found(at_a: SGLangServer) -> None:
    with inspected(at_a) as engine:
        assert (engine.capabilities.release, engine.ranks) == (at_a.release, 1)


def test_it_has_no_sessions_and_none_is_expected(at_a: SGLangServer) -> None:
    with inspected(at_a) as engine:
        assert engine.capabilities.sessions is False
    assert at_a.status("POST", "begin_weight_update", {}) == 404
    assert at_a.status("POST", "end_weight_update", {}) == 404


def test_it_flushes_beside_retracted_requests_if_that_is_expected(at_a: SGLangServer) -> None:
    with inspected(at_a) as engine, paused_under_load(at_a):
        found = engine.capabilities.flush_under_retract
        assert found is RELEASES[at_a.release].flush_under_retract
        assert at_a.status("POST", "flush_cache", {}) == (200 if found else 400)


def test_its_count_of_running_requests_can_be_read_while_it_is_paused(at_a: SGLangServer) -> None:
    with inspected(at_a) as engine:
        route = engine.capabilities.loads_route
        assert route is not None
        with paused_under_load(at_a):
            running = running_requests(at_a.get(route.lstrip("/")))
            assert running == 0 if RELEASES[at_a.release].live_loads else running is not None


def test_it_joins_a_group_at_an_address_of_ipv6(at_a: SGLangServer) -> None:
    if not _has_ipv6():
        pytest.skip("this machine has no IPv6 loopback")
    with inspected(at_a) as engine:
        assert engine.capabilities.brackets_ipv6 is RELEASES[at_a.release].brackets_ipv6
    with sender_of(at_a, master_address="::1") as sender:
        sender.update_weights(tiny_llama(SEED_B))
    assert serves(at_a, SEED_B, FRESH)


def test_its_label_is_written_and_shown_without_aborting_requests(at_a: SGLangServer) -> None:
    request = LongRequest(at_a.url, SEEN)
    request.wait_for(4)
    with inspected(at_a) as engine:
        engine.stamp("41", Deadline(60))
        assert engine.label(Deadline(60)) == "41"
    request.wait_for(4)
    info = request.cut()["meta_info"]
    assert info["weight_version"] == "41"
    assert "weight_versions" not in info  # so no token of this release tells its weights


# ---- updates


@pytest.mark.parametrize("mode", MODES)
def test_the_output_equals_transformers_before_and_after_an_update(
    at_a: SGLangServer, mode: PauseMode
) -> None:
    assert serves(at_a, SEED_A)

    with sender_of(at_a, pause_mode=mode) as sender:
        report = sender.update_weights(tiny_llama(SEED_B))

    assert serves(at_a, SEED_B, FRESH)
    assert report.engines[at_a.url].state is EngineState.NEW
    assert at_a.label() == str(report.version)


@pytest.mark.parametrize("load_format", ["flattened_bucket", "tensors"])
def test_every_wire_format_lands_in_several_buckets(at_a: SGLangServer, load_format: Any) -> None:
    with sender_of(at_a, load_format=load_format, bucket_bytes=20_000) as sender:
        report = sender.update_weights(tiny_llama(SEED_B))

    assert report.buckets > 1
    assert serves(at_a, SEED_B, FRESH)


@pytest.mark.parametrize("mode", MODES)
def test_an_old_prefix_is_served_only_after_a_warning(at_a: SGLangServer, mode: PauseMode) -> None:
    assert serves(at_a, SEED_A)

    with sender_of(at_a, pause_mode=mode) as sender:
        report = sender.update_weights(tiny_llama(SEED_B))
        assert is_told_of_stale_prefixes(report.warnings) is not serves(at_a, SEED_B)
        assert sender.flush_cache()

    assert serves(at_a, SEED_B)
    flushed = mode == "abort" or (mode == "retract" and RELEASES[at_a.release].flush_under_retract)
    assert is_told_of_stale_prefixes(report.warnings) is not flushed


@pytest.mark.parametrize("route", ["generate", "v1/completions"])
def test_a_salted_request_uses_no_old_prefix_or_its_salt_is_ignored(
    at_a: SGLangServer, route: str
) -> None:
    """C09: 0.5.9 takes the field, answers 200 and looks at the tokens alone."""
    body = {
        "generate": {
            "input_ids": SEEN,
            "sampling_params": {"max_new_tokens": 24, "temperature": 0, "ignore_eos": True},
        },
        "v1/completions": {
            **{"model": "m", "prompt": SEEN, "max_tokens": 24},
            **{"temperature": 0, "ignore_eos": True},
        },
    }[route]
    with sender_of(at_a, pause_mode="in_place") as sender:
        sender.flush_cache()
        at_a.post(route, body)
        report = sender.update_weights(tiny_llama(SEED_B))
        answer = at_a.post(route, salted(body, report.version))
        sender.flush_cache()

    text = answer["choices"][0]["text"] if "choices" in answer else answer["text"]
    fresh = "".join(f" w{token}" for token in greedy(tiny_llama(SEED_B), SEEN, 24))
    assert (text == fresh) is RELEASES[at_a.release].separates_salted_prefixes


def test_a_retracted_request_is_computed_anew_or_its_caller_is_warned(at_a: SGLangServer) -> None:
    """Without a flush it goes on from keys and values that the old weights left in the cache."""
    request = LongRequest(at_a.url, SEEN)
    request.wait_for(4)

    with sender_of(at_a) as sender:
        report = sender.update_weights(tiny_llama(SEED_B))
    request.wait_for(32)
    answer = request.cut()

    assert answer["meta_info"]["weight_version"] == str(report.version)
    head, tail = SEEN + answer["output_ids"][:-16], answer["output_ids"][-16:]
    computed_anew = shortfall(tiny_llama(SEED_B), head, tail) < NEAR_TIE
    assert computed_anew is RELEASES[at_a.release].flush_under_retract
    assert is_told_of_stale_prefixes(report.warnings) is not computed_anew


def test_an_aborted_request_says_so_and_the_cache_is_clean(at_a: SGLangServer) -> None:
    request = LongRequest(at_a.url, SEEN)
    request.wait_for(4)

    with sender_of(at_a, pause_mode="abort") as sender:
        report = sender.update_weights(tiny_llama(SEED_B))

    assert request.end()["meta_info"]["finish_reason"]["type"] == "abort"
    assert report.warnings == ()
    assert serves(at_a, SEED_B)


def test_a_frozen_request_goes_on_and_the_caller_is_told_of_stale_prefixes(
    at_a: SGLangServer,
) -> None:
    request = LongRequest(at_a.url, SEEN)
    request.wait_for(4)

    with sender_of(at_a, pause_mode="in_place") as sender:
        report = sender.update_weights(tiny_llama(SEED_B))

    request.wait_for(16)
    assert request.cut()["meta_info"]["weight_version"] == str(report.version)
    assert is_told_of_stale_prefixes(report.warnings)


def _has_ipv6() -> bool:
    try:
        with socket.socket(socket.AF_INET6) as probe:
            probe.bind(("::1", 0))
    except OSError:
        return False
    return True
