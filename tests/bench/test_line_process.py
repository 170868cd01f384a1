"""A process that answers lines is never waited for without an end."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from weight_update.bench.gpu.line_process import LineProcess

Start = Callable[[str], LineProcess]


@pytest.fixture
def start() -> Iterator[Start]:
    started: list[LineProcess] = []

    def start(module: str) -> LineProcess:
        started.append(LineProcess(module, "a helper"))
        return started[-1]

    yield start
    for process in started:
        process.kill()


def test_one_that_says_nothing_is_waited_for_as_long_as_is_asked(start: Start):
    silent = start("json.tool")  # it says something once its input has ended
    with pytest.raises(RuntimeError, match="a helper said nothing for 0 s"):
        silent.ask({}, 0.2)


def test_one_that_ended_is_an_error_with_its_last_words(start: Start):
    with pytest.raises(RuntimeError, match=r"a helper ended: .*No module named nowhere"):
        start("nowhere").ask({}, 60.0)


def test_one_that_ended_in_time_is_told_from_one_that_did_not(start: Start):
    assert start("json.tool").end(60.0)
    assert not start("json.tool").end(0.0)
