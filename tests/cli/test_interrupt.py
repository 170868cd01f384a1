"""Commands that are ended from outside: what they leave behind, and that they say so."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Iterator

import pytest

from weight_update.bench import link
from weight_update.bench.rows import Row
from weight_update.reference_engine import Fault, ReferenceEngine

from . import kit
from .kit import ERROR, Checkpoints, run, served, servers, tokens_of


@pytest.fixture
def stuck(
    engine: ReferenceEngine, checkpoints: Checkpoints
) -> Iterator[tuple[ReferenceEngine, subprocess.Popen[str]]]:
    """A push that is in the middle of its transfer: one bucket in, the next one slow."""
    engine.inject(Fault(kit.UPDATE, "slow", seconds=20.0, after=1, times=1))
    log = kit.Log(engine)
    command = kit.start(
        *("push", *servers(engine), checkpoints.b, "--json"),
        *("--bucket-bytes", 20_000, "--timeout", 120),
    )
    kit.wait_for(lambda: log.count(kit.UPDATE) >= 2 or command.poll() is not None, seconds=150)
    assert command.poll() is None, command.communicate()
    yield engine, command
    if command.poll() is None:
        command.kill()
        command.communicate()


@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)], ids=["Ctrl-C", "SIGTERM"]
)
def test_an_interrupted_push_says_what_every_server_holds_and_the_next_heals_it(
    stuck: tuple[ReferenceEngine, subprocess.Popen[str]],
    checkpoints: Checkpoints,
    number: signal.Signals,
    code: int,
) -> None:
    engine, command = stuck
    command.send_signal(number)
    out, err = command.communicate(timeout=150)

    assert command.returncode == code, err
    assert f"{engine.url} mixed" in err
    assert "Traceback" not in err
    told = json.loads(out)
    assert told["engines"][engine.url].items() >= {"state": "mixed", "paused": True}.items()
    assert told["error"]["message"] == {130: "interrupted", 143: "terminated"}[code]
    assert sorted(told["error"]) == ERROR

    healed = run("push", *servers(engine), checkpoints.b, "--timeout", 120)
    assert healed.code == 0, healed.err
    assert served(engine) == tokens_of(1)


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)], ids=["Ctrl-C", "SIGTERM"]
)
def test_a_command_without_words_for_it_ends_with_the_code_of_what_came(
    monkeypatch: pytest.MonkeyPatch, number: signal.Signals, code: int
) -> None:
    def interrupted(*_: object) -> Iterator[Row]:
        os.kill(os.getpid(), number)
        yield

    monkeypatch.setattr(link, "run_link", interrupted)

    assert run("bench", "link", "--server", "http://127.0.0.1:9").code == code


@pytest.mark.timeout(400)
def test_a_push_after_a_killed_one_heals_the_server(
    stuck: tuple[ReferenceEngine, subprocess.Popen[str]], checkpoints: Checkpoints
) -> None:
    engine, command = stuck
    command.kill()
    command.communicate()

    healed = run("push", *servers(engine), checkpoints.b, "--timeout", 120)

    assert healed.code == 0, healed.err
    assert served(engine) == tokens_of(1)
