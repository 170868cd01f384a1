"""Several groups as one: where each rank sits, and when one of them is there."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from weight_update.errors import WeightUpdateError
from weight_update.transports.several_groups import Seat, SeveralGroups
from weight_update.waiting import spawn

SECONDS = 30.0


class FakeGroup:
    """A group whose ranks arrive when they are told to, and that joins when it is let."""

    name, address, backend, device = "g", "127.0.0.1", "gloo", torch.device("cpu")

    def __init__(self, port: int, world_size: int = 2, *, decoys: bool = True) -> None:
        self.port, self.world_size, self._decoys = port, world_size, decoys
        self.here: set[int] = set()
        self.may_join, self.joins = threading.Event(), threading.Event()
        self.sent: list[Any] = []
        self.given_up, self.moves, self.missing = False, False, None
        self.error: WeightUpdateError | None = None

    def join(self) -> None:
        self.joins.set()
        assert self.may_join.wait(SECONDS)
        if self.error is not None:
            raise self.error

    def arrived(self, rank: int) -> bool:
        return rank in self.here

    def missing_rank(self) -> int | None:
        return self.missing

    def decoy(self) -> FakeGroup | None:
        return FakeGroup(self.port) if self._decoys else None

    def broadcast(self, tensors: Sequence[torch.Tensor]) -> None:
        self.sent += tensors

    def moving(self) -> bool:
        if self.error is not None:
            raise self.error
        return self.moves

    def give_up(self) -> None:
        self.given_up = True


def several(*groups: Any) -> SeveralGroups:
    """Groups whose ranks follow one after the other."""
    places = [(group, rank) for group in groups for rank in range(1, group.world_size)]
    return SeveralGroups(groups, {1 + i: Seat(*place) for i, place in enumerate(places)})


def test_each_rank_of_the_whole_has_a_seat_in_its_own_group() -> None:
    a, b = FakeGroup(1, world_size=3), FakeGroup(2)
    whole = several(a, b)

    seats = [(whole.seat(rank).group, whole.seat(rank).rank) for rank in (1, 2, 3)]
    assert seats == [(a, 1), (a, 2), (b, 1)]


def test_it_is_joined_when_all_are() -> None:
    a, b = FakeGroup(1), FakeGroup(2)
    joining = spawn(several(a, b).join)
    a.may_join.set()
    assert b.joins.wait(SECONDS)
    assert not joining.done()

    b.may_join.set()
    joining.result(SECONDS)


def test_the_first_that_fails_ends_the_wait_for_the_others() -> None:
    a, b = FakeGroup(1), FakeGroup(2)
    b.error = WeightUpdateError("refused")
    b.may_join.set()

    with pytest.raises(WeightUpdateError, match="refused"):
        spawn(several(a, b).join).result(SECONDS)
    a.may_join.set()


def test_a_group_whose_ranks_connect_to_each_other_is_waited_for() -> None:
    """Given up by then, a rank that connects would wait for ever."""
    a, b = FakeGroup(1), FakeGroup(2)
    whole = several(a, b)
    joining = spawn(whole.join)
    assert a.joins.wait(SECONDS)
    assert b.joins.wait(SECONDS)
    a.here = {1}
    assert not whole.arrived(1)

    a.may_join.set()
    whole._joining[a].result(SECONDS)  # type: ignore[index]
    assert whole.arrived(1)
    b.may_join.set()
    joining.result(SECONDS)


def test_a_rank_of_a_group_that_lacks_another_is_there_when_it_waits() -> None:
    a = FakeGroup(1, world_size=3)
    whole = several(a)
    joining = spawn(whole.join)
    assert a.joins.wait(SECONDS)
    a.here = {2}

    assert (whole.arrived(1), whole.arrived(2)) == (False, True)
    a.may_join.set()
    joining.result(SECONDS)


def test_the_missing_rank_is_that_of_the_whole() -> None:
    a, b = FakeGroup(1), FakeGroup(2)
    whole = several(a, b)
    assert whole.missing_rank() is None

    b.missing = 1
    assert whole.missing_rank() == 2


def test_decoys_stand_where_they_can() -> None:
    a, b = FakeGroup(1), FakeGroup(2, decoys=False)
    decoy = several(a, b).decoy()

    assert decoy is not None
    assert (decoy.arrived(1), decoy.arrived(2)) == (False, True)
    assert several(b).decoy() is None


def test_the_same_bytes_leave_for_all_and_move_while_any_do() -> None:
    a, b = FakeGroup(1), FakeGroup(2)
    whole, value = several(a, b), torch.ones(1)
    whole.broadcast([value])
    assert (a.sent, b.sent) == ([value], [value])

    b.moves = True
    assert whole.moving()
    b.moves = False
    assert not whole.moving()


def test_a_peer_that_is_gone_from_any_is_told_of() -> None:
    a, b = FakeGroup(1), FakeGroup(2)
    a.moves, b.error = True, WeightUpdateError("gone")

    with pytest.raises(WeightUpdateError, match="gone"):
        several(a, b).moving()


def test_all_are_given_up_together() -> None:
    a, b = FakeGroup(1), FakeGroup(2)
    whole = several(a, b)
    assert not whole.given_up

    whole.give_up()
    assert (whole.given_up, a.given_up, b.given_up) == (True, True, True)
