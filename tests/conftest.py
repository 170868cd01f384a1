"""Settings of all tests, the engines that they share, and what the summary counts."""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.warm import EnginesSubprocess
from weight_update.reference_engine import launcher

if TYPE_CHECKING:  # what a test does not ask for is not imported
    from tests.integration.trainers import Trainers
    from weight_update.reference_engine import ReferenceEngine

with suppress(ImportError):  # not every folder needs it
    from hypothesis import HealthCheck, settings

    # An example takes as long as the machine is busy: its time says nothing about the code.
    settings.register_profile("busy", deadline=None, suppress_health_check=[HealthCheck.too_slow])
    settings.load_profile("busy")

ENGINES = Path(__file__).parent / "engines"

_engines_subprocess = launcher.subprocess = EnginesSubprocess()  # type: ignore[assignment]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Real engines come last: beside tests that judge seconds they would take what is counted."""
    items.sort(key=lambda item: ENGINES in item.path.parents)


def pytest_collection_finish() -> None:
    """Many tests collect garbage, and need not walk over all modules and tests to do so."""
    gc.collect()
    gc.freeze()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Engines start warm, but where their start is what is tested."""
    _engines_subprocess.warm = item.path.name != "test_reference_process.py"


@pytest.fixture(scope="session")
def fleet() -> Iterator[list[ReferenceEngine]]:
    """Three engines for all folders, on model A at first, then on whatever a test left."""
    from tests.integration import kit

    with kit.engines(3) as started:
        yield started


@pytest.fixture
def three(fleet: list[ReferenceEngine]) -> Iterator[list[ReferenceEngine]]:
    """The three engines, usable again afterwards."""
    yield from _usable_again(fleet)


@pytest.fixture
def two(fleet: list[ReferenceEngine]) -> Iterator[list[ReferenceEngine]]:
    """Two of the three engines, usable again afterwards."""
    yield from _usable_again(fleet[:2])


@pytest.fixture
def engine(fleet: list[ReferenceEngine]) -> Iterator[ReferenceEngine]:
    """The first of the three engines, usable again afterwards."""
    for _ in _usable_again(fleet[:1]):
        yield fleet[0]


@pytest.fixture(scope="session")
def locked_engine() -> Iterator[ReferenceEngine]:
    """An engine that wants one key for control routes and another for the rest."""
    from tests.integration import kit

    with kit.engines(1, api_key=kit.KEY, admin_api_key=kit.ADMIN_KEY) as (engine,):
        yield engine


@pytest.fixture
def locked(locked_engine: ReferenceEngine) -> Iterator[ReferenceEngine]:
    """The engine that wants keys, usable again afterwards."""
    for _ in _usable_again([locked_engine]):
        yield locked_engine


@pytest.fixture(scope="session")
def workplace(tmp_path_factory: pytest.TempPathFactory) -> Trainers:
    """Trainers in processes of their own."""
    from tests.integration.trainers import Trainers

    return Trainers(tmp_path_factory.mktemp("trainers"))


@pytest.fixture(scope="session")
def weights_b(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A file with the weights of model B."""
    import torch

    from tests.integration import kit

    path = tmp_path_factory.mktemp("weights") / "b.pt"
    torch.save(dict(kit.llama(1).state_dict()), path)
    return str(path)


def _usable_again(engines: list[ReferenceEngine]) -> Iterator[list[ReferenceEngine]]:
    from tests.integration import kit

    yield engines
    for engine in engines:
        kit.revive(engine)


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Adds up what table-driven tests recorded with ``record_property("combinations ...", n)``."""
    counts: Counter[str] = Counter()
    for reports in terminalreporter.stats.values():
        for report in reports:
            if getattr(report, "when", None) == "call":
                named = (p for p in report.user_properties if p[0].startswith("combinations"))
                counts.update(dict(named))
    if counts:
        terminalreporter.section("fault tables")
    for name, count in sorted(counts.items()):
        terminalreporter.write_line(f"{count:,} {name}")
