"""Shared with the cases: the fake server and the kit."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from weight_update.reference_engine import ReferenceEngine

# `tests` itself is no package, and its folders are used from here.
sys.path.append(str(Path(__file__).parents[1]))

from integration import kit

KEY, ADMIN_KEY = "ordinary-5ecret", "admin-5ecret"


@pytest.fixture(scope="session")
def locked_engine() -> Iterator[ReferenceEngine]:
    """An engine on model A that wants one key for control routes and another for the rest."""
    with ReferenceEngine(kit.llama(0), api_key=KEY, admin_api_key=ADMIN_KEY) as running:
        yield running


@pytest.fixture
def locked(locked_engine: ReferenceEngine) -> Iterator[ReferenceEngine]:
    yield locked_engine
    locked_engine.clear_faults()
    kit._settle(locked_engine)
