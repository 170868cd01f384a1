"""How far a push is, on standard error: a bar on a terminal, plain lines elsewhere."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from weight_update.cli.output import console, say

if TYPE_CHECKING:
    from weight_update.report import Progress, ProgressHook

_LINES = 10


@contextmanager
def shown(*, quiet: bool) -> Iterator[ProgressHook | None]:
    """A progress hook for ``update_weights()``; None when nothing is to be shown."""
    if quiet:
        yield None
    elif sys.stderr.isatty():
        with _bar() as hook:
            yield hook
    else:
        yield Lines(say)


@contextmanager
def _bar() -> Iterator[ProgressHook]:
    from rich import progress

    columns = (
        progress.TextColumn("{task.description:<9}"),
        progress.BarColumn(),
        progress.DownloadColumn(),
        progress.TransferSpeedColumn(),
        progress.TimeElapsedColumn(),
    )
    with progress.Progress(*columns, console=console(stderr=True), transient=True) as bar:
        task = bar.add_task("plan", total=None)

        def hook(now: Progress) -> None:
            total = now.bytes_total or None
            bar.update(task, description=now.phase, completed=now.bytes_done, total=total)

        yield hook


class Lines:
    """A line a phase, and some while the weights travel.

    Args:
        write: Writes a line.

    Example:
        >>> from weight_update.report import Progress
        >>> lines = Lines(print)
        >>> lines(Progress("transfer", bytes_done=0, bytes_total=4_000_000, bucket=0, buckets=4))
        transfer: 0.0 of 4.0 MB, 0 of 4 buckets
        >>> lines(Progress("end", bytes_done=4_000_000, bytes_total=4_000_000, bucket=4, buckets=4))
        end
    """

    def __init__(self, write: Callable[[str], None]) -> None:
        self._write = write
        self._last = ("", -1)

    def __call__(self, now: Progress) -> None:
        """Writes what is new."""
        step = now.bytes_done * _LINES // now.bytes_total if now.bytes_total else 0
        if (now.phase, step) == self._last:
            return
        self._last = (now.phase, step)
        self._write(_line(now))


def _line(now: Progress) -> str:
    if now.phase != "transfer":
        return str(now.phase)
    done, total = now.bytes_done / 1e6, now.bytes_total / 1e6
    return f"transfer: {done:.1f} of {total:.1f} MB, {now.bucket} of {now.buckets} buckets"
