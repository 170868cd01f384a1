"""What tests of collectors share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.engines.models import save_tiny_model
from tests.integration import kit
from weight_update.reference_engine import ReferenceEngine


@pytest.fixture(scope="session")
def talking_engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ReferenceEngine]:
    """An engine that has a tokenizer."""
    directory = save_tiny_model(tmp_path_factory.mktemp("talking") / "model", seed=1)
    with ReferenceEngine(str(directory)) as engine:
        yield engine


@pytest.fixture
def talker(talking_engine: ReferenceEngine) -> Iterator[ReferenceEngine]:
    """The engine that has a tokenizer, labelled as at its start and usable again afterwards."""
    kit.relabel(talking_engine, "default")
    yield talking_engine
    kit.revive(talking_engine)
