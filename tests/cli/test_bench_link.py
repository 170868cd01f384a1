"""``weight-update bench link``: its arguments, and what it shows."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from weight_update import WeightUpdateError
from weight_update.bench import link
from weight_update.bench.link import LinkJobs
from weight_update.bench.rows import Pair, Row

from .kit import run

SERVER = ("--server", "http://127.0.0.1:9")


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[LinkJobs]:
    """What was measured, none of it for real."""
    seen: list[LinkJobs] = []

    def rows(jobs: LinkJobs, tell: Callable[[str], None]) -> Iterator[Row]:
        seen.append(jobs)
        tell("connecting")
        found = {"request_seconds": 0.0035, "backend": "nccl", "reasons": ["since it is so"]}
        for seconds, setting in ((2.0, ""), (1.25, 'bucket_bytes=7, load_format="tensors"')):
            identity = {**found, "setting": setting, "gigabytes_per_second": 1.0 / seconds}
            yield Row(setting or "default", "one huge", [Pair(seconds, 1.0)], identity=identity)

    monkeypatch.setattr(link, "run_link", rows)
    return seen


@pytest.mark.usefixtures("asked")
def test_people_read_the_costs_and_the_line_to_copy() -> None:
    ended = run("bench", "link", *SERVER)

    assert ended.code == 0
    for words in (
        "1.25x",
        "a request costs 3.5 ms, whatever its size",
        "0.80 GB/s at best over nccl; one huge broadcast has 1.00 GB/s",
        "since it is so",
        'use bucket_bytes=7, load_format="tensors" (1.25x of one huge broadcast; the default',
    ):
        assert words in ended.out
    assert "connecting" in ended.err


@pytest.mark.usefixtures("asked")
def test_with_json_standard_output_is_the_rows_and_nothing_else() -> None:
    rows = run("bench", "link", *SERVER, "--json").json

    assert [row["ratio"] for row in rows] == [2.0, 1.25]
    assert rows[1]["setting"] == 'bucket_bytes=7, load_format="tensors"'
    assert rows[0]["request_seconds"] == 0.0035


def test_arguments_reach_the_measurement(asked: list[LinkJobs]) -> None:
    more = ("--server", "http://127.0.0.1:10", "--gigabytes", "0.5", "--tensors", "10")

    run("bench", "link", *SERVER, *more, "--rounds", "2", "--pause-mode", "abort")

    (jobs,) = asked
    assert list(jobs.urls) == ["http://127.0.0.1:9", "http://127.0.0.1:10"]
    assert (jobs.nbytes, jobs.tensors, jobs.rounds) == (500_000_000, 10, 2)
    assert (jobs.options.pause_mode, jobs.options.transport) == ("abort", "broadcast")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((), "--server"),
        (("--server", "nowhere"), "needs a scheme"),
        ((*SERVER, "--gigabytes", "0.001", "--tensors", "1000000"), "need at least"),
        ((*SERVER, "--device", "tpu"), "names no device"),
        ((*SERVER, "--rounds", "0"), "rounds"),
    ],
    ids=["no server", "no URL", "few bytes", "no device", "no rounds"],
)
def test_wrong_arguments_are_refused_before_any_server_is_asked(
    asked: list[LinkJobs], arguments: tuple[str, ...], words: str
) -> None:
    ended = run("bench", "link", *arguments)

    assert (ended.code, asked) == (2, [])
    assert words in ended.err


def test_a_failure_is_told_in_the_servers_words(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> Iterator[Row]:
        raise WeightUpdateError("it said no", engine="http://a:1", phase="transfer")
        yield

    monkeypatch.setattr(link, "run_link", fail)

    ended = run("bench", "link", *SERVER)

    assert ended.code == 1
    assert "transfer: http://a:1: it said no" in ended.err


def test_the_help_says_that_servers_are_paused_and_keep_their_weights() -> None:
    text = " ".join(run("bench", "link", "--help").out.split())

    assert "PAUSES every server" in text
    assert "keep their weights and their version labels" in text
