"""What ``weight-update bench`` shows of its rows."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING

import typer

from weight_update.cli.output import Exit, ListOnStdout, console, result_on_stdout, say

if TYPE_CHECKING:
    from rich.table import Table

    from weight_update.bench.rows import Row


def measure(measured: Iterator[Row], *, as_json: bool) -> None:
    """Measures and shows; fails if that fails, or if an engine held other values.

    Args:
        measured: The rows; each is shown as soon as it was taken, whatever becomes of the next.
        as_json: Write a list of them and nothing else.
    """
    rows: list[Row] = []
    quiet: AbstractContextManager[None] = result_on_stdout() if as_json else nullcontext()
    with quiet:
        try:
            _take(measured, rows, as_json=as_json)
        except (RuntimeError, OSError) as error:  # an engine or a receiver ended, no space
            say(f"the benchmark failed: {error}")
            raise typer.Exit(Exit.FAILED) from error
        finally:
            if not as_json:
                _show(rows)
    if any(row.correct is False for row in rows):
        raise typer.Exit(Exit.FAILED)


def _take(measured: Iterator[Row], rows: list[Row], *, as_json: bool) -> None:
    listing: AbstractContextManager[ListOnStdout | None]
    listing = ListOnStdout() if as_json else nullcontext()
    with listing as written:
        for row in measured:
            rows.append(row)
            _, beside, seconds, limit, ratio, _ = _cells(row)
            say(f"{row.job}: {seconds} s, {ratio} of {beside} ({limit} s)")
            if written is not None:
                written.give(row.to_dict())


def _show(rows: list[Row]) -> None:
    if not rows:
        return
    out = console()
    out.print(_table(rows))
    for row in rows:
        for line in (*_findings(row), *(f"not kept: {failure}" for failure in row.failures)):
            out.print(f"{row.job}: {line}")


def _table(rows: Iterable[Row]) -> Table:
    from rich.box import SIMPLE
    from rich.table import Table

    table = Table(box=SIMPLE, pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column("job")  # it alone is folded where a line is short
    table.add_column("beside", no_wrap=True)
    for column in ("seconds", "limit", "ratio", "aim"):
        table.add_column(column, justify="right", no_wrap=True)
    for row in rows:
        table.add_row(*_cells(row))
    return table


def _cells(row: Row) -> tuple[str, ...]:
    median = row.median
    return (
        row.job.partition(", against")[0],
        row.limit,
        f"{median.seconds:.3f}",
        f"{median.limit_seconds:.3f}",
        f"{median.ratio:.2f}x",
        "" if row.aim is None else f"{row.aim:.2f}x",
    )


def _findings(row: Row) -> Iterable[str]:
    """What the table has no column for, once a job."""
    if row.extra_memory_bytes is not None:
        yield f"at most {row.extra_memory_bytes / 1e6:,.0f} MB on the trainer above its model"
    if row.engine_memory_bytes is not None:
        yield f"at most {row.engine_memory_bytes / 1e6:,.0f} MB on the engine above its model"
    if (route := row.identity.get("route")) is not None:
        yield str(route)
    if (overlapped := row.identity.get("overlapped_seconds")) is not None:
        whole = row.identity["gathering_seconds"]
        yield f"{overlapped:.2f} of {whole:.2f} s of gathering passed while a bucket travelled"
    if (copied := row.identity.get("copy_memory_bytes")) is not None:
        yield f"{row.limit} took {copied / 1e6:,.0f} MB above it"
    if (trips := row.identity.get("round_trips")) is not None:
        cpu = row.identity["cpu_seconds"]
        yield (
            f"{len(row.identity['requests'])} requests an engine in {trips} round trips; processor "
            f"time {cpu['trainer']:.2f} s of the trainer, {cpu['engines']:.2f} s of the engines"
        )
    if row.correct and "against" not in row.job:
        yield "every tensor of every engine equals the trainer's, bit for bit"
