"""``weight-update bench fleet``: many engines whose answers come late."""

from __future__ import annotations

from typing import Annotated

import typer

from weight_update.cli.output import needs_extra, say, usage
from weight_update.cli.rows import measure

HELP = """Update many engines of this host whose answers come late.

Does a call wait for another engine's answer? Reference engines, each a process of its own with a
small model, put the same latency on every answer, as a long line does. Each round updates one
engine and then all of them; the ratio says what the others cost. What the trainer and the
engines compute is not hidden by waiting: 16 engines on two cores cost their processor time, which
the table's notes tell.

\b
Example: the whole (16 processes, 6 GB of memory), and a quick look
  weight-update bench fleet
  weight-update bench fleet --engines 1 --engines 4 --rounds 3

\b
Exit codes:
  0    measured; a promise that this run did not keep is marked in the table
  1    an engine held other values than the trainer, or a job failed
  2    wrong arguments
  130  interrupted
"""


def fleet(
    engines: Annotated[
        list[int] | None,
        typer.Option(help="Engines that an update reaches; give it again.  [1, 4, 16]"),
    ] = None,
    latency: Annotated[
        float, typer.Option(min=0.0, metavar="SECONDS", help="Put on every answer.")
    ] = 0.05,
    megabytes: Annotated[float, typer.Option(min=0.1, help="Size of the model.")] = 1.0,
    rounds: Annotated[int, typer.Option(min=1, help="How often each job is measured.")] = 5,
    as_json: Annotated[
        bool, typer.Option("--json", help="Write a list of rows and nothing else.")
    ] = False,
) -> None:
    """Updates many engines whose answers come late."""
    needs_extra("weight-update bench")
    from weight_update.bench.fleet import FleetJobs, run_fleet

    jobs = FleetJobs(tuple(engines or (1, 4, 16)), latency, round(megabytes * 1e6), rounds)
    objection = jobs.objection()
    if objection:
        usage(objection)
    measure(run_fleet(jobs, say), as_json=as_json)
