"""One row of a benchmark's table."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any


@dataclass(frozen=True)
class Pair:
    """One round: what was measured, and what it is measured against, one after the other.

    Attributes:
        seconds: The job.
        limit_seconds: What it is compared with.
    """

    seconds: float
    limit_seconds: float

    @property
    def ratio(self) -> float:
        """How many times the limit the job took."""
        return self.seconds / self.limit_seconds


def median_pair(pairs: Sequence[Pair]) -> Pair:
    """The round whose ratio is the median; of an even number, the slower of the middle two.

    Both times are of one round, since a busy machine slows neighbours alike.

    Example:
        >>> median_pair([Pair(1.0, 1.0), Pair(9.0, 3.0), Pair(4.0, 2.0)])
        Pair(seconds=4.0, limit_seconds=2.0)
    """
    return sorted(pairs, key=lambda pair: pair.ratio)[len(pairs) // 2]


@dataclass(frozen=True)
class Row:
    """What a benchmark says of one job.

    Attributes:
        job: What was done, such as ``300 tensors, 1 engine``.
        limit: What ``limit_seconds`` is.
        pairs: The rounds, in order.
        aim: The ratio that the library promises; None where nothing is promised.
        extra_memory_bytes: The trainer's peak above its model; None where it was not measured.
        engine_memory_bytes: Likewise the engine's.
        allowed_memory_bytes: What either may be.
        broken: Promises without a figure that were not kept.
        correct: Whether every engine's tensors were compared bit for bit, and were right; None
            where nothing moved.
        identity: What identifies the run: ``machine``, ``versions``, ``settings``.
    """

    job: str
    limit: str
    pairs: Sequence[Pair]
    aim: float | None = None
    extra_memory_bytes: int | None = None
    engine_memory_bytes: int | None = None
    allowed_memory_bytes: int | None = None
    broken: Sequence[str] = ()
    correct: bool | None = None
    identity: Mapping[str, Any] = field(default_factory=dict)

    @property
    def median(self) -> Pair:
        """The round that stands for all."""
        return median_pair(self.pairs)

    @property
    def failures(self) -> list[str]:
        """Which promises this row does not keep."""
        found = [*self.broken]
        if self.correct is False:
            found.append("an engine holds other values than the trainer")
        if self.aim is not None and self.median.ratio > self.aim:
            found.append(f"{self.median.ratio:.2f}x of {self.limit}, promised {self.aim:.2f}x")
        return [*found, *self._excesses()]

    def _excesses(self) -> Iterator[str]:
        allowed = self.allowed_memory_bytes
        sides = (("", self.extra_memory_bytes), (" on the engine", self.engine_memory_bytes))
        for where, extra in sides:
            if extra is not None and allowed is not None and extra > allowed:
                yield f"{extra / 1e6:,.0f} MB above the model{where}, promised {allowed / 1e6:,.0f}"

    def to_dict(self) -> dict[str, Any]:
        """As JSON data; ``ratio`` is ``seconds / limit_seconds``, all three of one round."""
        shown = {field.name: getattr(self, field.name) for field in fields(self)}
        del shown["pairs"], shown["identity"], shown["broken"]
        median = self.median
        return {**shown, **self.identity} | {
            "seconds": median.seconds,
            "limit_seconds": median.limit_seconds,
            "ratio": median.ratio,
            "ratios": [pair.ratio for pair in self.pairs],
            "failures": self.failures,
        }
