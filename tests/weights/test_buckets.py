"""The plan: every weight once, in order, bounded, aligned and with its group (C59, C21, C29)."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from math import ceil

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from weight_update.weights.buckets import Bucket, Plan, plan_buckets
from weight_update.weights.families.fused import group_of, set_of
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


# -- groups that engines fuse ----------------------------------------------------------------

MODULES = (
    *("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj"),
    *("mlp.gate_proj", "mlp.up_proj", "input_layernorm"),
    *(f"mlp.experts.{i}.{part}" for i in range(3) for part in ("w1", "w2", "w3")),
)
NAMES = st.builds(
    "model.layers.{}.{}.{}".format,
    st.integers(0, 1),
    st.sampled_from(MODULES),
    st.sampled_from(("weight", "bias", "weight_scale_inv")),
)


@st.composite
def model_weights(draw: st.DrawFn) -> list[Weight]:
    names = draw(st.lists(NAMES, unique=True, max_size=40))
    facts = [(draw(st.sampled_from(DTYPES[:5])), draw(SHAPES)) for _ in names]
    return [weight(name, *fact) for name, fact in zip(names, facts, strict=True)]


def homes(plan: Plan) -> Iterator[tuple[str, int]]:
    """Each group, and each bucket that has a member of it."""
    for index, bucket in enumerate(plan.buckets):
        yield from {(key, index) for spec in bucket.specs if (key := group_of(spec.name))}


LARGEST = st.integers(0, 300)


@given(model_weights(), LIMITS, LARGEST, st.booleans())
def test_no_group_is_torn_whatever_lanes_its_members_would_take(
    weights: list[Weight], limit: int, largest: int, even: bool
) -> None:
    plan = plan_buckets(weights, limit, lambda spec: spec.nbytes <= largest, even=even)

    found = list(homes(plan))
    assert len(found) == len({key for key, _ in found})


@given(model_weights(), LIMITS, LARGEST, st.booleans())
def test_groups_change_neither_what_travels_nor_how_often(
    weights: list[Weight], limit: int, largest: int, even: bool
) -> None:
    plan = plan_buckets(weights, limit, lambda spec: spec.nbytes <= largest, even=even)

    sent = [w.spec.name for bucket in plan.buckets for w in bucket.weights]
    assert sorted(sent) == sorted(w.spec.name for w in weights)
    assert all(bucket.weights for bucket in plan.buckets)


@given(model_weights(), LIMITS)
def test_only_a_single_group_may_exceed_the_limit(weights: list[Weight], limit: int) -> None:
    for bucket in plan_buckets(weights, limit).buckets:
        filled = {group_of(w.spec.name) or w.spec.name for w in bucket.weights if w.spec.nbytes}
        assert bucket.nbytes <= limit or len(filled) == 1


@given(model_weights(), LIMITS)
def test_the_experts_of_a_layer_share_a_bucket_where_they_fit(
    weights: list[Weight], limit: int
) -> None:
    plan = plan_buckets(weights, limit)
    sizes: dict[str, int] = {}
    places: dict[str, set[int]] = {}
    for index, bucket in enumerate(plan.buckets):
        for spec in bucket.specs:
            home = set_of(group_of(spec.name) or "")
            if home:
                sizes[home] = sizes.get(home, 0) + spec.nbytes
                places.setdefault(home, set()).add(index)
    assert all(len(places[home]) == 1 for home, size in sizes.items() if size <= limit)


@given(model_weights(), LIMITS)
def test_every_offset_fits_its_item_in_buckets_of_groups_too(
    weights: list[Weight], limit: int
) -> None:
    for bucket in plan_buckets(weights, limit).buckets:
        offset = 0
        for spec in bucket.specs:
            assert offset % spec.dtype.itemsize == 0
            offset += spec.nbytes


@given(model_weights(), LIMITS)
def test_groups_travel_in_the_order_of_their_first_members(
    weights: list[Weight], limit: int
) -> None:
    def first_seen(names: list[str]) -> list[str]:
        keys = [set_of(group_of(n) or "") or group_of(n) or n for n in names]
        return list(dict.fromkeys(keys))

    plan = plan_buckets(weights, limit)
    order = {w.spec.name: i for i, w in enumerate(weights)}
    sent = [n for b in plan.buckets for n in sorted((s.name for s in b.specs), key=order.get)]
    assert first_seen(sent) == first_seen([w.spec.name for w in weights])


def experts(layers: int, count: int, nbytes: int) -> list[Weight]:
    """Layers with as many experts of three equal weights."""
    return [
        weight(f"model.layers.{layer}.mlp.experts.{expert}.{part}_proj.weight", torch.int8, (size,))
        for layer in range(layers)
        for expert in range(count)
        for part, size in (("gate", nbytes), ("up", nbytes), ("down", nbytes))
    ]


@pytest.mark.parametrize(("even", "requests"), [(True, 3), (False, 4)])
def test_sets_of_more_than_half_a_bucket_are_divided_if_the_size_is_free_and_that_saves_requests(
    even: bool, requests: int
) -> None:
    weights = experts(layers=4, count=10, nbytes=2)  # four sets of 60 bytes

    plan = plan_buckets(weights, 100, even=even)

    assert plan.requests == requests
    for bucket in plan.buckets:
        groups = [group_of(spec.name) for spec in bucket.specs]
        assert all(groups.count(group) == 3 for group in groups)


def test_sets_stay_together_where_dividing_them_saves_nothing() -> None:
    plan = plan_buckets(experts(layers=4, count=10, nbytes=2), 120, even=True)

    homes = [
        {set_of(group_of(spec.name) or "") for spec in bucket.specs} for bucket in plan.buckets
    ]
    assert [len(home) for home in homes] == [2, 2]
    assert not homes[0] & homes[1]


def test_a_bucket_is_in_send_order() -> None:
    weights = experts(layers=1, count=3, nbytes=2)
    by_part = sorted(weights, key=lambda weight: "down" in weight.spec.name)

    (bucket,) = plan_buckets(by_part, 100).buckets

    assert list(bucket.weights) == by_part


def attention(sizes: tuple[int, int, int], dtype: torch.dtype = torch.float32) -> list[Weight]:
    return [
        weight(f"model.layers.0.self_attn.{part}_proj.weight", dtype, (size,))
        for part, size in zip("qkv", sizes, strict=True)
    ]


def lanes(plan: Plan) -> list[tuple[bool, int]]:
    return [(bucket.flat, len(bucket.weights)) for bucket in plan.buckets]


def test_a_group_larger_than_the_limit_gets_a_bucket_of_its_own_and_is_told(
    caplog: pytest.LogCaptureFixture,
) -> None:
    weights = [weight("a", torch.float32, (1,)), *attention((9, 3, 3)), weight("b", torch.int8, ())]
    with caplog.at_level("INFO", logger="weight_update"):
        plan = plan_buckets(weights, 16)

    assert [len(b.weights) for b in plan.buckets] == [1, 3, 1]
    (line,) = (record.getMessage() for record in caplog.records)
    assert "bucket_bytes=16" in line
    assert "model.layers.0.self_attn.qkv" in line


def test_experts_that_do_not_fit_are_divided_between_experts_with_one_line(
    caplog: pytest.LogCaptureFixture,
) -> None:
    weights = [
        weight(f"model.layers.{layer}.mlp.experts.{i}.{part}.weight", torch.uint8, (4,))
        for layer in range(5)
        for i in range(4)
        for part in ("w1", "w2", "w3")
    ]
    with caplog.at_level("INFO", logger="weight_update"):
        plan = plan_buckets(weights, 30)

    assert [len(b.weights) for b in plan.buckets] == [6] * 10
    (line,) = (record.getMessage() for record in caplog.records)
    assert "divided between its experts" in line


def test_a_single_weight_larger_than_the_limit_is_no_news(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level("INFO", logger="weight_update"):
        plan_buckets([weight("model.norm.weight", torch.float32, (9,))], 4)

    assert not caplog.records


def test_small_members_follow_large_ones_that_travel_as_they_are() -> None:
    plan = plan_buckets(attention((9, 1, 1)), 100, lambda spec: spec.nbytes < 30)

    assert lanes(plan) == [(False, 3)]


def test_a_member_of_a_dtype_that_may_have_to_be_packed_takes_its_group_along() -> None:
    q, k, _ = attention((9, 1, 1))
    v = weight("model.layers.0.self_attn.v_proj.weight", torch.float8_e4m3fn, (1,))
    plan = plan_buckets([q, k, v], 100, lambda spec: spec.nbytes < 30)

    assert lanes(plan) == [(True, 3)]


def test_another_rule_of_groups_can_be_given() -> None:
    weights = [weight(f"w{i}", torch.uint8, (4,)) for i in range(6)]
    plan = plan_buckets(weights, 8, group_of=lambda name: "odd" if int(name[1]) % 2 else None)

    assert [[s.name for s in b.specs] for b in plan.buckets] == [
        ["w0"],
        ["w1", "w3", "w5"],
        ["w2", "w4"],
    ]


def test_an_aligned_order_is_kept_so_that_a_weight_follows_its_scales() -> None:
    pair = [
        weight(f"a.{name}", dtype, shape)
        for _ in range(2)
        for name, dtype, shape in (
            ("o_proj.weight_scale_inv", torch.float32, (2,)),
            ("o_proj.weight", torch.float8_e4m3fn, (2, 4)),
        )
    ]
    bucket: Bucket
    (bucket,) = plan_buckets(pair, 100).buckets

    assert [spec.dtype for spec in bucket.specs] == [torch.float32, torch.float8_e4m3fn] * 2


def test_a_plain_model_needs_no_more_requests_than_its_bytes_ask_for() -> None:
    parts = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
    weights = [
        weight(f"model.layers.{layer}.x.{part}.weight", torch.float32, (25,))
        for layer in range(60)
        for part in parts
    ]

    assert len(plan_buckets(weights, 3_000).buckets) <= ceil(len(weights) * 100 / 3_000) + 1
