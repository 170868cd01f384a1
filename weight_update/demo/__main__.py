"""The command line of the demo: ``python -m weight_update.demo``."""

from __future__ import annotations

import argparse
import importlib.util
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

_STARTED = time.perf_counter()
_NEEDED = ("transformers", "starlette", "uvicorn", "rich")

_DESCRIPTION = """\
Trains a tiny policy to count (3 4 5 ... 9 0 1) by policy gradient. All samples come from a live
inference engine, a process of its own that starts with other weights; the only way for it to
count better is that the trainer's weights reach it. They are pushed every step, while requests
are running. At the end the demo checks, with numbers, that

  - the engine's greedy output differed from the trainer's at first, and equals it at the end
  - the reward rose well above a control run, the same without pushes
  - no request was lost, and some were carried across updates
  - every token carries the version of the weights that made it: its probability, recomputed
    with that version, is the one that the engine reported
"""
_EPILOG = """\
exit status: 0 if all of it was proven, 1 if not, 2 for wrong arguments.

examples:
  python -m weight_update.demo                  half a minute on two cores
  python -m weight_update.demo --engine sglang  a real SGLang on the CPU (make engines)
  python -m weight_update.demo --no-push        watch the proof fail
"""


def parser() -> argparse.ArgumentParser:
    """The arguments."""
    made = argparse.ArgumentParser(
        prog="python -m weight_update.demo",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    made.add_argument(
        "--engine",
        choices=("reference", "sglang"),
        default="reference",
        help="reference: the stand-in of this package, starts in seconds (default); "
        "sglang: a real server",
    )
    made.add_argument(
        "--report",
        type=Path,
        default=Path("demo-report.json"),
        metavar="FILE",
        help="where the numbers are written (default: %(default)s)",
    )
    made.add_argument(
        "--steps",
        type=_count,
        default=60,
        metavar="N",
        help="steps of each run; too few to learn in means no proof (default: %(default)s)",
    )
    made.add_argument(
        "--seed",
        type=int,
        default=0,
        metavar="S",
        help="seed of the first weights (default: %(default)s)",
    )
    made.add_argument(
        "--no-push",
        dest="push",
        action="store_false",
        help="leave the engine's weights alone: the same loop, which then learns nothing",
    )
    return made


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number above zero")
    return int(text)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the demo, and return its exit status."""
    made = parser()
    chosen = made.parse_args(arguments)
    missing = [name for name in _NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        print(f'{missing[0]} is not installed. The demo needs: pip install "weight-update[demo]"')
        return 1
    try:
        # Before anything else, so that no older report can be taken for this run's.
        _write(chosen.report, {"proven": False, "error": "the demo did not finish"})
    except OSError as error:
        made.error(f"--report {chosen.report}: {error.strerror}")
    try:
        return _demonstrate(chosen)
    except KeyboardInterrupt:
        print("Interrupted; nothing was proven.")
        return 130


def _demonstrate(chosen: argparse.Namespace) -> int:
    from rich.console import Console

    from weight_update import WeightUpdateError
    from weight_update.demo.display import Display
    from weight_update.demo.proof import claims, report
    from weight_update.demo.run import Options, run
    from weight_update.demo.sampler import DemoError

    display = Display(Console())
    options = Options(chosen.engine, chosen.steps, chosen.seed, chosen.push)
    try:
        evidence = run(options, display)
    except (DemoError, WeightUpdateError) as error:
        display.say(f"The demo failed, and nothing was proven: {error}")
        _write(chosen.report, {"proven": False, "error": str(error)})
        return 1
    seconds = time.perf_counter() - _STARTED
    numbers = report(evidence, seconds)
    _write(chosen.report, numbers)
    display.verdict(claims(evidence), seconds, chosen.report)
    return 0 if numbers["proven"] else 1


def _write(path: Path, numbers: dict[str, Any]) -> None:
    path.write_text(json.dumps(numbers, indent=2) + "\n")


if __name__ == "__main__":
    sys.exit(main())
