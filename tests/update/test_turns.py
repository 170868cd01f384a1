"""One update at a time an engine, however its URL is spelled."""

from __future__ import annotations

import os

import pytest

from weight_update import ConfigurationError, UpdateTimeout
from weight_update.options import parse_server_urls
from weight_update.update.turns import turn
from weight_update.waiting import Deadline


def taken(*urls: str) -> bool:
    """Whether somebody else holds one of these engines."""
    try:
        with turn(urls, "wait", Deadline(0.05)):
            return False
    except UpdateTimeout:
        return True


@pytest.mark.parametrize(
    ("held", "wanted", "same"),
    [
        ("http://127.0.0.1:7001", "http://localhost:7001/", True),
        ("http://gateway/engine-0", "http://gateway:80/engine-0", True),
        ("http://gateway/engine-0", "http://gateway/engine-1", False),
        ("http://[::1]:7001", "http://127.0.0.1:7001", False),
        ("https://gateway", "http://gateway", False),
    ],
)
def test_a_turn_is_of_one_engine(held: str, wanted: str, same: bool) -> None:
    with turn([held], "wait", Deadline(1.0)):
        assert taken(wanted) is same
    assert not taken(wanted)


def test_two_spellings_of_one_engine_do_not_wait_for_each_other() -> None:
    with turn(["http://127.0.0.1:7002", "http://localhost:7002"], "wait", Deadline(1.0)):
        pass


def test_two_spellings_of_one_engine_are_refused_in_one_fleet() -> None:
    with pytest.raises(ConfigurationError, match="twice"):
        parse_server_urls(["http://127.0.0.1:7003", "http://localhost:7003"])


def test_a_fork_during_an_update_holds_no_turn_once_it_is_over() -> None:
    reading, writing = os.pipe()
    with turn(["http://127.0.0.1:7004"], "wait", Deadline(1.0)):
        child = os.fork()
        if child == 0:
            os.close(writing)
            os.read(reading, 1)  # until the parent closes its end
            os._exit(0)
    try:
        assert not taken("http://127.0.0.1:7004")
    finally:
        os.close(writing)
        os.close(reading)
        os.waitpid(child, 0)
