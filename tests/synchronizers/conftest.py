"""Reference engines, started once for the folder and put right again after each test."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from weight_update.reference_engine import ReferenceEngine

# The kit of the integration tests is used here too; `tests` itself is no package.
sys.path.append(str(Path(__file__).parents[1]))

from integration import kit


@pytest.fixture(scope="session")
def fleet() -> Iterator[list[ReferenceEngine]]:
    """Two engines on model A."""
    started = [ReferenceEngine(kit.llama(0), wait=False) for _ in range(2)]
    for engine in started:
        engine.wait_until_ready()
    yield started
    for engine in started:
        engine.stop()


@pytest.fixture
def two(fleet: list[ReferenceEngine]) -> Iterator[list[ReferenceEngine]]:
    """Both engines, on whatever an earlier test left, usable again afterwards."""
    yield fleet
    for engine in fleet:
        kit.revive(engine)


@pytest.fixture
def engine(two: list[ReferenceEngine]) -> ReferenceEngine:
    """The first of them."""
    return two[0]
