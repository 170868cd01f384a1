"""Without a real engine, the demo says how to get one."""

from pathlib import Path

import pytest

from weight_update.demo.engines import ENGINES_VARIABLE, LAUNCHER, find_installation
from weight_update.demo.sampler import DemoError


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.delenv(ENGINES_VARIABLE, raising=False)
    launcher = tmp_path / LAUNCHER
    launcher.parent.mkdir(parents=True)
    launcher.touch()
    return tmp_path


def install(engines: Path, release: str = "0.5.23") -> Path:
    home = engines / f"sglang-{release}"
    home.mkdir(parents=True)
    (home / ".installed").touch()
    return home / "bin" / "python"


def test_outside_a_repository(tmp_path: Path) -> None:
    with pytest.raises(DemoError, match="inside the repository"):
        find_installation(tmp_path)


def test_not_installed(repository: Path) -> None:
    with pytest.raises(DemoError, match="make engines"):
        find_installation(repository)


def test_installed_above_the_working_directory(repository: Path) -> None:
    python = install(repository / ".engines")
    (repository / "deep" / "er").mkdir(parents=True)
    found = find_installation(repository / "deep" / "er")
    assert (found.python, found.launcher) == (python, repository / LAUNCHER)


def test_the_newest_of_several_releases(repository: Path) -> None:
    pythons = [install(repository / ".engines", r) for r in ("0.5.15.post1", "0.5.23", "0.5.9")]
    assert find_installation(repository).python == pythons[1]


def test_installed_elsewhere(
    repository: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    elsewhere = tmp_path_factory.mktemp("engines")
    python = install(elsewhere)
    monkeypatch.setenv(ENGINES_VARIABLE, str(elsewhere))
    assert find_installation(repository).python == python
