"""What an update comes to in numbers, under the names that loggers and callers are given."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from weight_update.report import EngineState, UpdateReport
from weight_update.update.versions import next_version

PREFIX = "weight_update"


@dataclass(frozen=True)
class Standing:
    """Where a sender stands once an update has ended.

    Attributes:
        updates: Updates until now that reached every engine that they needed.
        failures: Calls until now that raised.
        failed: Whether this one did.
        due: The version that this update was to bring, or brought.
        served_seconds: Age of the weights that the engines serve now, counted from the call that
            took them from the trainer; None before the first success.
        replaced_seconds: Age that the weights before them had reached when they were replaced;
            None where nothing of this sender's was.
    """

    updates: int
    failures: int
    failed: bool
    due: int
    served_seconds: float | None = None
    replaced_seconds: float | None = None


def metrics_of(report: UpdateReport, standing: Standing | None = None) -> dict[str, float]:
    """The numbers of one update, by name; bytes are bytes, times seconds, and GB are 1e9 bytes.

    ``weight_update/version`` is always there, and so is ``weight_update/engines/STATE``, how
    many engines are in each state, with ``engines/paused``. An update that succeeded has
    ``seconds/PHASE`` (``paused`` and ``total`` among them), ``bytes``, ``tensors`` and ``buckets``
    for each engine, ``gigabytes_per_second`` of the transfer, and ``warnings``. With a standing
    there are ``updates``, ``failures``, ``staleness/seconds``, ``staleness/replaced_seconds`` and
    ``failed_seconds``, what a failed update took. ``staleness/versions`` is how far the engine that
    is furthest behind is from what the trainer sent last; a label that is no number counts as 0.

    Args:
        report: What an update returned, or the ``report`` of the error that it raised.
        standing: What was before; None for the report by itself, of an update that succeeded.

    Example:
        >>> from weight_update.report import EngineOutcome
        >>> engines = {"http://a:1": EngineOutcome("http://a:1", EngineState.NEW, "3", False)}
        >>> report = UpdateReport(3, 2_000_000_000, 291, 1, {"transfer": 0.5}, engines)
        >>> metrics = metrics_of(report)
        >>> metrics["weight_update/gigabytes_per_second"], metrics["weight_update/engines/new"]
        (4.0, 1.0)
    """
    failed = standing is not None and standing.failed
    due = report.version if standing is None else standing.due
    numbers: dict[str, float | None] = {"version": report.version}
    numbers |= _engines(report)
    numbers |= {"staleness/versions": _behind(report, due)}
    numbers |= {} if failed else _costs(report)
    if standing is not None:
        numbers |= _history(standing)
    if failed:
        numbers["failed_seconds"] = report.seconds.get("total", 0.0)
    return {f"{PREFIX}/{name}": float(n) for name, n in numbers.items() if n is not None}


def refit_metrics(report: UpdateReport) -> dict[str, float]:
    """What an update cost, under the plain names that a synchronizer's callers log.

    Example:
        >>> refit_metrics(UpdateReport(3, 8, 1, 1, {"transfer": 0.5, "total": 1.0}, {}))
        {'version': 3.0, 'bytes': 8.0, 'transfer_seconds': 0.5, 'total_seconds': 1.0}
    """
    seconds = {f"{phase}_seconds": spent for phase, spent in report.seconds.items()}
    return {"version": float(report.version), "bytes": float(report.bytes), **seconds}


def _engines(report: UpdateReport) -> dict[str, float]:
    states = Counter(outcome.state for outcome in report.engines.values())
    counts: dict[str, float] = {f"engines/{state.value}": states[state] for state in EngineState}
    return {**counts, "engines/paused": sum(o.paused for o in report.engines.values())}


def _costs(report: UpdateReport) -> dict[str, float]:
    return {
        **{f"seconds/{phase}": seconds for phase, seconds in report.seconds.items()},
        "bytes": report.bytes,
        "tensors": report.tensors,
        "buckets": report.buckets,
        "gigabytes_per_second": report.gigabytes_per_second,
        "warnings": len(report.warnings),
    }


def _history(standing: Standing) -> dict[str, float | None]:
    return {
        "updates": standing.updates,
        "failures": standing.failures,
        "staleness/seconds": standing.served_seconds,
        "staleness/replaced_seconds": standing.replaced_seconds,
    }


def _behind(report: UpdateReport, due: int) -> int | None:
    labels = [o.version for o in report.engines.values() if o.version is not None]
    shown = [next_version(0, [label]) - 1 for label in labels]
    return max(0, due - min(shown)) if shown else None
