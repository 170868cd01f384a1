"""Where updates by disk are written is checked as soon as it is said."""

from __future__ import annotations

from pathlib import Path

import pytest

from weight_update import SGLangWeightSyncScheme
from weight_update.errors import ConfigurationError

URL = "http://127.0.0.1:1"
VARIABLE = "WEIGHT_UPDATE_DIRECTORY"


@pytest.mark.parametrize("kind", ["missing", "file", "read-only"])
@pytest.mark.parametrize("by", ["argument", "environment"])
def test_a_directory_that_cannot_be_written_is_refused_at_once(
    kind: str, by: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("x")
    # Nobody makes files there, not even root.
    place = Path("/proc/self") if kind == "read-only" else tmp_path / kind
    if by == "environment":
        monkeypatch.setenv(VARIABLE, str(place))
    with pytest.raises(ConfigurationError, match="cannot be written") as caught:
        SGLangWeightSyncScheme(URL, directory=place if by == "argument" else None)
    name = VARIABLE if by == "environment" else "directory"
    assert caught.value.message.startswith(f"{name}={str(place)!r} cannot be written: ")
    assert "under this path" in caught.value.remedy


def test_an_empty_text_is_no_directory() -> None:
    with pytest.raises(ConfigurationError, match="it names no folder"):
        SGLangWeightSyncScheme(URL, directory="")


def test_the_argument_wins_over_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(VARIABLE, "/nowhere")
    assert SGLangWeightSyncScheme(URL, directory=tmp_path).options.directory == str(tmp_path)


def test_an_empty_variable_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "  ")
    assert SGLangWeightSyncScheme(URL).options.directory is None


def test_looking_leaves_nothing_there(tmp_path: Path) -> None:
    SGLangWeightSyncScheme(URL, directory=tmp_path)
    assert list(tmp_path.iterdir()) == []
