"""What the leader tells the ranks in its group, and what they do with it; in one process."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from weight_update.errors import EngineUnreachable, UpdateTimeout, WeightUpdateError
from weight_update.update.crew.relay import Relay, Scratch
from weight_update.update.crew.relays import RelayedGroup, RelayedPacker, Relays
from weight_update.waiting import Deadline, spawn
from weight_update.weights.buckets import Plan
from weight_update.weights.cargo import Cargo

CPU = torch.device("cpu")
PATIENCE = 30.0


def wait_until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.005)


@dataclass
class Process:
    gone: bool = False

    def ended(self) -> bool:
        return self.gone


@dataclass
class FakeLine:
    """Notes what the leader says; ranks are on this host unless they say another."""

    deadline: Deadline = field(default_factory=lambda: Deadline(PATIENCE))
    said: list[dict[str, Any]] = field(default_factory=list)
    fares: dict[int, dict[str, Any]] = field(default_factory=dict)
    processes: dict[int, Process] = field(default_factory=dict)

    def neighbour(self, place: Mapping[str, Any]) -> Process | None:
        if place["host"] != "here":
            return None
        return self.processes.setdefault(place["process"], Process())

    def say(self, message: Mapping[str, Any]) -> None:
        self.said.append(dict(message))

    def relay_says(self, rank: int) -> dict[str, Any] | None:
        return self.fares.get(rank)

    def taken(self) -> list[Any]:
        return [message["take"] for message in self.said if "take" in message]


@dataclass
class FakeGroup:
    """A group that nothing is wrong with."""

    name: str = "one"
    address: str = "127.0.0.1"
    port: int = 1
    backend: str = "gloo"
    device: torch.device = CPU
    given_up: bool = False
    sent: list[int] = field(default_factory=list)
    trouble: Exception | None = None

    def join(self) -> None:
        if self.trouble is not None:
            raise self.trouble

    def arrived(self, rank: int) -> bool:
        return False

    def decoy(self) -> None:
        return None

    def missing_rank(self) -> int | None:
        return None

    def broadcast(self, tensors: list[torch.Tensor]) -> None:
        if self.given_up:
            raise WeightUpdateError("the group was given up", phase="transfer")
        self.sent += [tensor.numel() for tensor in tensors]

    def moving(self) -> bool:
        return False

    def give_up(self) -> None:
        self.given_up = True


class FakePacker:
    """Packs buckets of bytes, as many as it is told."""

    def __init__(self) -> None:
        self.sizes: list[Sequence[torch.Tensor]] = []

    def reserve(self, plan: Plan) -> None:
        pass

    def pack(self, bucket: Any) -> Cargo:
        return Cargo([torch.empty(bucket, dtype=torch.uint8)])


def card(process: int, host: str = "here", group: str = "") -> dict[str, Any]:
    return {"place": {"host": host, "process": process}, "group": group}


def together(line: FakeLine, *ranks: int, name: str = "one") -> tuple[Relays, RelayedGroup]:
    """Relays of some ranks, in a group that all have joined."""
    relays = Relays()
    relays.enter(line, {rank: card(rank) for rank in ranks})
    line.fares |= {rank: {"group": name, "error": None} for rank in ranks}
    group = RelayedGroup(FakeGroup(name), 1 + len(ranks) + 1, relays)  # type: ignore[arg-type]
    group.join()
    return relays, group


def packed_by(packer: RelayedPacker, size: int) -> list[torch.Tensor]:
    bucket: Any = size
    return packer.pack(bucket).tensors


def test_ranks_of_the_leaders_host_take_part_in_order() -> None:
    relays = Relays()
    cards = {5: card(5), 3: card(3), 4: card(4, "elsewhere"), 2: None}
    relays.enter(FakeLine(), cards)
    assert relays.ranks == (3, 5)


def test_all_are_told_where_to_join_and_as_what() -> None:
    line = FakeLine()
    _, group = together(line, 3, 5)
    (told,) = line.said
    assert told["join"] == {
        **{"name": "one", "address": "127.0.0.1", "port": 1, "backend": "gloo"},
        **{"world_size": 4, "ranks": (3, 5)},
    }
    assert not group.given_up


def test_the_first_bucket_is_announced_when_it_leaves_and_later_ones_once_they_are_packed() -> None:
    line = FakeLine()
    relays, group = together(line, 1)
    packer = RelayedPacker(FakePacker(), relays)  # type: ignore[arg-type]
    packer.reserve(Plan(()))
    first = packed_by(packer, 8)
    assert line.taken() == []
    group.broadcast(first)
    assert line.taken() == [[("uint8", [8])]]
    second = packed_by(packer, 4)
    assert line.taken() == [[("uint8", [8])], [("uint8", [4])]]
    group.broadcast(second)
    assert len(line.taken()) == 2


def test_an_update_that_fails_before_its_first_bucket_leaves_announces_nothing() -> None:
    line = FakeLine()
    relays, group = together(line, 1)
    packer = RelayedPacker(FakePacker(), relays)  # type: ignore[arg-type]
    for size in (8, 6):
        packer.reserve(Plan(()))
        last = packed_by(packer, size)
    group.broadcast(last)
    assert line.taken() == [[("uint8", [6])]]


def test_a_pack_of_an_earlier_update_that_comes_late_is_not_announced() -> None:
    line = FakeLine()
    relays, group = together(line, 1)
    inner = FakePacker()
    packer = RelayedPacker(inner, relays)  # type: ignore[arg-type]
    packer.reserve(Plan(()))

    def slow(bucket: Any) -> Cargo:
        packer.reserve(Plan(()))  # the next update begins meanwhile
        return Cargo([torch.empty(bucket, dtype=torch.uint8)])

    inner.pack = slow  # type: ignore[method-assign]
    packed_by(packer, 8)
    inner.pack = FakePacker().pack  # type: ignore[method-assign]
    group.broadcast(packed_by(packer, 4))
    assert line.taken() == [[("uint8", [4])]]


def test_what_nobody_packed_is_announced_when_it_leaves() -> None:
    line = FakeLine()
    _, group = together(line, 1)
    group.broadcast([torch.empty(1)])
    assert line.taken() == [[("float32", [1])]]


def test_neighbours_of_one_dtype_are_announced_together() -> None:
    line = FakeLine()
    _, group = together(line, 1)
    group.broadcast([torch.empty(2, 3), torch.empty(5), torch.empty(1, dtype=torch.int64)])
    assert line.taken() == [[("float32", [6, 5]), ("int64", [1])]]


def test_a_group_that_a_rank_is_not_in_any_more_is_given_up() -> None:
    line = FakeLine()
    relays, group = together(line, 1, 2)
    relays.leave()
    relays.enter(line, {1: card(1, group="one"), 2: card(2, group="one")})
    assert not group.given_up
    relays.enter(line, {1: card(1, group="one"), 2: card(2)})
    assert group.given_up


@pytest.mark.parametrize("ranks", [(1,), (1, 2, 3), ()])
def test_a_group_of_other_ranks_is_given_up(ranks: tuple[int, ...]) -> None:
    line = FakeLine()
    relays, group = together(line, 1, 2)
    relays.enter(line, {rank: card(rank, group="one") for rank in ranks})
    assert group.given_up


def test_giving_up_tells_all_and_the_group_is_not_used_again() -> None:
    line = FakeLine()
    relays, group = together(line, 1)
    assert relays.group == "one"
    group.give_up()
    wait_until(lambda: {"drop": "one"} in line.said)
    assert relays.group == ""


def test_a_rank_that_does_not_join_is_named() -> None:
    relays, line = Relays(), FakeLine(Deadline(0.2))
    relays.enter(line, {3: card(3), 7: card(7)})
    line.fares[3] = {"group": "one", "error": None}
    group = RelayedGroup(FakeGroup(), 4, relays)  # type: ignore[arg-type]
    with pytest.raises(UpdateTimeout, match="rank 7 of the trainer did not join"):
        spawn(group.join).result(PATIENCE)


def test_a_rank_that_fails_to_join_says_why() -> None:
    relays, line = Relays(), FakeLine()
    relays.enter(line, {3: card(3)})
    error = WeightUpdateError("no GPU here").to_dict()
    line.fares[3] = {"group": "one", "error": error}
    group = RelayedGroup(FakeGroup(), 3, relays)  # type: ignore[arg-type]
    with pytest.raises(WeightUpdateError, match="rank 3: no GPU here"):
        spawn(group.join).result(PATIENCE)


def test_a_join_ends_when_the_group_is_given_up() -> None:
    relays, line = Relays(), FakeLine()
    relays.enter(line, {3: card(3)})
    group = RelayedGroup(FakeGroup(), 3, relays)  # type: ignore[arg-type]
    joining = spawn(group.join)
    group.give_up()
    with pytest.raises(WeightUpdateError, match="given up"):
        joining.result(PATIENCE)


def test_a_process_that_ended_is_named_at_once() -> None:
    line = FakeLine()
    relays, _ = together(line, 1, 2)
    relays.check()
    line.processes[2].gone = True
    with pytest.raises(WeightUpdateError, match="rank 2 of the trainer has ended"):
        relays.check()


def test_a_rank_whose_link_broke_waits_for_others_to_say_that_they_began_it() -> None:
    line = FakeLine()
    relays, _ = together(line, 1)
    error = EngineUnreachable("the broadcast failed: reset", phase="transfer").to_dict()
    line.fares[1] = {"group": "one", "error": error}
    relays.check()

    def raises() -> bool:
        try:
            relays.check()
        except WeightUpdateError as raised:
            return "rank 1: the broadcast failed" in str(raised)
        return False

    wait_until(raises)


def test_what_a_rank_said_of_an_earlier_group_is_past() -> None:
    line = FakeLine()
    relays, _ = together(line, 1)
    line.fares[1] = {"group": "before", "error": WeightUpdateError("boom").to_dict()}
    relays.check()


# -- the others' end -----------------------------------------------------------------------


class Opened:
    """Groups that a relay was told of."""

    def __init__(self) -> None:
        self.groups: list[FakeGroup] = []
        self.asked: list[tuple[int, torch.device]] = []
        self.trouble: Exception | None = None

    def __call__(self, told: Mapping[str, Any], rank: int, device: torch.device) -> Any:
        self.asked.append((rank, device))
        self.groups.append(FakeGroup(told["name"], trouble=self.trouble))
        return self.groups[-1]


def told(name: str) -> dict[str, Any]:
    return {"name": name, "address": "", "port": 1, "backend": "gloo", "world_size": 3}


def joined(opened: Opened, name: str = "one") -> Relay:
    relay = Relay(opened)
    relay.join(told(name), 2, CPU)
    wait_until(lambda: relay.joined)
    return relay


def test_broadcasts_are_taken_one_after_the_other_in_order() -> None:
    opened = Opened()
    relay = joined(opened)
    relay.take([("uint8", [7, 5])], "one")
    relay.take([("float32", [3])], "one")
    relay.settle("one", PATIENCE)
    assert opened.asked == [(2, CPU)]
    assert opened.groups[0].sent == [7, 5, 3]
    assert relay.group == "one"


def test_broadcasts_of_another_group_are_past() -> None:
    opened = Opened()
    relay = joined(opened)
    relay.take([("uint8", [7])], "before")
    relay.settle("one", PATIENCE)
    assert opened.groups[0].sent == []


def test_a_group_that_is_not_used_again_is_left() -> None:
    opened = Opened()
    relay = joined(opened)
    relay.settle("", PATIENCE)
    assert (relay.group, opened.groups[0].given_up) == ("", True)


def test_joining_another_group_leaves_the_one_before() -> None:
    opened = Opened()
    relay = joined(opened)
    relay.join(told("two"), 2, CPU)
    wait_until(lambda: relay.joined)
    assert [group.given_up for group in opened.groups] == [True, False]


def test_a_group_in_which_something_failed_is_left() -> None:
    opened = Opened()
    relay = joined(opened)
    opened.groups[0].given_up = True
    relay.take([("uint8", [7])], "one")
    wait_until(lambda: relay.error() is not None)
    relay.settle("one", PATIENCE)
    assert relay.group == ""


def test_a_relay_that_nobody_holds_any_more_leaves_its_group() -> None:
    opened = Opened()
    relay = joined(opened)
    del relay
    wait_until(lambda: opened.groups[0].given_up)


def test_where_the_group_needs_a_gpu_and_there_is_none_the_join_says_so() -> None:
    relay = Relay(Opened())
    relay.join({**told("one"), "backend": "nccl"}, 1, None)
    wait_until(lambda: relay.error() is not None)
    assert "torch sees no GPU on this rank" in str(relay.error())


def test_all_broadcasts_share_one_buffer_as_large_as_the_largest_which_is_kept() -> None:
    scratch = Scratch()
    places = scratch.places([("float32", [5, 2]), ("bfloat16", [30])], CPU)
    assert [[(p.dtype, p.numel()) for p in batch] for batch in places] == [
        [(torch.float32, 5)],
        [(torch.float32, 2)],
        [(torch.bfloat16, 30)],
    ]
    held = {place.untyped_storage().data_ptr() for batch in places for place in batch}
    assert places[0][0].untyped_storage().nbytes() == 60
    (again,) = scratch.places([("uint8", [60])], CPU)[0]
    assert held == {again.untyped_storage().data_ptr()}


def test_nothing_that_was_under_way_writes_into_what_the_next_group_passes_on() -> None:
    opened = Opened()
    relay = joined(opened)
    before = relay._scratch
    relay.drop()
    assert relay._scratch is not before
