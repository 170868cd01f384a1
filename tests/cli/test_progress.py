"""How progress is shown: a bar on a terminal, plain lines elsewhere, nothing when quiet."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from weight_update.cli import progress
from weight_update.report import Progress


def at(phase: str, bucket: int = 0) -> Progress:
    return Progress(
        phase,  # type: ignore[arg-type]
        bytes_done=bucket * 1_000_000,
        bytes_total=40_000_000,
        bucket=bucket,
        buckets=40,
    )


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_terminal_gets_a_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = Terminal()
    monkeypatch.setattr("sys.stderr", screen)
    console = Console(file=screen, force_terminal=True, width=80)
    monkeypatch.setattr(progress, "console", lambda *, stderr: console)

    with progress.shown(quiet=False) as hook:
        assert hook is not None
        hook(at("pause"))
        hook(at("transfer", bucket=20))

    assert "20.0/40.0 MB" in screen.getvalue()
    assert "transfer" in screen.getvalue()


def test_elsewhere_a_long_transfer_takes_ten_lines_and_a_phase_one() -> None:
    written: list[str] = []
    lines = progress.Lines(written.append)
    for now in (at("pause"), at("transfer"), *(at("transfer", n) for n in range(1, 41)), at("end")):
        lines(now)
    assert written[0] == "pause"
    assert written[1] == "transfer: 0.0 of 40.0 MB, 0 of 40 buckets"
    assert written[-2:] == ["transfer: 40.0 of 40.0 MB, 40 of 40 buckets", "end"]
    assert len(written) == 13


def test_quiet_means_no_hook_at_all() -> None:
    with progress.shown(quiet=True) as hook:
        assert hook is None
