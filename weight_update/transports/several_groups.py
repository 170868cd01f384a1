"""Several groups that carry the same bytes: one for each kind of engine, which joins no other.

What is sent leaves for all of them at once. Each has its own rendezvous and its own communicator,
so an engine that dies breaks the broadcast of its own kind and no other.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import Future, as_completed
from dataclasses import dataclass

import torch

from weight_update.transports.process_group import UpdateGroup
from weight_update.waiting import spawn


@dataclass(frozen=True)
class Seat:
    """Where a rank of the whole sits.

    Attributes:
        group: Its group.
        rank: Its rank there.
    """

    group: UpdateGroup
    rank: int


class SeveralGroups:
    """Rank 0 of several groups, as if they were one.

    Args:
        groups: Groups of one name, so that an engine knows its own by it.
        seats: By rank of the whole, where it sits.

    Attributes:
        name: The name of all of them.
        address: Where the first of them listens.
        port: Likewise.
        device: Device of the tensors that are broadcast.
    """

    def __init__(self, groups: Sequence[UpdateGroup], seats: Mapping[int, Seat]) -> None:
        first = groups[0]
        self.name, self.device = first.name, first.device
        self.address, self.port = first.address, first.port
        self._groups, self._seats = tuple(groups), dict(seats)
        self._joining: dict[UpdateGroup, Future[None]] = {}

    def seat(self, rank: int) -> Seat:
        """Where a rank of the whole sits."""
        return self._seats[rank]

    @property
    def backend(self) -> str:
        """The torch backend, by device."""
        return self._groups[0].backend

    @property
    def given_up(self) -> bool:
        """Whether nothing can be sent to all of them any more."""
        return any(group.given_up for group in self._groups)

    def join(self) -> None:
        """Joins all as rank 0, side by side; the first that fails ends the wait."""
        for group in self._groups:
            self._joining[group] = spawn(group.join)
        for joining in as_completed(self._joining.values()):
            joining.result()

    def arrived(self, rank: int) -> bool:
        """Whether a rank is seen waiting in its rendezvous; nobody waits where there is none.

        Once all ranks of a group have come, they connect to each other, and one whose peer is gone
        by then waits for ever: such a group is there when it is joined.
        """
        seat = self._seats.get(rank)
        if seat is None:
            return True
        return seat.group.arrived(seat.rank) and not self._is_connecting(seat.group)

    def _is_connecting(self, group: UpdateGroup) -> bool:
        joining = self._joining.get(group)
        if joining is None or joining.done():
            return False
        return all(map(group.arrived, range(1, group.world_size)))

    def missing_rank(self) -> int | None:
        """A rank that :meth:`join` is waiting for right now, when that is known."""
        missing = {group: group.missing_rank() for group in self._groups}
        late = (r for r, seat in self._seats.items() if missing[seat.group] == seat.rank)
        return next(late, None)

    def decoy(self) -> SeveralGroups | None:
        """Rendezvous of the same name and places, for engines that come when it is over."""
        found = {group: group.decoy() for group in self._groups}
        decoys = {group: decoy for group, decoy in found.items() if decoy is not None}
        if not decoys:
            return None
        seats = {
            rank: Seat(decoys[seat.group], seat.rank)
            for rank, seat in self._seats.items()
            if seat.group in decoys
        }
        return SeveralGroups(list(decoys.values()), seats)

    def broadcast(self, tensors: list[torch.Tensor]) -> None:
        """Starts broadcasting the tensors to all engines of all groups; none waits for another."""
        for group in self._groups:
            group.broadcast(tensors)

    def moving(self) -> bool:
        """Whether bytes are still under way in any of them.

        Raises:
            EngineUnreachable: A peer is gone.
            WeightUpdateError: A group was given up.
        """
        return any([group.moving() for group in self._groups])

    def give_up(self) -> None:
        """Frees both ends of all of them without waiting for anyone."""
        for group in self._groups:
            group.give_up()
