"""How far ahead of the engines' answers buckets are packed, and told of."""

from __future__ import annotations

import threading

import pytest
import torch

from tests.update.fakes import FakeEngine, FakeGroup, FakePacker
from weight_update.errors import EngineRejected, UpdateTimeout, WeightUpdateError
from weight_update.options import UpdateOptions
from weight_update.update.planning import Payload
from weight_update.update.push import Push
from weight_update.update.updater import Updater
from weight_update.update.ways import Ends
from weight_update.weights.buckets import Bucket
from weight_update.weights.cargo import Cargo
from weight_update.weights.extract import extract_weights

PATIENCE = 20.0


class NotingPacker(FakePacker):
    """Notes how many buckets the engine had confirmed when each was packed."""

    def __init__(
        self, engine: FakeEngine, *, unordered: bool = False, queued: bool = False
    ) -> None:
        self._engine, self._unordered, self._queued = engine, unordered, queued
        self.confirmed: list[int] = []

    def pack(self, bucket: Bucket) -> Cargo:
        self.confirmed.append(len(self._engine.buckets))
        tensors = super().pack(bucket).tensors
        return Cargo(tensors, unordered=self._unordered, queued=self._queued)


class Pair(FakeEngine):
    """Answers the first request only once it was told of the second one."""

    def __init__(self, *, refuses: str = "") -> None:
        super().__init__("http://engine:1")
        self.second = threading.Event()
        self.refuses = refuses

    def told(self, name: str) -> None:
        if name == "b":
            self.second.set()
        elif name == "a":
            assert self.second.wait(PATIENCE)
        if name == self.refuses:
            raise WeightUpdateError(f"no {name}", engine=self.url, phase="transfer")


class Wire(FakeGroup):
    """Bytes move until somebody looked twice, or for ever."""

    def __init__(self, *, stuck: bool = False) -> None:
        super().__init__()
        self.seen: list[str] = []
        self._looks, self._stuck = 0, stuck

    def broadcast(self, tensors: list[torch.Tensor]) -> None:
        self._looks = 2
        self.seen.append("sent")

    def moving(self) -> bool:
        if self._stuck:
            return True
        self._looks -= 1
        if self._looks == 0:
            self.seen.append("arrived")
        return self._looks > 0


def updater_of(
    engine: FakeEngine,
    packer: NotingPacker,
    group: FakeGroup | None = None,
    timeout: float = PATIENCE,
) -> Updater:
    ends = Ends(lambda *_: group or FakeGroup(), lambda _: packer)
    options = UpdateOptions(bucket_bytes=8, timeout=timeout)
    return Updater([engine.url], lambda _: engine, {"broadcast": ends}, options)


def push_of_four() -> Push:
    weights = extract_weights({name: torch.zeros(2) for name in "abcd"})
    return Push(lambda: Payload(weights), lambda _: [])


@pytest.mark.parametrize("unordered", [True, False])
def test_no_bucket_is_packed_more_than_one_ahead_of_the_buckets_that_arrived(unordered: bool):
    engine = FakeEngine("http://engine:1")
    packer = NotingPacker(engine, unordered=unordered)
    report = updater_of(engine, packer).update(push_of_four())

    assert report.buckets == 4
    assert sorted(engine.buckets) == list("abcd")
    # Two buffers: what is packed takes the room of the last but one, which had arrived.
    assert all(index - 1 <= seen <= index for index, seen in enumerate(packer.confirmed))


def test_buckets_in_an_order_arrive_in_it():
    engine = FakeEngine("http://engine:1")
    updater_of(engine, NotingPacker(engine, unordered=False)).update(push_of_four())

    assert engine.buckets == list("abcd")


def test_a_bucket_without_an_order_is_told_of_before_the_one_before_arrived(monkeypatch):
    engine = Pair()
    monkeypatch.setattr("tests.update.fakes.FakeSession.apply", _apply)
    report = updater_of(engine, NotingPacker(engine, unordered=True)).update(push_of_four())

    assert report.engines[engine.url].state == "new"
    assert sorted(engine.buckets) == list("abcd")


@pytest.mark.parametrize("refused", ["a", "b"])
def test_either_of_two_buckets_on_their_way_may_be_refused(monkeypatch, refused: str):
    engine = Pair(refuses=refused)
    monkeypatch.setattr("tests.update.fakes.FakeSession.apply", _apply)
    with pytest.raises(WeightUpdateError, match=f"no {refused}") as caught:
        updater_of(engine, NotingPacker(engine, unordered=True)).update(push_of_four())

    assert caught.value.report.engines[engine.url].state != "new"


def _apply(session, bucket: Bucket, cargo: Cargo, **_) -> None:
    name = bucket.specs[0].name
    session._engine.told(name)
    session._engine.buckets.append(name)


def test_what_the_other_request_brought_counts_when_one_is_refused(monkeypatch):
    """The first is refused, with nothing applied, and the second was taken: mixed, not old."""
    engine = Pair(refuses="a")
    monkeypatch.setattr("tests.update.fakes.FakeSession.apply", _refused_politely)
    with pytest.raises(WeightUpdateError, match="no a") as caught:
        updater_of(engine, NotingPacker(engine, unordered=True)).update(push_of_four())

    assert caught.value.report.engines[engine.url].state == "mixed"


def _refused_politely(session, bucket: Bucket, cargo: Cargo, **_) -> None:
    try:
        _apply(session, bucket, cargo)
    except WeightUpdateError as error:
        refusal = EngineRejected(error.message, engine=error.engine, phase="transfer")
        refusal.applied = "nothing"
        raise refusal from error


ARRIVALS = {False: ["sent", "arrived"] * 4, True: ["sent"] * 4 + ["arrived"]}


@pytest.mark.parametrize("queued", ARRIVALS)
def test_only_a_group_that_keeps_the_order_is_given_more_while_bytes_travel(queued: bool):
    engine, wire = FakeEngine("http://engine:1"), Wire()
    updater_of(engine, NotingPacker(engine, queued=queued), wire).update(push_of_four())

    assert engine.buckets == list("abcd")
    assert wire.seen == ARRIVALS[queued]


def test_an_update_that_engines_confirmed_ends_only_when_its_bytes_have_left():
    engine, wire = FakeEngine("http://engine:1"), Wire(stuck=True)
    updater = updater_of(engine, NotingPacker(engine, queued=True), wire, timeout=2.0)
    with pytest.raises(UpdateTimeout, match="its bytes never left") as caught:
        updater.update(push_of_four())

    assert engine.buckets == list("abcd")
    assert caught.value.report.engines[engine.url].state == "mixed"
