"""The example of a Ray cluster: it survives two deaths, and nothing of it survives its end."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

pytest.importorskip("ray")

ROOT = Path(__file__).resolve().parents[2]
MARK = "RAY_EXAMPLE_TEST"  # in the environment of all that the example starts
PATIENCE = 30.0
UPDATED = re.compile(r"version (\d+) on (\d) of (\d)")


@pytest.fixture(scope="module")
def short() -> Iterator[Path]:
    """A folder whose path is short enough for Ray's sockets."""
    with TemporaryDirectory(prefix="wu-", dir="/tmp") as folder:
        yield Path(folder)


@contextmanager
def example(folder: Path, *arguments: str) -> Iterator[subprocess.Popen[str]]:
    """The example, with a home and a temporary folder of its own, in a group of its own."""
    for name in ("", "home", "tmp"):
        (folder / name).mkdir()
    places = {"HOME": str(folder / "home"), "TMPDIR": str(folder / "tmp"), MARK: str(folder)}
    with subprocess.Popen(
        [sys.executable, str(ROOT / "examples" / "ray_cluster.py"), *arguments],
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **places},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    ) as process:
        try:
            yield process
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)


def left_of(folder: Path) -> list[str]:
    """What is left of a run: processes that it started, and what it wrote."""
    wrote = [str(path) for path in (folder / "tmp").glob("ray*")]
    return wrote + [str(path) for path in (folder / "home").iterdir()] + running_in(folder)


def running_in(folder: Path) -> list[str]:
    mark, found = f"{MARK}={folder}".encode(), []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if mark in (process / "environ").read_bytes().split(b"\0"):
                found.append((process / "cmdline").read_text().replace("\0", " "))
        except OSError:  # it has ended, or is not ours
            continue
    return found


def assert_nothing_is_left(folder: Path) -> None:
    deadline = time.monotonic() + PATIENCE
    while (left := left_of(folder)) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not left


def seen(lines: Sequence[str], words: str) -> int:
    """Which line says something; there must be one."""
    found = [index for index, line in enumerate(lines) if words in line]
    assert found, "\n".join(lines)
    return found[0]


@pytest.fixture(scope="module")
def lines(short: Path) -> list[str]:
    """What a whole run prints; it ended well, and left nothing."""
    folder = short / "1"
    with example(folder) as process:
        printed, _ = process.communicate(timeout=350)
    assert process.returncode == 0, printed
    assert_nothing_is_left(folder)
    return printed.splitlines()


def test_every_update_moves_the_version_by_one(lines: list[str]) -> None:
    versions = [int(found[1]) for line in lines if (found := UPDATED.search(line))]
    assert versions == list(range(1, len(versions) + 1))


def test_updates_go_on_without_the_engine_that_died(lines: list[str]) -> None:
    killed = seen(lines, "killed the engine")
    engine = lines[killed].split()[-1]
    assert "on 1 of 2" in lines[seen(lines[killed:], "version") + killed]
    assert f"{engine} unreachable" in lines[seen(lines, "unreachable")]


def test_the_engine_that_died_takes_part_again_once_it_is_back(lines: list[str]) -> None:
    back = seen(lines, "is back as")
    new = [line for line in lines[back:] if UPDATED.search(line)]
    assert new
    assert all("on 2 of 2" in line for line in new)


def test_a_collector_that_died_is_replaced_by_one_that_counts_on(lines: list[str]) -> None:
    replaced = seen(lines, "counts on from version")
    before = [found[1] for line in lines[:replaced] if (found := UPDATED.search(line))]
    assert lines[replaced].endswith(f"version {before[-1]}")


def test_what_must_hold_at_the_end_is_looked_at(lines: list[str]) -> None:
    found = [line for line in lines if line.startswith("✓")]
    assert len(found) == 6, "\n".join(lines)


def test_a_run_that_is_interrupted_leaves_nothing(short: Path) -> None:
    folder = short / "2"
    with example(folder) as process:
        assert process.stdout is not None
        begun = next((line for line in process.stdout if line.startswith("cluster: ")), None)
        assert begun is not None  # actors and servers are starting
        os.killpg(process.pid, signal.SIGINT)  # as a terminal does
        process.communicate(timeout=60)
    assert process.returncode != 0
    assert_nothing_is_left(folder)
