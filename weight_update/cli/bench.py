"""``weight-update bench``: measure updates on this machine."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from weight_update.cli import bench_fleet, bench_gpu, bench_link
from weight_update.cli.output import (
    Exit,
    console,
    give,
    needs_extra,
    result_on_stdout,
    say,
    usage,
)
from weight_update.cli.rows import measure

if TYPE_CHECKING:
    from weight_update.bench.soak.run import SoakResult

HELP = """\
Measure updates on this machine, beside what the link allows in the same run.

\b
Example:
  weight-update bench loopback --tensors 300 --engines 1 --gigabytes 0.05 --rounds 3
  weight-update bench weights --job names
  weight-update bench fleet --engines 1 --engines 4
  weight-update bench gpu --job ipc --layers 4 --rounds 3
  weight-update bench link --server http://a:30000
  weight-update bench soak --updates 50
"""

app = typer.Typer(
    help=HELP,
    no_args_is_help=True,
    rich_markup_mode=None,
)


app.command(help=bench_fleet.HELP)(bench_fleet.fleet)
app.command(help=bench_gpu.HELP)(bench_gpu.gpu)
app.command(help=bench_link.HELP)(bench_link.link)

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
    measure(run_loopback(jobs, say), as_json=as_json)


class WeightsJob(StrEnum):
    """What ``bench weights`` measures."""

    LORA = "lora"
    SHARDED = "sharded"
    NAMES = "names"


WEIGHTS_HELP = """Measure what it takes to read and to name a trainer's weights.

\b
  lora     a model with LoRA r=16 on all linear layers, merged layer by layer and packed,
           beside a merged copy of the whole model, as TorchRL takes it; and the memory of
           both. 0.5B parameters in bf16 on the CPU (2.6 GB in all), 8B on a GPU
  sharded  whole updates of a model that FSDP2 shards over three processes of this host,
           gathered a bucket ahead of the wire, beside one bare gather of all parameters; the
           memory of every rank, and how much of the gathering the wire hid
  names    the 45,000 tensors of DeepSeek-V3, without their values: the plan of an update,
           and finding out that nothing changed beside one state_dict()

Both sides of a ratio are measured one after the other, and the table shows the round with
the median ratio.

\b
Example: all of them, and a quick look
  weight-update bench weights
  weight-update bench weights --job names --rounds 3

\b
Exit codes:
  0    measured; a promise that this run did not keep is marked in the table
  1    values were not the trainer's, or a job failed
  2    wrong arguments
  130  interrupted
"""


@app.command(help=WEIGHTS_HELP)
def weights(
    job: Annotated[
        list[WeightsJob] | None, typer.Option(help="Run only this; give it again for more.  [all]")
    ] = None,
    rounds: Annotated[int, typer.Option(min=1, help="How often each job is measured.")] = 5,
    device: Annotated[
        str, typer.Option(help="Where the model of the job lora is: cpu, or cuda.")
    ] = "cpu",
    as_json: Annotated[
        bool, typer.Option("--json", help="Write a list of rows and nothing else.")
    ] = False,
) -> None:
    """Measures what it takes to read and to name a trainer's weights."""
    needs_extra("weight-update bench")
    from weight_update.bench.weights import JOBS, WeightsJobs, run_weights

    chosen = [each.value for each in job or ()]
    jobs = WeightsJobs([each for each in JOBS if each in chosen or not chosen], rounds, device)
    objection = jobs.objection()
    if objection:
        usage(objection)
    measure(run_weights(jobs, say), as_json=as_json)


SOAK_HELP = """Update engines again and again, under traffic and with faults by chance.

Reference engines of this host, each a process of its own, are updated by one long-lived sender
that needs all of them, then by one that needs all but one; clients ask every engine all the
time. The pause mode changes with each update. By chance an engine refuses, lies, answers
nonsense or nothing, hangs, is frozen, killed (-9) or restarted, at any step.

\b
After every update it is checked that
  - it returned by its deadline and 2 s, and the trainer's own weights did not change
  - the report says of each engine what that engine is: what it holds, generates and shows, and
    whether it is paused
  - versions went up by one a success
  - an update that nothing disturbed left every engine new and serving
and of every answer to a client that it came, whole, and that each token is what the version
it names says. A connection may break only if its engine was killed.

Memory, threads and descriptors of each process are noted all along. Their medians of the last
fifth of the run may lie above those of the second fifth by 2 threads, 2 descriptors in use, and
5 % of memory or 20 MB, whichever is more; connections that an engine closed may wait in a
sender's pool, up to the 4 an engine that it holds. Of an engine, its longest life counts. Fewer
than 15 samples are not judged.

\b
Example: the whole (about half an hour), with its picture, and a quick look
  weight-update bench soak --plot soak.svg
  weight-update bench soak --updates 50 --sample-every 2 --seed 7

\b
Exit codes:
  0    nothing was wrong, and nothing grew
  1    something was, and the text says what; or the soak itself failed
  2    wrong arguments
  130  interrupted
"""


@app.command(help=SOAK_HELP)
def soak(
    updates: Annotated[int, typer.Option(min=2, help="How many updates.")] = 1000,
    engines: Annotated[int, typer.Option(help="How many engines.")] = 3,
    clients: Annotated[int, typer.Option(min=1, help="Clients of each engine.")] = 2,
    faults: Annotated[
        float, typer.Option(min=0.0, max=1.0, help="Chance that an update is disturbed.")
    ] = 0.2,
    seed: Annotated[int, typer.Option(help="Repeats the choices of a run.")] = 0,
    timeout: Annotated[float, typer.Option(min=1.0, help="Seconds that an update may take.")] = 10,
    sample_every: Annotated[
        int, typer.Option(min=1, help="Updates between two looks at the processes.")
    ] = 10,
    plot: Annotated[
        Path | None,
        typer.Option(dir_okay=False, help="Draw memory, threads and descriptors (.svg, .png)."),
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Write the result, samples and all, and nothing else.")
    ] = False,
) -> None:
    """Updates reference engines again and again, with faults by chance."""
    needs_extra("weight-update bench")
    from weight_update.bench.soak.plot import MISSING_EXTRA, can_plot
    from weight_update.bench.soak.run import SoakJob, run_soak

    job = SoakJob(updates, engines, clients, faults, seed, timeout, sample_every=sample_every)
    objection = job.objection() or (MISSING_EXTRA if plot and not can_plot() else None)
    if objection:
        usage(objection)
    quiet: AbstractContextManager[None] = result_on_stdout() if as_json else nullcontext()
    with quiet:
        try:
            result = run_soak(job, say)
        except (RuntimeError, OSError) as error:  # an engine did not start, no space
            say(f"the soak failed: {error}")
            raise typer.Exit(Exit.FAILED) from error
        _tell_soak(result, plot, as_json=as_json)
    if not result.ok:
        raise typer.Exit(Exit.FAILED)


def _tell_soak(result: SoakResult, plot: Path | None, *, as_json: bool) -> None:
    if plot is not None:
        from weight_update.bench.soak.plot import plot as draw

        draw(result, plot)
    if as_json:
        give(result.to_dict())
        return
    out = console()
    for line in result.lines():
        out.print(line, markup=False)
