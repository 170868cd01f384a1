"""Engines, started once for the folder and put right again after each test."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from weight_update.reference_engine import ReferenceEngine

# The kit of the integration tests is used here too; `tests` itself is no package.
sys.path.append(str(Path(__file__).parents[1]))

from integration import kit
from integration.trainers import Trainers


@pytest.fixture(scope="session")
def fleet() -> Iterator[list[ReferenceEngine]]:
    """Three engines on model A."""
    started = [ReferenceEngine(kit.llama(0), wait=False) for _ in range(3)]
    for engine in started:
        engine.wait_until_ready()
    yield started
    for engine in started:
        engine.stop()


@pytest.fixture
def three(fleet: list[ReferenceEngine]) -> Iterator[list[ReferenceEngine]]:
    """The three engines, usable again afterwards."""
    yield fleet
    for engine in fleet:
        kit.revive(engine)


@pytest.fixture
def two(three: list[ReferenceEngine]) -> list[ReferenceEngine]:
    return three[:2]


@pytest.fixture
def engine(fleet: list[ReferenceEngine]) -> Iterator[ReferenceEngine]:
    """The first of the three engines, usable again afterwards."""
    yield fleet[0]
    kit.revive(fleet[0])


@pytest.fixture(scope="session")
def workplace(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Trainers]:
    """Trainers in processes of their own."""
    started = Trainers(tmp_path_factory.mktemp("trainers"))
    yield started
    started.stop()


@pytest.fixture(scope="session")
def weights_b(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A file with the weights of model B."""
    import torch

    path = tmp_path_factory.mktemp("weights") / "b.pt"
    torch.save(dict(kit.llama(1).state_dict()), path)
    return str(path)
