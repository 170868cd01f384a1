"""Other ranks of the trainer that pack what the leader packs, as the leader sees them.

An engine on several GPUs opens memory on each of them, and a rank of the trainer runs on each:
so the engine's ranks open what the trainer's rank on their own GPU has packed. All of them have
gathered the same values; only where the bytes lie goes to the leader.

1. Before the first bucket, they are told how the leader has planned, and plan alike.
2. The leader says which bucket it packs next. They pack it too, and gather what it gathers.
3. The leader tells the engines once all have said where it lies.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Protocol

import torch

from weight_update.errors import UpdateTimeout, WeightUpdateError
from weight_update.options import UpdateOptions
from weight_update.update.crew.messages import Neighbour, has_ended, pauses
from weight_update.update.crew.recipes import digest_of, heard, recipe_of
from weight_update.update.protocols import Packer
from weight_update.update.ways import Ends
from weight_update.waiting import Deadline
from weight_update.weights.buckets import Bucket, Plan
from weight_update.weights.cargo import Cargo, Format, SharedTensor, Terms
from weight_update.weights.growing_plan import GrowingPlan
from weight_update.weights.specs import TensorSpec

_POLL_SECONDS = 0.002

Elsewhere = dict[int, tuple[SharedTensor, ...]]


class Line(Protocol):
    """How the leader reaches the other ranks while an update runs."""

    @property
    def deadline(self) -> Deadline:
        """By when the update ends."""

    def neighbour(self, place: Mapping[str, Any]) -> Neighbour | None:
        """The process at another rank's place; None if it is on another host."""

    def say(self, message: Mapping[str, Any]) -> None:
        """Tells all of them."""

    def shared_by(self, rank: int, number: int) -> dict[str, Any] | None:
        """Where a rank says that it packed something; None if it has not yet."""

    def raise_fault(self) -> None:
        """Raises the error that another rank told of."""


class Sharers:
    """Ranks of the leader's host that pack for engines on their own GPUs.

    1. :meth:`enter` says who is there, at the beginning of an update.
    2. :meth:`ends` makes packers that have them pack too.
    3. :meth:`leave` ends the update.

    Args:
        wanted: Tells which ranks of the trainer share a GPU with an engine.

    Attributes:
        packing: A bucket is being packed by all: what is read for it needs no word of its own.
    """

    ranks: tuple[int, ...] = ()  # of a group; none of them joins one

    def __init__(self, wanted: Callable[[], Collection[int]]) -> None:
        self.packing = False
        self._wanted = wanted
        self._line: Line | None = None
        self._neighbours: dict[int, Neighbour] = {}
        self._packers: tuple[int, ...] = ()
        self._number = 0

    @property
    def sharing(self) -> tuple[int, ...]:
        """The trainer's ranks that pack too, in order; none outside of an update."""
        present = () if self._line is None else self._neighbours
        return tuple(rank for rank in sorted(present) if rank in self._wanted())

    @property
    def reasons(self) -> tuple[str, ...]:
        """What the report says of them."""
        ranks = ", ".join(map(str, self.sharing))
        return (f"rank(s) {ranks} of the trainer share memory with engines too",) if ranks else ()

    def enter(self, line: Line, cards: Mapping[int, Mapping[str, Any] | None]) -> None:
        """Takes note of who is there, and where.

        Args:
            line: How they are reached.
            cards: What each of the other ranks says of itself.
        """
        self.leave()
        self._line, self._neighbours = line, {}
        for rank, card in cards.items():
            neighbour = None if card is None else line.neighbour(card["place"])
            if neighbour is not None:
                self._neighbours[rank] = neighbour

    def leave(self) -> None:
        """The update is over; nobody listens any more."""
        self._line, self._packers, self.packing = None, (), False

    def ends(self, ends: Ends, options: UpdateOptions) -> Ends:
        """A way whose buckets they pack too.

        Args:
            ends: The way without them.
            options: Everything that shapes an update.
        """

        def open_packer(device: torch.device) -> Packer:
            return SharedPacker(ends.open_packer(device), device, self, options)

        return replace(ends, open_packer=open_packer, others=self)

    def check(self) -> None:
        """Raises if one of them has ended, or told of a failure."""
        for rank in self._packers:
            if self._neighbours[rank].ended():
                raise has_ended(rank)
        if self._line is not None and self._packers:
            self._line.raise_fault()

    # -- of the packer --------------------------------------------------------------------

    def begin(self, recipe: Mapping[str, Any], device: torch.device) -> tuple[int, ...]:
        """Tells them how to plan; returns who they are."""
        self._packers = self.sharing
        if self._packers:
            self._say({"share": recipe, "on": device.type, "ranks": self._packers})
        return self._packers

    @contextmanager
    def packed_too(self, bucket: Bucket, index: int, ranks: Sequence[int]) -> Iterator[int]:
        """Has them pack a bucket while the leader does; gives the number to ask for it by."""
        reads = [weight.turn.index for weight in bucket.weights if weight.turn is not None]
        self._number += 1
        message = {"pack": index, "number": self._number, "digest": digest_of(bucket)}
        self._say({**message, "reads": reads, "ranks": ranks})
        self.packing = True
        try:
            yield self._number
        finally:
            self.packing = False

    def collect(self, number: int, ranks: Sequence[int]) -> Elsewhere:
        """Where each of them has packed it.

        Raises:
            UpdateTimeout: One has not, by the end of the update.
        """
        found: Elsewhere = {}
        for pause in pauses(_POLL_SECONDS):
            line = self._line
            if line is None:
                break
            for rank in (rank for rank in ranks if rank not in found):
                message = line.shared_by(rank, number)
                if message is not None:
                    found[rank] = heard(message)
            if len(found) == len(ranks):
                return found
            if line.deadline.expired():
                break
            line.deadline.sleep(pause)
        missing = [rank for rank in ranks if rank not in found]
        text = f"rank {missing[0]} of the trainer has not packed its bucket in time"
        raise UpdateTimeout(text, phase="transfer", remedy="look at that rank")

    def _say(self, message: Mapping[str, Any]) -> None:
        if self._line is None:
            raise WeightUpdateError("the update that this bucket belongs to is over")
        self._line.say(message)


class SharedPacker:
    """A packer that has other ranks of the trainer pack the same.

    What they could not plan, as a stream, is packed by the leader alone: all engines' ranks open
    its memory then.

    Args:
        inner: The packer.
        device: Of the packer.
        sharers: The others.
        options: Everything that shapes an update.
    """

    def __init__(
        self, inner: Packer, device: torch.device, sharers: Sharers, options: UpdateOptions
    ) -> None:
        self._inner, self._device = inner, device
        self._sharers, self._options = sharers, options
        self._chosen: tuple[Format, Terms] | None = None
        self._plan: Plan | GrowingPlan = Plan(())
        self._ranks: tuple[int, ...] = ()

    def format(self, specs: Sequence[TensorSpec] | None, terms: Terms) -> Format:
        """As of the packer."""
        chosen = self._inner.format(specs, terms)
        self._chosen = chosen, terms
        return chosen

    def reserve(self, plan: Plan | GrowingPlan) -> None:
        """Learns what will be packed, and tells the others."""
        recipe = self._recipe(plan)
        self._plan, self._chosen = plan, None
        self._ranks = () if recipe is None else self._sharers.begin(recipe, self._device)
        self._inner.reserve(plan)

    def objections(self, plan: Plan | GrowingPlan) -> list[str]:
        """As of the packer."""
        return self._inner.objections(plan)

    def pack(self, bucket: Bucket) -> Cargo:
        """The shared tensors of a bucket, those of the others too."""
        if not self._ranks:
            return self._inner.pack(bucket)
        ranks, index = self._ranks, next(i for i, b in enumerate(self._plan.buckets) if b is bucket)
        with self._sharers.packed_too(bucket, index, ranks) as number:
            cargo = self._inner.pack(bucket)
        return replace(cargo, elsewhere=self._sharers.collect(number, ranks))

    def abandon(self) -> None:
        """As of the packer."""
        self._inner.abandon()

    def _recipe(self, plan: Plan | GrowingPlan) -> dict[str, Any] | None:
        """How the others plan the same; None where they cannot."""
        if plan.buckets and not any(bucket.weights for bucket in plan.buckets):
            return {"empty": len(plan.buckets)}
        if self._chosen is None or not plan.buckets or not self._sharers.sharing:
            return None
        return recipe_of(*self._chosen, self._options)
