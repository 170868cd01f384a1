"""Fixtures that run real engines, each started once for the whole test session."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from .models import TinyModels, save_tiny_models
from .sglang_server import SGLangServer, is_installed

HERE = Path(__file__).parent
MISSING = "SGLang is not installed here: run `bash scripts/engines/install_sglang.sh`"


def pytest_configure(config: pytest.Config) -> None:
    """Declare the marker that selects these tests."""
    config.addinivalue_line("markers", "engine: needs a real inference engine (slow to start)")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark every test in this folder; the hook sees those of other folders too."""
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.engine)


def _require_sglang() -> None:
    """Skip without an engine, unless this run has promised to have one."""
    if is_installed():
        return
    if os.environ.get("WEIGHT_UPDATE_REQUIRE_ENGINES") == "1":
        pytest.fail(MISSING, pytrace=False)
    pytest.skip(MISSING)


@pytest.fixture(scope="session")
def tiny_models(tmp_path_factory: pytest.TempPathFactory) -> TinyModels:
    """Checkpoint directories of models A and B."""
    return save_tiny_models(tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="session")
def sglang(
    tiny_models: TinyModels, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[SGLangServer]:
    """One server, started on model A; tests that change its weights leave them changed."""
    _require_sglang()
    log_path = tmp_path_factory.mktemp("sglang") / "server.log"
    with SGLangServer(tiny_models.a, log_path=log_path) as server:
        yield server


@pytest.fixture
def sglang_at_a(sglang: SGLangServer, tiny_models: TinyModels) -> SGLangServer:
    """Put the session's server back on model A, whatever an earlier test loaded."""
    sglang.load(tiny_models.a)
    return sglang
