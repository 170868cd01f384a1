"""Engines for the table of real faults, started once; locks of its own for each test."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from weight_update.reference_engine import ReferenceEngine

# The kit of the integration tests is used here too; `tests` itself is no package.
sys.path.append(str(Path(__file__).parents[1]))

from integration import kit


@pytest.fixture
def locks_of_its_own(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another run of the tests on this host has model engines of the same names."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))


@pytest.fixture(scope="session")
def fleet() -> Iterator[list[ReferenceEngine]]:
    """Three engines on model A."""
    started = [ReferenceEngine(kit.llama(0), wait=False) for _ in range(3)]
    for engine in started:
        engine.wait_until_ready()
    yield started
    for engine in started:
        engine.stop()
