"""``weight-update demo``: trains a policy whose weights reach a live engine every step."""

from __future__ import annotations

import json
import time
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from weight_update.cli.output import Exit, console, needs_extra, plain, usage

if TYPE_CHECKING:
    from weight_update.demo.run import Options

HELP = """\
Train a tiny policy whose weights reach a live engine after every step, and prove it.

The policy learns to count (3 4 5 ... 9 0 1) by policy gradient. All samples come from a live
inference engine, a process of its own that starts with other weights; the only way for it to
count better is that the trainer's weights reach it. At the end the demo checks, with numbers,
that

\b
  - the engine's greedy output differed from the trainer's at first, and equals it at the end
  - the reward rose well above a control run, the same without pushes
  - no request was lost, and some were carried across updates
  - every token carries the version of the weights that made it: its probability, recomputed
    with that version, is the one that the engine reported

\b
Example:
  weight-update demo                  half a minute on two cores
  weight-update demo --engine sglang  a real SGLang on the CPU (make engines)
  weight-update demo --no-push        watch the proof fail

\b
Exit codes:
  0    all of it was proven
  1    not all of it
  2    wrong arguments
  130  interrupted; nothing was proven
"""


class Engine(StrEnum):
    """What serves the samples."""

    REFERENCE = "reference"
    SGLANG = "sglang"


EngineKind = Annotated[
    Engine,
    typer.Option(
        "--engine",
        help="reference: the stand-in of this package, starts in seconds; sglang: a real server "
        "(make engines).",
    ),
]
ReportFile = Annotated[
    Path, typer.Option("--report", metavar="FILE", help="Where the numbers are written.")
]
Steps = Annotated[
    int,
    typer.Option(
        "--steps",
        metavar="N",
        min=1,
        help="Steps of each run; too few to learn in means no proof.",
    ),
]
Seed = Annotated[int, typer.Option("--seed", metavar="S", help="Seed of the first weights.")]
Push = Annotated[
    bool,
    typer.Option(
        "--push/--no-push",
        help="--no-push leaves the engine's weights alone: the same loop learns nothing then.",
    ),
]


def demo(
    engine: EngineKind = Engine.REFERENCE,
    report: ReportFile = Path("demo-report.json"),
    steps: Steps = 60,
    seed: Seed = 0,
    push: Push = True,
) -> None:
    """Train a tiny policy whose weights reach a live engine after every step, and prove it."""
    started = time.perf_counter()
    needs_extra("weight-update demo")
    try:
        # Before anything else, so that no older report can be taken for this run's.
        _write(report, _unproven(RuntimeError("the demo did not finish")))
    except OSError as error:
        usage(f"--report {report}: {error.strerror}")
    from weight_update.demo.run import Options

    try:
        proven = _demonstrate(Options(engine.value, steps, seed, push), report, started)
    except KeyboardInterrupt:
        typer.echo("Interrupted; nothing was proven.")
        raise typer.Exit(Exit.INTERRUPTED) from None
    raise typer.Exit(Exit.OK if proven else Exit.FAILED)


def _demonstrate(options: Options, path: Path, started: float) -> bool:
    from weight_update import WeightUpdateError
    from weight_update.demo.display import Display
    from weight_update.demo.proof import claims, report
    from weight_update.demo.run import run
    from weight_update.demo.sampler import DemoError

    display = Display(console())
    try:
        evidence = run(options, display)
    except (DemoError, WeightUpdateError) as error:
        display.say(f"The demo failed, and nothing was proven: {error}")
        _write(path, _unproven(error))
        return False
    seconds = time.perf_counter() - started
    numbers = report(evidence, seconds)
    _write(path, numbers)
    display.verdict(claims(evidence), seconds, path)
    return bool(numbers["proven"])


def _unproven(error: Exception) -> dict[str, Any]:
    return {"proven": False, "error": plain(error)}


def _write(path: Path, numbers: dict[str, Any]) -> None:
    path.write_text(json.dumps(numbers, indent=2) + "\n")
