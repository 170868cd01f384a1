"""What the demo shows: a live table on a terminal, plain lines elsewhere."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from weight_update.demo.proof import Claim, Greedy, example
from weight_update.demo.task import PROMPTS, spell
from weight_update.demo.training import Step

_MILESTONES = 10
_LATEST = 4
_PLAIN_LINES = 12
_BAR = 8
_PHASES = ("pause", "drain", "begin", "transfer", "end", "flush", "stamp", "continue")
_COLUMNS = ("pause", "transfer", "flush", "continue")
_HEADINGS = (
    *("step", "reward", "version", "carried", "update\nms"),
    *("pause", "trans-\nfer", "flush", "conti-\nnue", "rest", "GB/s"),
)
_PLAIN_HEADING = (
    "update ms = pause, drain, begin, transfer, end, flush, stamp, continue (and the rest)\n"
    "step  reward         version  carried  update ms                       GB/s"
)
_EXAMPLE = 3


def bar(share: float) -> str:
    """A bar for a number from zero to one.

    Example:
        >>> bar(0.25)
        '██······'
    """
    halves = round(2 * _BAR * min(max(share, 0.0), 1.0))
    return ("█" * (halves // 2) + "▌" * (halves % 2)).ljust(_BAR, "·")


def rate(gigabytes_per_second: float) -> str:
    """A transfer rate that is readable when it is small.

    Example:
        >>> rate(2.5), rate(0.0314)
        ('2.50', '0.031')
    """
    return f"{gigabytes_per_second:.{2 if gigabytes_per_second >= 1 else 3}f}"


class Display:
    """Writes everything that a person reads.

    Args:
        console: Where to; a terminal gets a live table.
    """

    def __init__(self, console: Console) -> None:
        self._console = console

    def say(self, text: str) -> None:
        """Write one line."""
        self._console.print(Text(text), soft_wrap=True)

    def outputs(self, title: str, greedy: Greedy) -> None:
        """Show one greedy output of engine and trainer."""
        engine, trainer = example(greedy, _EXAMPLE)
        self.say("")
        self.say(f"{title}, greedily after {spell(PROMPTS[_EXAMPLE][1:])}:")
        self.say(f"  engine   {engine}")
        self.say(f"  trainer  {trainer}   ({greedy.equal} of {len(greedy.engine)} prompts equal)")
        self.say("")

    def follow(self, title: str, steps: Iterable[Step], total: int) -> list[Step]:
        """Show steps as they happen, and return them."""
        if self._console.is_terminal:
            return self._live(title, steps, total)
        return self._plain(title, steps, total)

    def _live(self, title: str, steps: Iterable[Step], total: int) -> list[Step]:
        seen: list[Step] = []
        table = step_table(title, milestones(seen, total))
        with Live(table, console=self._console, auto_refresh=False) as live:
            for step in steps:
                seen.append(step)
                live.update(step_table(title, milestones(seen, total)), refresh=True)
        return seen

    def _plain(self, title: str, steps: Iterable[Step], total: int) -> list[Step]:
        self.say(title)
        self.say(_PLAIN_HEADING)
        every = max(total // _PLAIN_LINES, 1)
        seen: list[Step] = []
        for step in steps:
            seen.append(step)
            if is_milestone(step.number, total, every):
                self.say(step_line(step))
        return seen

    def verdict(self, claims: Sequence[Claim], seconds: float, report: Path) -> None:
        """Show what was proven and what was not."""
        for claim in claims:
            mark = Text("✓ ", "bold green") if claim.proven else Text("✗ ", "bold red")
            self._console.print(mark + Text(claim.text))
            self._console.print(Text(f"    {claim.numbers}", "dim"), soft_wrap=True)
        failed = sum(not claim.proven for claim in claims)
        closing = Text(f"All {len(claims)} claims proven", "bold green")
        if failed:
            closing = Text(f"NOT PROVEN: {failed} of {len(claims)} claims failed", "bold red")
        closing += Text(f", in {seconds:.0f} s; {report} has the numbers.")
        self.say("")
        self._console.print(closing, soft_wrap=True)


def is_milestone(number: int, total: int, every: int) -> bool:
    """Whether a step is worth keeping in view: the first, the last, and some between."""
    return number in (1, total) or number % every == 0


def milestones(steps: Sequence[Step], total: int) -> list[Step]:
    """The latest steps, and enough of the earlier ones to see the way from the first."""
    every = max(total // _MILESTONES, 1)
    return [
        step
        for step in steps
        if step.number > len(steps) - _LATEST or is_milestone(step.number, total, every)
    ]


def step_table(title: str, steps: Sequence[Step]) -> Table:
    """A table of steps; it fits a terminal of 80 columns."""
    table = Table(title=title, title_justify="left", title_style="bold", box=None)
    table.padding = (0, 0, 0, 1)
    for heading in _HEADINGS:
        table.add_column(heading, justify="right", no_wrap=True, vertical="bottom")
    for step in steps:
        drawn = Text(f"{step.reward:.2f} ") + Text(bar(step.reward), "green")
        table.add_row(str(step.number), drawn, step.version, str(step.carried), *_timings(step))
    return table


def step_line(step: Step) -> str:
    """A step as one line of text."""
    line = f"{step.number:>4}  {step.reward:.2f} {bar(step.reward)}  {step.version:>7}"
    if step.update is None:
        return f"{line}  no push"
    seconds = step.update.seconds
    phases = " ".join(f"{_ms(seconds[name]):>2}" for name in _PHASES if name in seconds)
    speed = rate(step.update.gigabytes_per_second)
    return f"{line}  {step.carried:>7}  {_ms(seconds['total']):>3} = {phases}  {speed:>5}"


def _timings(step: Step) -> tuple[str, ...]:
    """Milliseconds in total, in the columns' phases and in all others, and the rate."""
    if step.update is None:
        return ("",) * (len(_COLUMNS) + 3)
    seconds = step.update.seconds
    parts = [seconds.get(phase, 0.0) for phase in _COLUMNS]
    rest = seconds["total"] - sum(parts)
    speed = rate(step.update.gigabytes_per_second)
    return (_ms(seconds["total"]), *map(_ms, parts), _ms(rest), speed)


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.0f}"
