"""Settings of all tests, and what the summary counts."""

from __future__ import annotations

from collections import Counter
from contextlib import suppress
from typing import Any

with suppress(ImportError):  # not every folder needs it
    from hypothesis import HealthCheck, settings

    # An example takes as long as the machine is busy: its time says nothing about the code.
    settings.register_profile("busy", deadline=None, suppress_health_check=[HealthCheck.too_slow])
    settings.load_profile("busy")


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Adds up what table-driven tests recorded with ``record_property("combinations ...", n)``."""
    counts: Counter[str] = Counter()
    for reports in terminalreporter.stats.values():
        for report in reports:
            if getattr(report, "when", None) == "call":
                named = (p for p in report.user_properties if p[0].startswith("combinations"))
                counts.update(dict(named))
    if counts:
        terminalreporter.section("fault tables")
    for name, count in sorted(counts.items()):
        terminalreporter.write_line(f"{count:,} {name}")
