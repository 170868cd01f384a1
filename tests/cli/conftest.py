"""Two engines and some checkpoints for the folder; engines are put right after each test."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress

import pytest

from weight_update.reference_engine import ReferenceEngine

from . import kit


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> kit.Checkpoints:
    root = tmp_path_factory.mktemp("checkpoints")
    made = kit.Checkpoints(root / "a", root / "b", root / "wide")
    kit.llama(0).save_pretrained(made.a)
    kit.llama(1).save_pretrained(made.b, max_shard_size="40KB")
    kit.llama(1, hidden=48).save_pretrained(made.wide)
    assert len(list(made.b.glob("*.safetensors"))) > 2
    return made


@pytest.fixture(scope="session")
def fleet() -> Iterator[list[ReferenceEngine]]:
    started = [ReferenceEngine(kit.llama(0), wait=False) for _ in range(2)]
    for engine in started:
        engine.wait_until_ready()
    yield started
    for engine in started:
        engine.stop()


@pytest.fixture
def two(fleet: list[ReferenceEngine]) -> Iterator[list[ReferenceEngine]]:
    """Both engines on model A, unpaused."""
    yield fleet
    for engine in fleet:
        _revive(engine)


@pytest.fixture
def engine(two: list[ReferenceEngine]) -> ReferenceEngine:
    """One engine on model A."""
    return two[0]


@pytest.fixture(autouse=True)
def no_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    """The caller's settings stay out of the tests."""
    for name in ("API_KEY", "ADMIN_API_KEY", "MASTER_ADDRESS", "BUCKET_BYTES"):
        monkeypatch.delenv(f"WEIGHT_UPDATE_{name}", raising=False)


def _revive(engine: ReferenceEngine) -> None:
    if engine.process.poll() is None:
        with suppress(OSError, RuntimeError):
            engine.clear_faults()
            with suppress(RuntimeError):  # there is usually no session to end
                engine.call("POST", "/end_weight_update", timeout=10)
            engine.call("POST", "/continue_generation", {}, timeout=10)
            engine.call("GET", "/ready", timeout=10)
            if kit.served(engine) == kit.tokens_of(0):
                return
            ended = kit.run("push", *kit.servers(engine), _checkpoint_a(engine), "--no-check")
            if ended.code == 0:
                return
    engine.restart()


def _checkpoint_a(engine: ReferenceEngine) -> str:
    return str(engine.call("GET", "/model_info", timeout=10)["model_path"])
