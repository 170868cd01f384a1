"""The plan: every weight once, in order, bounded, and aligned for the reader (C59, C21)."""

from __future__ import annotations

from itertools import pairwise
from math import ceil

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from weight_update.weights.buckets import Plan, plan_buckets
from weight_update.weights.specs import TensorSpec, Weight

DTYPES = (
    torch.float64,
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.float8_e4m3fn,
    torch.int64,
    torch.uint8,
    torch.bool,
)
SHAPES = st.lists(st.integers(0, 6), max_size=3).map(tuple)


def unread() -> torch.Tensor:
    raise AssertionError("planning reads no value")


def weight(name: str, dtype: torch.dtype, shape: tuple[int, ...]) -> Weight:
    return Weight(TensorSpec(name, dtype, shape), torch.device("cpu"), unread)


@st.composite
def weight_lists(draw: st.DrawFn) -> list[Weight]:
    facts = draw(st.lists(st.tuples(st.sampled_from(DTYPES), SHAPES), max_size=25))
    return [weight(f"w{i}", dtype, shape) for i, (dtype, shape) in enumerate(facts)]


LIMITS = st.integers(1, 600)


def position(item: Weight) -> int:
    return int(item.spec.name[1:])


@given(weight_lists(), LIMITS)
def test_every_weight_travels_exactly_once(weights: list[Weight], limit: int) -> None:
    plan = plan_buckets(weights, limit)

    sent = [w for bucket in plan.buckets for w in bucket.weights]
    assert sorted(sent, key=position) == weights


@given(weight_lists(), LIMITS)
def test_buckets_follow_each_other_in_the_order_of_the_weights(
    weights: list[Weight], limit: int
) -> None:
    plan = plan_buckets(weights, limit)

    ranges = [sorted(map(position, bucket.weights)) for bucket in plan.buckets]
    assert [i for positions in ranges for i in positions] == list(range(len(weights)))


@given(weight_lists(), LIMITS)
def test_equal_item_sizes_keep_their_order_inside_a_bucket(
    weights: list[Weight], limit: int
) -> None:
    for bucket in plan_buckets(weights, limit).buckets:
        for size in {w.spec.dtype.itemsize for w in bucket.weights}:
            same = [position(w) for w in bucket.weights if w.spec.dtype.itemsize == size]
            assert same == sorted(same)


@given(weight_lists(), LIMITS)
def test_only_a_single_weight_may_exceed_the_limit(weights: list[Weight], limit: int) -> None:
    for bucket in plan_buckets(weights, limit).buckets:
        with_bytes = [w for w in bucket.weights if w.spec.nbytes]
        assert bucket.nbytes <= limit or len(with_bytes) == 1


@given(weight_lists(), LIMITS)
def test_every_offset_is_a_multiple_of_the_item_size(weights: list[Weight], limit: int) -> None:
    for bucket in plan_buckets(weights, limit).buckets:
        offset = 0
        for spec in bucket.specs:
            assert offset % spec.dtype.itemsize == 0
            offset += spec.nbytes


@given(weight_lists(), LIMITS)
def test_no_bucket_is_empty_and_the_totals_add_up(weights: list[Weight], limit: int) -> None:
    plan = plan_buckets(weights, limit)

    assert all(bucket.weights for bucket in plan.buckets)
    assert plan.tensors == len(weights)
    assert plan.nbytes == sum(w.spec.nbytes for w in weights)
    assert sorted(plan.names) == sorted(s.name for b in plan.buckets for s in b.specs)


@given(weight_lists(), LIMITS)
def test_no_two_neighbours_would_have_fitted_into_one_bucket(
    weights: list[Weight], limit: int
) -> None:
    buckets = plan_buckets(weights, limit).buckets

    for bucket, following in pairwise(buckets):
        first = min(following.weights, key=position)
        assert bucket.nbytes + first.spec.nbytes > limit


def test_four_hundred_small_tensors_need_few_requests() -> None:
    weights = [weight(f"w{i}", torch.float32, (25,)) for i in range(400)]

    plan = plan_buckets(weights, 3_000)

    assert len(plan.buckets) <= ceil(400 * 100 / 3_000) + 1


def test_a_cap_of_two_tensors_makes_ten_requests_of_twenty() -> None:
    weights = [weight(f"w{i}", torch.float32, (4,)) for i in range(20)]

    assert [len(b.weights) for b in plan_buckets(weights, 32).buckets] == [2] * 10


def test_a_tensor_above_the_cap_travels_alone() -> None:
    weights = [weight(f"w{i}", torch.uint8, (n,)) for i, n in enumerate((4, 100, 4, 4))]

    assert [len(b.weights) for b in plan_buckets(weights, 16).buckets] == [1, 1, 2]


@given(weight_lists(), LIMITS, st.integers(0, 300))
def test_each_weight_travels_as_the_transport_wants_it_packed_ones_first(
    weights: list[Weight], limit: int, largest: int
) -> None:
    plan = plan_buckets(weights, limit, lambda spec: spec.nbytes <= largest)

    sent = [(w, bucket.flat) for bucket in plan.buckets for w in bucket.weights]
    assert sorted((w for w, _ in sent), key=position) == weights
    assert all(flat == (w.spec.nbytes <= largest) for w, flat in sent)
    assert [flat for _, flat in sent] == sorted((flat for _, flat in sent), reverse=True)


@given(weight_lists(), LIMITS)
def test_weights_that_are_not_packed_keep_their_order(weights: list[Weight], limit: int) -> None:
    plan = plan_buckets(weights, limit, lambda _: False)

    assert [w for bucket in plan.buckets for w in bucket.weights] == weights


@given(weight_lists(), LIMITS)
def test_even_buckets_keep_the_limit_and_are_no_larger_than_full_ones(
    weights: list[Weight], limit: int
) -> None:
    even = plan_buckets(weights, limit, even=True).buckets
    full = plan_buckets(weights, limit).buckets

    assert [w for b in even for w in sorted(b.weights, key=position)] == weights
    largest = max((b.nbytes for b in full), default=0)
    assert all(b.nbytes <= max(limit, largest) for b in even)
    assert max((b.nbytes for b in even), default=0) <= largest or len(even) < len(full)


def test_even_buckets_leave_no_small_rest() -> None:
    weights = [weight(f"w{i}", torch.float32, (10,)) for i in range(9)]

    assert [len(b.weights) for b in plan_buckets(weights, 320).buckets] == [8, 1]
    assert [len(b.weights) for b in plan_buckets(weights, 320, even=True).buckets] == [5, 4]


def test_each_lane_is_spread_by_itself() -> None:
    weights = [weight(f"w{i}", torch.uint8, (n,)) for i, n in enumerate((1, 50, 1, 50, 50, 1))]
    plan = plan_buckets(weights, 100, lambda spec: spec.nbytes == 1, even=True)

    assert [(b.flat, len(b.weights)) for b in plan.buckets] == [(True, 3), (False, 2), (False, 1)]


def test_a_plan_of_nothing_is_empty() -> None:
    plan = plan_buckets([], 1)

    assert plan == Plan(())
    assert (plan.tensors, plan.nbytes, list(plan.names)) == (0, 0, [])


@pytest.mark.parametrize(
    ("dtype", "name", "nbytes"),
    [
        (torch.bfloat16, "bfloat16", 12),
        (torch.float32, "float32", 24),
        (torch.float8_e4m3fn, "float8_e4m3fn", 6),
        (torch.int64, "int64", 48),
        (torch.bool, "bool", 6),
    ],
)
def test_a_spec_knows_its_bytes_and_the_bare_torch_name(
    dtype: torch.dtype, name: str, nbytes: int
) -> None:
    spec = TensorSpec("w", dtype, (2, 3))

    assert (spec.dtype_name, spec.nbytes) == (name, nbytes)


@pytest.mark.parametrize(("shape", "nbytes"), [((), 4), ((0, 4), 0), ((3, 0), 0), ((1, 1), 4)])
def test_scalars_have_one_item_and_empty_tensors_none(shape: tuple[int, ...], nbytes: int) -> None:
    assert TensorSpec("w", torch.float32, shape).nbytes == nbytes
