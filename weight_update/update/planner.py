"""The planner: which weights travel together over the wire in use, and who reads them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, wait
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial

import torch

from weight_update.errors import ConfigurationError
from weight_update.options import UpdateOptions
from weight_update.update.fleet import Fleet, Member
from weight_update.update.planning import Payload, PlanMemory, fitted_plan, planned
from weight_update.update.reader import Reader, callers_stream
from weight_update.update.wire import Wire
from weight_update.waiting import Deadline, hand_over
from weight_update.weights.buckets import Plan
from weight_update.weights.cargo import Format, Formats, Terms
from weight_update.weights.fitting import with_dtype
from weight_update.weights.growing_plan import GrowingPlan
from weight_update.weights.specs import Lasting, Weight

_UNREAD = (
    "the folder of its model cannot be read here, so it is not known whether its checkpoint is "
    "quantised (fp8 blocks would take these weights without an error, and compute garbage)"
)


@dataclass(frozen=True)
class Planned:
    """What is sent, and how.

    Attributes:
        plan: Which weights travel together.
        format: How they were divided.
        reader: Who reads them.
    """

    plan: Plan | GrowingPlan
    format: Format
    reader: Reader

    @classmethod
    def let_go(cls, ahead: list[Future[Planned]], deadline: Deadline) -> None:
        """Ends what was planned for engines that are not there any more."""
        wait(ahead, timeout=deadline.remaining())
        for planning in ahead:
            if planning.done() and planning.exception() is None:
                planning.result().reader.let_go()
        ahead.clear()


class Planner:
    """Plans updates, and remembers what the last plan was made of.

    Args:
        wire: What is sent over.
        options: What the user asked for.
    """

    def __init__(self, wire: Wire, options: UpdateOptions) -> None:
        self._wire = wire
        self._options = options
        self._memory = PlanMemory()

    def forget(self) -> None:
        """Keeps nothing: a format knows the packer, and that has the buffers."""
        self._memory.attend(False)

    def refuse_meta(self, weights: Sequence[Weight]) -> None:
        """Raises ConfigurationError if some weights have no values."""
        check = partial(_refuse_meta, weights)
        if isinstance(weights, Lasting):  # of others the memory would hold tensors
            self._memory.once("values", weights, check)
        else:
            check()

    def plan(self, weights: Sequence[Weight], members: Sequence[Member]) -> Plan:
        """What an update of ``weights`` would send, in which requests; asks no engine."""
        device, dtype = self._wire.device_for(weights[0].device), self._options.dtype
        sent = [weight if dtype == "engine" else with_dtype(weight, dtype) for weight in weights]
        terms = self._terms(members, self._options.bucket_bytes, None)
        return planned(sent, self._options, self._formats(device, terms, PlanMemory()))

    def start(
        self,
        fleet: Fleet,
        payload: Payload,
        check_readers: Callable[[], None],
        *,
        bucket_bytes: int | None = None,
        bucket_limit: int | None = None,
        packs: bool = False,
    ) -> Future[Planned]:
        """Begins to plan what a fleet gets.

        Args:
            fleet: As its engines take weights, they are planned.
            payload: The weights.
            check_readers: Raises when somebody else who takes part in the reading failed.
            bucket_bytes: The size of a bucket; None leaves it to the options.
            bucket_limit: What no bucket of several tensors is larger than.
            packs: Whether the first bucket is packed at once.
        """
        intakes = {member.url: member.engine.intake for member in fleet.members}
        known = {name for member in fleet.members for name in _known_names(member)}
        group, packer = self._wire.ends()
        terms = self._terms(fleet.members, bucket_bytes or self._options.bucket_bytes, bucket_limit)
        formats = self._formats(group.device, terms, self._memory)

        def plan(stream: AbstractContextManager[object]) -> Planned:
            chosen: list[Format] = []

            def choose(weights: Sequence[Weight] | None) -> Format:
                chosen.append(formats(weights))
                return chosen[-1]

            with stream:
                made = fitted_plan(payload, intakes, known, self._options, choose, self._memory)
                reader = Reader(packer, made, check_readers)
                if packs:
                    reader.begin()
                return Planned(made, chosen[-1], reader)

        return hand_over(plan, callers_stream())  # to check the values reads them all

    def _terms(
        self, members: Sequence[Member], bucket_bytes: int | None, bucket_limit: int | None
    ) -> Terms:
        free = [member.engine.intake.free_bytes for member in members]
        known = [size for size in free if size is not None]
        return Terms(
            bucket_bytes,
            min(known) if known and len(known) == len(free) else None,
            self._wire.request_seconds,
            ranks=max((member.ranks for member in members), default=1),
            intakes={member.url: member.engine.intake for member in members},
            bucket_limit=bucket_limit,
        )

    def _formats(self, device: torch.device, terms: Terms, memory: PlanMemory) -> Formats:
        """Chooses how weights are divided."""

        def choose(weights: Sequence[Weight] | None) -> Format:
            given, specs = weights or (), None
            if weights is not None:
                specs = memory.once("specs", weights, lambda: [w.spec for w in weights])
            at_hand = partial(_all_at_hand, given, device)
            in_place = device.type == "cuda" and memory.once("in place", (weights, device), at_hand)
            asked = replace(terms, in_place=in_place)
            return asked.limited(self._wire.packer_for(device).format(specs, asked))

        return choose


def warnings_of(members: Iterable[Member]) -> list[str]:
    """What is not known of how engines take weights."""
    return [f"{m.url}: {_UNREAD}" for m in members if m.engine.intake.unread]


def _refuse_meta(weights: Sequence[Weight]) -> None:
    meta = [weight.spec.name for weight in weights if weight.device.type == "meta"]
    if meta:
        raise ConfigurationError(
            f"{len(meta)} weight(s) are on the meta device and have no values: {meta[0]!r}, ...",
            phase="plan",
            remedy="register the model that holds the trained values",
        )


def _known_names(member: Member) -> Iterable[str]:
    """Names of the whole model: those that an engine took, or else those in its model's folder."""
    intake = member.engine.intake
    return member.shapes or (intake.shapes if intake.whole_layers else ())


def _all_at_hand(weights: Sequence[Weight], device: torch.device) -> bool:
    return all(weight.device == device and weight.at_hand for weight in weights)
