"""The error tree: each error says where, what and what to do, and fits the builtin ones."""

from __future__ import annotations

import copy
import pickle

import pytest
import requests

from weight_update.errors import (
    ConfigurationError,
    EngineRejected,
    EngineUnreachable,
    UpdateTimeout,
    WeightMismatchError,
    WeightUpdateError,
)
from weight_update.report import EngineOutcome, EngineState, UpdateReport

ALL = [
    WeightUpdateError,
    ConfigurationError,
    WeightMismatchError,
    EngineRejected,
    EngineUnreachable,
    UpdateTimeout,
]
every_error = pytest.mark.parametrize("kind", ALL)


def report() -> UpdateReport:
    outcome = EngineOutcome("http://a:1", EngineState.MIXED, None, paused=True, detail="2 of 4")
    return UpdateReport(3, 10, 2, 1, {"total": 0.1}, {"http://a:1": outcome})


@pytest.mark.parametrize(
    ("kind", "builtin"),
    [
        (WeightUpdateError, RuntimeError),
        (ConfigurationError, ValueError),
        (WeightMismatchError, ValueError),
        (EngineRejected, requests.HTTPError),
        (EngineUnreachable, ConnectionError),
        (UpdateTimeout, TimeoutError),
    ],
)
def test_each_error_is_also_the_builtin_one_that_callers_catch(
    kind: type[WeightUpdateError], builtin: type[Exception]
) -> None:
    assert issubclass(kind, builtin)
    assert issubclass(kind, WeightUpdateError)
    assert issubclass(kind, RuntimeError)


@every_error
def test_the_text_gives_phase_engine_message_and_remedy(kind: type[WeightUpdateError]) -> None:
    error = kind("it said no", engine="http://a:1", phase="pause", remedy="say please")

    assert str(error) == "pause: http://a:1: it said no [say please]"


@every_error
def test_an_error_of_configuration_names_no_phase(kind: type[WeightUpdateError]) -> None:
    assert str(kind("x=1 is unknown")) == "x=1 is unknown"


@every_error
def test_an_error_with_a_report_shows_the_state_of_every_engine(
    kind: type[WeightUpdateError],
) -> None:
    error = kind("broken", phase="transfer")
    error.report = report()

    head, line, remedy = str(error).splitlines()
    assert head == "transfer: broken"
    assert line.strip() == "http://a:1 mixed (version unknown, paused): 2 of 4"
    assert "push again, or call a sender's recover(); a whole model heals" in remedy


@every_error
def test_the_fields_of_an_error_are_as_given(kind: type[WeightUpdateError]) -> None:
    error = kind("m", engine="http://a:1", phase="flush", remedy="r")

    assert (error.message, error.engine, error.phase, error.remedy) == (
        "m",
        "http://a:1",
        "flush",
        "r",
    )
    assert error.report is None


@every_error
@pytest.mark.parametrize("rebuild", [lambda e: pickle.loads(pickle.dumps(e)), copy.copy])
def test_an_error_crosses_processes_whole(kind: type[WeightUpdateError], rebuild) -> None:
    error = kind("m", engine="http://a:1", phase="flush", remedy="r")
    error.report = report()

    twin = rebuild(error)

    assert type(twin) is kind
    assert str(twin) == str(error)
    assert (twin.engine, twin.phase, twin.report) == (error.engine, error.phase, error.report)


def test_a_refusal_says_how_much_was_applied_and_keeps_the_answer() -> None:
    response = requests.Response()
    error = EngineRejected("no", response=response)

    assert error.response is response
    assert error.applied == "nothing"
