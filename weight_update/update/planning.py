"""From the weights of an update to the buckets that its engines get."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from weight_update.facts import Intake
from weight_update.options import UpdateOptions
from weight_update.weights.buckets import Bucket, Plan, plan_buckets
from weight_update.weights.cargo import Format, Formats
from weight_update.weights.fitting import Wishes, common, fit, refuse_torn
from weight_update.weights.growing_plan import GrowingPlan
from weight_update.weights.specs import Lasting, Weight
from weight_update.weights.stream import Stream

T = TypeVar("T")


@dataclass(frozen=True)
class Payload:
    """The weights of one update.

    Attributes:
        weights: In the order in which they are sent; of a stream, the first.
        whole: Whether they are a whole model's, and not some weights only.
        stream: Where they come from one after the other, if they are not known beforehand.
    """

    weights: Sequence[Weight] = ()
    whole: bool = True
    stream: Stream | None = None

    def end(self) -> None:
        """Nothing more is read from a stream by a thread that was left behind."""
        if self.stream is not None:
            self.stream.end()

    def begun(self) -> Payload:
        """The same, with the first weight of a stream."""
        return self if self.stream is None else replace(self, weights=(self.stream.head(),))


class PlanMemory:
    """What the last plan was made of, so that it is not made again.

    Example:
        >>> memory = PlanMemory()
        >>> memory.attend(True)
        >>> memory.once("sum", (1, 2), lambda: 3), memory.once("sum", (1, 2), lambda: 4)
        (3, 3)
    """

    def __init__(self) -> None:
        self._made: dict[str, tuple[object, Any]] = {}
        self._keeps = False

    def attend(self, keeps: bool) -> None:
        """Learns whether anything may be kept: no tensor, and no value that has to be read."""
        self._keeps = keeps
        if not keeps:
            self._made.clear()

    def once(self, what: str, made_of: object, make: Callable[[], T]) -> T:
        """What was made of the same the last time, or is made now."""
        kept = self._made.get(what)
        if kept is not None and kept[0] == made_of:
            made: T = kept[1]
            return made
        made = make()
        if self._keeps:
            self._made[what] = (made_of, made)
        return made


def planned(weights: Sequence[Weight], options: UpdateOptions, format_of: Formats) -> Plan:
    """Which weights travel together, as they are.

    Args:
        weights: In the order in which they are sent.
        options: Of which the size of a bucket is one.
        format_of: Chooses how they are divided.
    """
    return _planned(weights, options, format_of(weights))


def _planned(weights: Sequence[Weight], options: UpdateOptions, chosen: Format) -> Plan:
    even = options.bucket_bytes is None
    return plan_buckets(weights, chosen.bucket_bytes, chosen.packs, even=even)


def fitted_plan(
    payload: Payload,
    intakes: Mapping[str, Intake],
    known_names: Collection[str],
    options: UpdateOptions,
    format_of: Formats,
    memory: PlanMemory,
) -> Plan | GrowingPlan:
    """Which weights travel together, made as the engines take them.

    Args:
        payload: What is to be sent.
        intakes: How each engine, by URL, takes weights.
        known_names: Of the whole model, as far as engines took it before, or as it is on disk.
        options: What the user asked for.
        format_of: Chooses how they are divided.
        memory: What was planned before.

    Raises:
        ConfigurationError: Engines differ, or cannot take the weights.
        WeightMismatchError: Shapes, or values, are wrong.
    """
    wishes = Wishes(options.dtype, options.trim_vocabulary, options.check_finite)
    intake, stream = common(intakes, wishes), payload.stream
    # A batch of a stream is some of it: only engines that wait for whole layers see all of it.
    whole = payload.whole if stream is None else intake.whole_layers

    def fitted(weights: Sequence[Weight]) -> tuple[Weight, ...]:
        return fit(weights, intake, wishes, whole=whole, known_names=known_names or None)

    if stream is None:
        given, known = payload.weights, frozenset() if whole else frozenset(known_names)
        memory.attend(isinstance(given, Lasting) and not options.check_finite)
        fits = memory.once("fitted", (given, intake, wishes, whole, known), lambda: fitted(given))
        chosen = format_of(fits)
        return memory.once("plan", (fits, chosen), lambda: _planned(fits, options, chosen))
    chosen = format_of(None)

    def buckets() -> Iterator[Bucket]:
        names: list[str] = []
        for batch in stream.batches(chosen.bucket_bytes, name_map=options.name_map):
            names += [weight.spec.name for weight in batch]
            yield from _planned(fitted(batch), options, chosen).buckets
        if intake.whole_layers and not payload.whole:
            refuse_torn(names, intake, known_names or None)

    return GrowingPlan(buckets())
