"""What an engine holds beside what a trainer meant to send, without moving the weights again."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import requests

from weight_update.reference_engine.sums import positional_sums
from weight_update.weights.extract import extract_weights
from weight_update.weights.reading import read_in_turn

_SECONDS = 120.0


@dataclass(frozen=True)
class Look:
    """What a reference engine says of its parameters.

    Attributes:
        sums: An exact sum over the bits of each, see
            :func:`~weight_update.reference_engine.sums.positional_sums`.
        addresses: Where each lies.
        held_bytes: GPU memory that the engine's tensors take; None on a CPU.
        peak_bytes: The most that they took since the last look.
    """

    sums: Mapping[str, int]
    addresses: Mapping[str, int]
    held_bytes: int | None = None
    peak_bytes: int | None = None


def look_at(url: str) -> Look:
    """Looks at the engine at a URL, whose only rank holds everything."""
    answer = requests.get(f"{url}/_reference/weights", timeout=_SECONDS)
    answer.raise_for_status()
    (rank,) = answer.json()["ranks"]
    return Look(**rank)


def sums_of(source: Any) -> dict[str, int]:
    """The sums that an engine must have once it has taken ``source``, by name."""
    weights = extract_weights(source)
    names = [weight.spec.name for weight in weights]
    return dict(zip(names, positional_sums(read_in_turn(weights)), strict=True))
