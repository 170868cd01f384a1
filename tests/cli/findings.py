"""What a diagnosis found, as text."""

from __future__ import annotations

from weight_update.cli.doctor_checks import diagnose
from weight_update.cli.doctor_facts import Facts


def found(facts: Facts) -> str:
    """Everything that was found, a line each."""
    diagnosis = diagnose(facts)
    lines = [f"problem: {p.what} [{p.where}] -> {p.remedy}" for p in diagnosis.problems]
    for each in diagnosis.servers:
        lines += [f"warning: {w['what']} -> {w['remedy']}" for w in each["warnings"]]
        lines += [f"unknown: {what}" for what in each["unknown"]]
    return "\n".join(lines)
