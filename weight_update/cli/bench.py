"""``weight-update bench``: measure updates on this machine."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Annotated

import typer

from weight_update.cli.output import (
    Exit,
    console,
    give,
    needs_extra,
    result_on_stdout,
    say,
    usage,
)

if TYPE_CHECKING:
    from rich.table import Table

    from weight_update.bench.rows import Row

HELP = """\
Measure updates on this machine, beside what the link allows in the same run.

\b
Example:
  weight-update bench loopback --tensors 300 --engines 1 --gigabytes 0.05 --rounds 3
"""

app = typer.Typer(
    help=HELP,
    no_args_is_help=True,
    rich_markup_mode=None,
)


@app.callback()
def _top() -> None:
    """Keeps ``loopback`` a command of its own."""


LOOPBACK_HELP = """Update reference engines on this host, over the loopback.

Each round does a whole update_weights() and, right before and after it, a bare torch
broadcast of the same bytes and one bare broadcast a tensor. The ratios are of single
rounds; the table shows the round with the median ratio. Afterwards every tensor of every
engine is compared bit for bit.

\b
Example: all jobs (some minutes, 6 GB of memory), and a quick look
  weight-update bench loopback
  weight-update bench loopback --tensors 300 --engines 1 --gigabytes 0.05 --rounds 3

\b
Exit codes:
  0    measured; a promise that this run did not keep is marked in the table
  1    an engine held other values than the trainer, or a job failed
  2    wrong arguments
  130  interrupted
"""


@app.command(help=LOOPBACK_HELP)
def loopback(
    tensors: Annotated[
        list[int] | None,
        typer.Option(help="Tensors of a model; give it again for more models.  [300, 20000]"),
    ] = None,
    engines: Annotated[
        list[int] | None,
        typer.Option(help="Engines that an update reaches; give it again.  [1, 2]"),
    ] = None,
    gigabytes: Annotated[float, typer.Option(min=0.001, help="Size of each model.")] = 1.0,
    rounds: Annotated[int, typer.Option(min=1, help="How often each job is measured.")] = 5,
    bucket_bytes: Annotated[
        int | None, typer.Option(min=1, help="Size of a bucket.  [the scheme's default]")
    ] = None,
    device: Annotated[
        str, typer.Option(help="cpu (gloo), or cuda (NCCL; trainer and engines on a GPU each).")
    ] = "cpu",
    against: Annotated[
        str | None,
        typer.Option(help="torchrl: also run TorchRL's own scheme on the same jobs (cuda only)."),
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Write a list of rows and nothing else.")
    ] = False,
) -> None:
    """Updates reference engines on this host."""
    needs_extra("weight-update bench")
    from weight_update.bench.loopback import GIGABYTE, LoopbackJobs, run_loopback

    jobs = LoopbackJobs(
        tensors=tuple(tensors or (300, 20_000)),
        engines=tuple(engines or (1, 2)),
        nbytes=round(gigabytes * GIGABYTE),
        rounds=rounds,
        device=device,
        bucket_bytes=bucket_bytes,
        against=against,
    )
    objection = jobs.objection()
    if objection:
        usage(objection)
    _run(run_loopback(jobs, say), as_json=as_json)


def _run(measured: Iterator[Row], *, as_json: bool) -> None:
    """Measures and shows; fails if that fails, or if an engine held other values."""
    quiet: AbstractContextManager[None] = result_on_stdout() if as_json else nullcontext()
    with quiet:
        try:
            rows = list(measured)
        except (RuntimeError, OSError) as error:  # an engine or a receiver ended, no space
            say(f"the benchmark failed: {error}")
            raise typer.Exit(Exit.FAILED) from error
        _show(rows, as_json=as_json)
    if any(row.correct is False for row in rows):
        raise typer.Exit(Exit.FAILED)


def _show(rows: list[Row], *, as_json: bool) -> None:
    if as_json:
        give([row.to_dict() for row in rows])
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
    for column in ("job", "beside"):
        table.add_column(column, no_wrap=True)
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
    if row.correct and "against" not in row.job:
        yield "every tensor of every engine equals the trainer's, bit for bit"
