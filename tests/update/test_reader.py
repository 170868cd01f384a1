"""Buckets are packed in a thread of their own, and nobody waits for them beyond the deadline."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from tests.update.fakes import FakePacker
from weight_update.errors import UpdateTimeout, WeightUpdateError
from weight_update.update.reader import Reader, nobody_else
from weight_update.waiting import Deadline
from weight_update.weights.buckets import Bucket, plan_buckets
from weight_update.weights.extract import extract_weights
from weight_update.weights.growing_plan import GrowingPlan, is_last

WEIGHTS = extract_weights({name: torch.zeros(2) for name in "abc"})
PLAN = plan_buckets(WEIGHTS, 8)


class SlowPacker(FakePacker):
    """Packs when it is let."""

    def __init__(self) -> None:
        self.began = threading.Event()
        self.let = threading.Event()
        self.abandoned = 0

    def pack(self, bucket: Bucket) -> list[torch.Tensor]:
        self.began.set()
        assert self.let.wait(20)
        return super().pack(bucket)

    def abandon(self) -> None:
        self.abandoned += 1


def reader(packer: Any, check: Callable[[], None] = nobody_else) -> Reader:
    return Reader(packer, PLAN, check)


def test_a_bucket_comes_with_its_tensors():
    one = reader(FakePacker())
    one.start(1)
    packed = one.finish("transfer", Deadline(5))
    assert packed is not None
    assert [spec.name for spec in packed.bucket.specs] == ["b"]
    assert len(packed.give().tensors) == 1
    assert packed.cargo.tensors == []


def test_after_the_last_bucket_comes_none():
    one = reader(FakePacker())
    one.start(3)
    assert one.finish("transfer", Deadline(5)) is None


def test_a_bucket_that_cannot_be_read_in_time_ends_in_a_typed_error():
    packer = SlowPacker()
    one = reader(packer)
    one.start(0)
    with pytest.raises(UpdateTimeout, match=r"could not be read in 0\.1 s") as failure:
        one.finish("plan", Deadline(0.1))
    assert failure.value.phase == "plan"
    packer.let.set()


def test_buffers_are_left_to_a_pack_that_does_not_end():
    packer = SlowPacker()
    one = reader(packer)
    one.start(0)
    assert packer.began.wait(20)
    one.let_go()
    assert packer.abandoned == 1
    packer.let.set()


def test_a_bucket_that_is_read_after_all_is_not_packed_into_what_the_next_update_uses() -> None:
    let, packed = threading.Event(), []

    class Packer(FakePacker):
        def pack(self, bucket: Bucket) -> list[torch.Tensor]:
            packed.append(bucket)
            return super().pack(bucket)

    def slow() -> Iterator[Bucket]:
        assert let.wait(20)
        yield PLAN.buckets[0]

    one = Reader(Packer(), GrowingPlan(slow()), nobody_else)
    one.start(0)
    late = one._running
    assert late is not None
    one.let_go()
    let.set()
    assert late.result(20) is None
    assert packed == []


def test_buffers_are_kept_when_nothing_is_under_way():
    packer = SlowPacker()
    packer.let.set()
    one = reader(packer)
    one.start(0)
    one.finish("plan", Deadline(5))
    one.let_go()
    assert packer.abandoned == 0


def test_what_fails_elsewhere_ends_the_wait():
    packer = SlowPacker()

    def check() -> None:
        raise WeightUpdateError("rank 1 failed")

    one = reader(packer, check)
    one.start(0)
    with pytest.raises(WeightUpdateError, match="rank 1 failed"):
        one.finish("transfer", Deadline(5))
    packer.let.set()


def test_a_streams_buckets_are_remembered_by_their_specs():
    plan = GrowingPlan(iter(PLAN.buckets))
    assert not plan.ended
    taken = [plan.take(index) for index in range(4)]
    assert taken[3] is None
    assert plan.ended
    assert list(plan.names) == ["a", "b", "c"]
    assert (plan.requests, plan.tensors, plan.nbytes) == (3, 3, 24)
    assert plan.buckets == ()


def test_the_last_bucket_of_a_stream_is_known_only_after_its_end():
    plan = GrowingPlan(iter(PLAN.buckets[:1]))
    plan.take(0)
    assert not is_last(plan, 0)
    plan.take(1)
    assert is_last(plan, 0)
    assert is_last(PLAN, 2)
    assert not is_last(PLAN, 1)
