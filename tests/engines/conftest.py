"""Fixtures that run real engines, each started once for the whole test session."""

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import pytest
import torch

from weight_update.update import attempts, procedure, roster, settle

from .engine_server import is_installed
from .models import TinyModels, save_tiny_models
from .served import COMBINATIONS, Served, arguments_of
from .sglang_server import RELEASE, SGLangServer, engine_of, save_models_for
from .vllm_server import ENGINE as VLLM
from .vllm_server import VLLMServer, save_vllm_model

HERE = Path(__file__).parent
START_SECONDS = 600  # the first test of an engine has its start in its time

_PATIENCE = 5
_WAITS: dict[ModuleType, tuple[str, ...]] = {
    procedure: ("GRACE_SECONDS",),
    attempts: ("RESUME_SECONDS", "_JUDGE_SECONDS"),
    settle: (
        *("RESUME_SECONDS", "_ANSWER_SECONDS", "_ARRIVAL_SECONDS"),
        *("_FLUSH_SECONDS", "_LATE_SECONDS", "_PROBE_SECONDS"),
    ),
    roster: ("_RETURN_SECONDS", "_PROBE_SECONDS"),
}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark every test in this folder; the hook sees those of other folders too."""
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.engine)
            item.add_marker(pytest.mark.timeout(START_SECONDS))


@pytest.fixture(autouse=True)
def patience(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Settling waits longer for answers, except where a test judges how long that takes.

    What a failed update leaves on an engine is what these tests are about. Two cores that several
    real servers share may keep one of them from answering within the 0.3 s after which it is
    reported as lost.
    """
    if request.module.__name__.endswith("test_sglang_faults"):
        return
    for module, names in _WAITS.items():
        for name in names:
            monkeypatch.setattr(module, name, _PATIENCE * getattr(module, name))


def require(engine: str) -> None:
    """Skip without an engine, unless this run has promised to have one."""
    if is_installed(engine):
        return
    missing = f"{engine} is not installed here: run `bash scripts/engines/install.sh {engine}`"
    if os.environ.get("WEIGHT_UPDATE_REQUIRE_ENGINES") == "1":
        pytest.fail(missing, pytrace=False)
    pytest.skip(missing)


@pytest.fixture(scope="session")
def tiny_models(tmp_path_factory: pytest.TempPathFactory) -> TinyModels:
    """Checkpoint directories of models A and B."""
    return save_tiny_models(tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="session")
def sglang(
    tiny_models: TinyModels, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[SGLangServer]:
    """One server, started on model A; tests that change its weights leave them changed."""
    require(engine_of(RELEASE))
    log_path = tmp_path_factory.mktemp("sglang") / "server.log"
    with SGLangServer(tiny_models.a, log_path=log_path) as server:
        yield server


@pytest.fixture
def sglang_at_a(sglang: SGLangServer, tiny_models: TinyModels) -> SGLangServer:
    """Put the session's server back on model A, whatever an earlier test loaded."""
    sglang.load(tiny_models.a)
    return sglang


@pytest.fixture(scope="session")
def spare_server(
    tiny_models: TinyModels, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[SGLangServer]:
    """A second server, which tests may restart and kill."""
    require(engine_of(RELEASE))
    with SGLangServer(tiny_models.a, tmp_path_factory.mktemp("spare") / "server.log") as server:
        yield server


@pytest.fixture
def spare(spare_server: SGLangServer, tiny_models: TinyModels) -> SGLangServer:
    """The second server on model A; one that an earlier test left dead is started again."""
    if not spare_server.is_serving():
        spare_server.restart()
    spare_server.load(tiny_models.a)
    return spare_server


@pytest.fixture(scope="session", params=COMBINATIONS, ids="-".join)
def served(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Served]:
    """One server a combination, for all modules; Llama in fp32 is the session's own."""
    require(engine_of(RELEASE))
    family, dtype = request.param
    if (family, dtype) == ("llama", "float32"):
        session = request.getfixturevalue("sglang")
        yield Served(session, family, torch.float32, request.getfixturevalue("tiny_models"))
        return
    home = tmp_path_factory.mktemp(f"{family}-{dtype}")
    models = save_tiny_models(home, family)
    with SGLangServer(models.a, home / "server.log", arguments_of(family, dtype)) as server:
        yield Served(server, family, getattr(torch, dtype), models)


@pytest.fixture
def at_a(served: Served) -> Served:
    """Put the combination's server back on model A, whatever an earlier test loaded."""
    served.server.load(served.checkpoints.a)
    return served


@dataclass(frozen=True)
class Older:
    """A server of an SGLang release, and its checkpoints."""

    server: SGLangServer
    models: TinyModels


@pytest.fixture(scope="session")
def older(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Older]:
    """One server a release that modules name, all in one order: one is stopped before the next.

    That of the main release is the session's own.
    """
    if request.param == RELEASE:
        sglang, models = map(request.getfixturevalue, ("sglang", "tiny_models"))
        yield Older(sglang, models)
        return
    require(engine_of(request.param))
    home = tmp_path_factory.mktemp(request.param)
    models = save_models_for(request.param, home)
    with SGLangServer(models.a, home / "server.log", release=request.param) as server:
        yield Older(server, models)


@pytest.fixture
def older_at_a(older: Older) -> SGLangServer:
    """Put the release's server back on model A, whatever an earlier test loaded."""
    older.server.load(older.models.a)
    return older.server


@pytest.fixture(scope="session")
def vllm_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[VLLMServer]:
    """One vLLM server for the whole session; tests leave in it what they pushed."""
    require(VLLM)
    home = tmp_path_factory.mktemp("vllm")
    with VLLMServer(save_vllm_model(home / "model"), home / "server.log") as server:
        yield server


@pytest.fixture
def vllm(vllm_server: VLLMServer) -> VLLMServer:
    """The session's server, put back on the weights and the label that it started with."""
    vllm_server.load_start()
    return vllm_server
