"""The picture of a soak: what each process held over time, and when something went wrong."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

from weight_update.bench.soak.run import SoakResult
from weight_update.bench.soak.vitals import Vitals

MISSING_EXTRA = 'the plot needs an extra: pip install ".[soak]" (from a clone)'

_TRAINER = "the trainer"
_PANELS: tuple[tuple[str, Callable[[Vitals], float]], ...] = (
    ("resident memory, MB", lambda vitals: vitals.rss_bytes / 1e6),
    ("threads", lambda vitals: vitals.threads),
    ("open descriptors", lambda vitals: vitals.fds),
)


def can_plot() -> bool:
    """Whether matplotlib is there."""
    return importlib.util.find_spec("matplotlib") is not None


def plot(result: SoakResult, path: Path) -> None:
    """Draws a result.

    Args:
        result: What was measured.
        path: Where to; the suffix says in which format.
    """
    import matplotlib as mpl
    from matplotlib.figure import Figure

    with mpl.rc_context({"svg.hashsalt": "soak", "font.size": 8}):
        figure = Figure(figsize=(9, 7), layout="constrained")
        panels = figure.subplots(len(_PANELS), 1, sharex=True)
        for panel, (title, value) in zip(panels, _PANELS, strict=True):
            _draw(panel, result, title, value)
        panels[-1].set_xlabel("update")
        panels[0].legend(loc="center right", fontsize=7)
        figure.suptitle(_title(result))
        figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)


def _title(result: SoakResult) -> str:
    return (
        f"{result.job.updates:,} updates under traffic, {len(result.struck)} of them disturbed; "
        f"{result.answers.get('answers', 0):,} answers, {result.found} problems"
    )


def _draw(panel: Any, result: SoakResult, title: str, value: Callable[[Vitals], float]) -> None:
    """One figure of all processes, marks where an update was disturbed, a line between senders."""
    for process in sorted({sample.process for sample in result.samples}):
        mine = [sample for sample in result.samples if sample.process == process]
        style = {"lw": 1.6, "color": "black"} if process == _TRAINER else {"lw": 0.8, "alpha": 0.8}
        panel.plot(
            [s.update for s in mine], [value(s.vitals) for s in mine], label=process, **style
        )
    marked = {"restarted": ("tab:red", True), "disturbed": ("tab:orange", False)}
    for label, (color, restarted) in marked.items():
        updates = [s.update for s in result.struck if s.restarted is restarted]
        panel.plot(
            updates, [0] * len(updates), "|", color=color, ms=9, mew=0.7, clip_on=False, label=label
        )
    panel.axvline(result.job.updates // 2, ls=":", lw=0.8, color="gray", label="second sender")
    panel.set_ylim(bottom=0)
    panel.set_ylabel(title)
    panel.grid(alpha=0.3)
