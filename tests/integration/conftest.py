"""Engines, started once for the folder and put right again after each test."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from transformers import LlamaForCausalLM

from weight_update.reference_engine import ReferenceEngine

from . import kit


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
def engine(fleet: list[ReferenceEngine]) -> Iterator[ReferenceEngine]:
    """The first of the three engines, usable again afterwards."""
    yield fleet[0]
    kit.revive(fleet[0])


@pytest.fixture
def model_a() -> LlamaForCausalLM:
    return kit.llama(0)


@pytest.fixture
def model_b() -> LlamaForCausalLM:
    return kit.llama(1)
