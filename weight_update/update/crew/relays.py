"""Other ranks of the trainer in the leader's group, as the leader sees them.

An engine takes every broadcast from rank 0 of a group. So all other ranks of the leader's host
join as ranks 1, 2, ..., before the engines, take every broadcast too and throw it away: over
NCCL, whose rings go through all GPUs of a group, each network card of the host then carries
bytes.

They are told what comes: of the first bucket when it leaves, since an update that fails before
then keeps its group; of each later one once it is packed, while the one before it travels.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import groupby
from typing import Any, Protocol

import torch

from weight_update.errors import EngineUnreachable, UpdateTimeout, WeightUpdateError
from weight_update.options import UpdateOptions
from weight_update.update.crew.messages import Neighbour, error_of_rank, has_ended, pauses
from weight_update.update.protocols import Group, Packer
from weight_update.update.ways import Ends
from weight_update.waiting import Deadline, spawn
from weight_update.weights.buckets import Bucket, Plan
from weight_update.weights.cargo import Cargo, Format, Terms
from weight_update.weights.growing_plan import GrowingPlan
from weight_update.weights.specs import TensorSpec

# All have just said that they are ready, so they come at once.
_JOIN_SHARE = 0.25
# When an engine dies, others fail to receive, and may be the first to say so.
_CULPRIT_SECONDS = 0.5


class Line(Protocol):
    """How the leader reaches the other ranks while an update runs."""

    @property
    def deadline(self) -> Deadline:
        """By when the update ends."""

    def neighbour(self, place: Mapping[str, Any]) -> Neighbour | None:
        """The process at another rank's place; None if it is on another host."""

    def say(self, message: Mapping[str, Any]) -> None:
        """Tells all of them."""

    def relay_says(self, rank: int) -> dict[str, Any] | None:
        """How a rank says that it fares in the group."""


class Relays:
    """Ranks of the leader's host that take part in its group; kept between updates.

    1. :meth:`enter` says who is there, at the beginning of an update.
    2. :meth:`ends` makes groups that they join, and packers that tell them what comes.
    3. :meth:`leave` ends the update.

    Attributes:
        group: The group that may be used again; empty when there is none.
    """

    def __init__(self) -> None:
        self.group = ""
        self._line: Line | None = None
        self._neighbours: dict[int, Neighbour] = {}
        self._holding: dict[int, str] = {}
        self._joining = ""
        self._troubles: dict[int, Deadline] = {}
        self._packs: object = None
        self._held: list[dict[str, Any]] | None = None
        self._ahead = 0

    @property
    def ranks(self) -> tuple[int, ...]:
        """The trainer's ranks that are ranks 1, 2, ... of the group, in order."""
        return tuple(self._neighbours)

    @property
    def reasons(self) -> tuple[str, ...]:
        """What the report says of them."""
        ranks = ", ".join(map(str, self.ranks))
        return (f"rank(s) {ranks} of the trainer are in the group too",) if ranks else ()

    def enter(self, line: Line, cards: Mapping[int, Mapping[str, Any] | None]) -> None:
        """Takes note of who is there, where, and in which group.

        Args:
            line: How they are reached.
            cards: What each of the other ranks says of itself.
        """
        self.clear()
        for rank, card in sorted(cards.items()):
            neighbour = None if card is None else line.neighbour(card["place"])
            if card is not None and neighbour is not None:
                self._neighbours[rank], self._holding[rank] = neighbour, card["group"]
        self._line = line

    def leave(self) -> None:
        """The update is over; nobody listens any more."""
        self._line = None
        self._troubles.clear()

    def clear(self) -> None:
        """An update without them begins."""
        self.leave()
        self._neighbours, self._holding = {}, {}

    def hold(self, name: str, ranks: Sequence[int]) -> bool:
        """Whether exactly these ranks are in a group, as far as they said."""
        return self._holding == dict.fromkeys(ranks, name)

    def ends(self, ends: Ends) -> Ends:
        """A way whose groups they join.

        Args:
            ends: The way without them.
        """

        def open_group(
            urls: Sequence[str], options: UpdateOptions, world_size: int, device: torch.device
        ) -> Group:
            group = ends.open_group(urls, options, world_size, device)
            return RelayedGroup(group, world_size, self)

        def open_packer(device: torch.device) -> Packer:
            return RelayedPacker(ends.open_packer(device), self)

        return replace(ends, open_group=open_group, open_packer=open_packer, others=self)

    def check(self) -> None:
        """Raises if one of them has ended, or failed and not only since the group broke."""
        for rank, neighbour in self._neighbours.items() if self._line is not None else ():
            if neighbour.ended():
                raise has_ended(rank)
            error = self._fares(rank).get("error")
            if error is not None and self._is_own(rank, error):
                raise error_of_rank(rank, error)

    def _is_own(self, rank: int, error: Mapping[str, Any]) -> bool:
        """Whether a rank failed by itself, or nobody else has said meanwhile that it began it."""
        began = self._troubles.setdefault(rank, Deadline(_CULPRIT_SECONDS))
        return error["kind"] != EngineUnreachable.__name__ or began.expired()

    # -- of the group ---------------------------------------------------------------------

    def invite(self, group: Group, world_size: int) -> Deadline:
        """Tells all of them to join; returns by when they should have come."""
        self._joining = group.name
        self._troubles.clear()
        self._held, self._ahead = None, 0
        place = {"name": group.name, "address": group.address, "port": group.port}
        place |= {"backend": group.backend, "world_size": world_size, "ranks": self.ranks}
        self._say({"join": place})
        return Deadline(0.0) if self._line is None else self._line.deadline.share(_JOIN_SHARE)

    def missing(self) -> list[int]:
        """Who has not joined yet."""
        return [rank for rank in self.ranks if self._fares(rank).get("error", "") is not None]

    def joined(self, name: str) -> None:
        """All have."""
        self.group, self._holding = name, dict.fromkeys(self.ranks, name)

    def drop(self, name: str) -> None:
        """The group is over."""
        if self.group == name:
            self.group = ""
        if self._line is not None and self.ranks:
            spawn(self._say, {"drop": name})  # whoever gives up waits for nothing

    def leaves(self, tensors: Sequence[torch.Tensor]) -> None:
        """A bucket is broadcast: they are told of the first now, and were told of the others."""
        held, self._held = self._held or [], None
        for message in held:
            self._say(message)
        self._ahead += len(held)
        if self._ahead == 0:
            self._say(self._sizes(tensors))
        else:
            self._ahead -= 1

    # -- of the packer --------------------------------------------------------------------

    def begin(self) -> object:
        """The buckets of another plan come; returns what tells them from earlier ones."""
        self._packs, self._held, self._ahead = object(), [], 0
        return self._packs

    def packed(self, packs: object, tensors: Sequence[torch.Tensor]) -> None:
        """A bucket comes next, unless it is one of an earlier plan, which came late."""
        if packs is not self._packs:
            return
        if self._held is not None:
            self._held.append(self._sizes(tensors))
            return
        self._ahead += 1
        self._say(self._sizes(tensors))

    def _sizes(self, tensors: Sequence[torch.Tensor]) -> dict[str, Any]:
        """Dtypes and sizes, those of neighbours of one dtype together."""
        by_dtype = groupby(tensors, lambda tensor: tensor.dtype)
        sizes = [(str(dtype)[6:], [each.numel() for each in run]) for dtype, run in by_dtype]
        return {"take": sizes, "group": self._joining}

    def _say(self, message: Mapping[str, Any]) -> None:
        line = self._line
        if line is not None and self.ranks:
            line.say(message)

    def _fares(self, rank: int) -> dict[str, Any]:
        said = None if self._line is None else self._line.relay_says(rank)
        return said if said is not None and said["group"] == self._joining else {}


class RelayedGroup:
    """A group that other ranks of the trainer join too.

    Args:
        inner: The group, as rank 0 of it.
        world_size: Its ranks.
        relays: The others.
    """

    def __init__(self, inner: Group, world_size: int, relays: Relays) -> None:
        self.name, self.address, self.port = inner.name, inner.address, inner.port
        self.device = inner.device
        self._inner = inner
        self._world_size = world_size
        self._relays = relays
        self._ranks = relays.ranks
        self._joined = False

    @property
    def backend(self) -> str:
        """As of the group."""
        return self._inner.backend

    @property
    def given_up(self) -> bool:
        """Also of a group that another rank is not in any more, or not yet."""
        stale = self._joined and not self._relays.hold(self.name, self._ranks)
        return self._inner.given_up or stale

    def join(self) -> None:
        """Joins as rank 0, and has the others join.

        Raises:
            UpdateTimeout: One did not come.
            WeightUpdateError: One failed to.
        """
        end = self._relays.invite(self._inner, self._world_size)
        joining = spawn(self._inner.join)
        for pause in pauses():
            missing = self._relays.missing()
            if joining.done():
                joining.result()
            if joining.done() and not missing:
                break
            self._check(missing, end)
            end.sleep(pause)
        self._relays.joined(self.name)
        self._joined = True

    def _check(self, missing: Sequence[int], end: Deadline) -> None:
        if self._inner.given_up:
            raise WeightUpdateError("the group was given up", phase="connect")
        self._relays.check()
        late = [rank for rank in missing if not self._inner.arrived(1 + self._ranks.index(rank))]
        if late and end.expired():
            raise UpdateTimeout(
                f"rank {late[0]} of the trainer did not join the group {self.name} at "
                f"{self.address}:{self.port} in {end.seconds:.1f} s",
                phase="connect",
                remedy="look at that rank; trainer_ranks='one' does without it",
            )

    def arrived(self, rank: int) -> bool:
        """As of the group."""
        return self._inner.arrived(rank)

    def decoy(self) -> Group | None:
        """As of the group; no other rank of the trainer comes late."""
        return self._inner.decoy()

    def missing_rank(self) -> int | None:
        """As of the group."""
        return self._inner.missing_rank()

    def broadcast(self, tensors: list[torch.Tensor]) -> None:
        """Starts sending to all engines, through the others."""
        self._relays.leaves(tensors)
        self._inner.broadcast(tensors)

    def moving(self) -> bool:
        """As of the group."""
        return self._inner.moving()

    def give_up(self) -> None:
        """Frees this end, and tells the others to free theirs."""
        repeated = self._inner.given_up
        self._inner.give_up()
        if not repeated:
            self._relays.drop(self.name)


class RelayedPacker:
    """A packer that tells other ranks of the trainer what comes next.

    Args:
        inner: The packer.
        relays: The others.
    """

    def __init__(self, inner: Packer, relays: Relays) -> None:
        self._inner = inner
        self._relays = relays
        self._packs: object = None

    def format(self, specs: Sequence[TensorSpec] | None, terms: Terms) -> Format:
        """As of the packer."""
        return self._inner.format(specs, terms)

    def reserve(self, plan: Plan | GrowingPlan) -> None:
        """Learns what will be packed."""
        self._packs = self._relays.begin()
        self._inner.reserve(plan)

    def objections(self, plan: Plan | GrowingPlan) -> list[str]:
        """As of the packer."""
        return self._inner.objections(plan)

    def pack(self, bucket: Bucket) -> Cargo:
        """What travels for a bucket."""
        packs = self._packs
        cargo = self._inner.pack(bucket)
        self._relays.packed(packs, cargo.tensors)
        return cargo

    def abandon(self) -> None:
        """As of the packer."""
        self._inner.abandon()
