"""Two engines on model A, and some checkpoints for the folder."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.integration.kit import revive
from weight_update.reference_engine import ReferenceEngine

from . import kit


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> kit.Checkpoints:
    root = tmp_path_factory.mktemp("checkpoints")
    made = kit.Checkpoints(root / "a", root / "b", root / "wide")
    kit.llama(0).save_pretrained(made.a)
    kit.llama(1).save_pretrained(made.b, max_shard_size="40KB")
    kit.llama(1, hidden_size=48).save_pretrained(made.wide)
    assert len(list(made.b.glob("*.safetensors"))) > 2
    return made


@pytest.fixture
def two(two: list[ReferenceEngine]) -> Iterator[list[ReferenceEngine]]:
    """Both engines on model A."""
    for engine in two:
        _put_on_a(engine)
    yield two
    for engine in two:
        _put_on_a(engine)  # a push by disk moves the model that it shows


@pytest.fixture
def engine(two: list[ReferenceEngine]) -> ReferenceEngine:
    """One engine on model A."""
    return two[0]


@pytest.fixture(autouse=True)
def no_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    """The caller's settings stay out of the tests."""
    for name in ("API_KEY", "ADMIN_API_KEY", "MASTER_ADDRESS", "BUCKET_BYTES"):
        monkeypatch.delenv(f"WEIGHT_UPDATE_{name}", raising=False)


def _put_on_a(engine: ReferenceEngine) -> None:
    revive(engine)
    shown = str(engine.call("GET", "/model_info")["model_path"])
    if kit.served(engine) != kit.tokens_of(0) or shown != engine._options["model"]:
        engine.restart()
