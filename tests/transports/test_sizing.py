"""What is chosen over NCCL: by number of tensors, bytes, memory and the cost of a request."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from weight_update.options import LoadFormat
from weight_update.transports.sizing import nccl_format
from weight_update.weights.buckets import plan_buckets
from weight_update.weights.cargo import Format, Terms
from weight_update.weights.extract import extract_weights
from weight_update.weights.specs import TensorSpec, Weight

GIB = 1 << 30
MIB = 1 << 20
PLENTY = Terms(engine_bytes=30 * GIB, in_place=True)


def model(count: int, nbytes: int) -> list[TensorSpec]:
    """As many equal tensors in bf16, of about as many bytes."""
    shape = (nbytes // 2 // count,)
    return [TensorSpec(f"model.w{index}", torch.bfloat16, shape) for index in range(count)]


HALF_B = model(290, 1_000_000_000)
EIGHT_B = model(291, 16_060_000_000)
MOE = model(4_719, 16_200_000_000)
HUGE = model(91_991, 671_000_000_000)
FEW = model(20, 16_060_000_000)

# What is sent, under which terms, and whether it is packed and how large a request is.
CHOICES: dict[str, tuple[list[TensorSpec], Terms, bool, int]] = {
    "8B into a roomy engine": (EIGHT_B, PLENTY, True, 2 * GIB),
    "few large tensors into a roomy engine": (FEW, PLENTY, False, 4 * GIB),
    "8B, nobody knows the memory": (EIGHT_B, Terms(in_place=True), True, 2 * GIB),
    "8B, values that are merged on the way": (
        EIGHT_B,
        replace(PLENTY, in_place=False),
        True,
        2 * GIB,
    ),
    "8B into a tight engine": (EIGHT_B, Terms(engine_bytes=GIB, in_place=True), True, GIB // 2),
    "8B into a full engine": (EIGHT_B, Terms(engine_bytes=0, in_place=True), True, 64 * MIB),
    "8B, a large bucket asked for": (
        EIGHT_B,
        replace(PLENTY, bucket_bytes=20 * GIB),
        False,
        20 * GIB,
    ),
    "8B, a small bucket asked for": (EIGHT_B, replace(PLENTY, bucket_bytes=MIB), True, MIB),
    "8B, requests cost little": (EIGHT_B, replace(PLENTY, request_seconds=1e-4), True, 2 * GIB),
    "8B, requests cost much": (EIGHT_B, replace(PLENTY, request_seconds=0.1), False, 4 * GIB),
    "0.5B": (HALF_B, PLENTY, True, 2 * GIB),
    "a mixture of experts": (MOE, PLENTY, True, 2 * GIB),
    "a mixture of experts, requests cost much": (
        *(MOE, replace(PLENTY, request_seconds=0.1)),
        *(False, 4 * GIB),
    ),
    "671B": (HUGE, PLENTY, True, 2 * GIB),
}


def is_packed(chosen: Format) -> bool:
    return chosen.packs(TensorSpec("model.w", torch.bfloat16, (4, 4)))


@pytest.mark.parametrize("case", CHOICES)
def test_what_costs_less_is_chosen(case: str) -> None:
    specs, terms, packed, nbytes = CHOICES[case]

    chosen = nccl_format(specs, terms)

    assert (is_packed(chosen), chosen.bucket_bytes) == (packed, nbytes), chosen.reason


@pytest.mark.parametrize("load_format", ["flattened_bucket", "tensors"])
@pytest.mark.parametrize("specs", [EIGHT_B, MOE, None], ids=["8B", "experts", "a stream"])
def test_the_format_that_was_asked_for_wins(
    load_format: LoadFormat, specs: list[TensorSpec] | None
) -> None:
    chosen = nccl_format(specs, PLENTY, load_format)

    assert is_packed(chosen) is (load_format == "flattened_bucket")
    assert f"load_format={load_format!r} was asked for" in chosen.reason


def test_a_stream_is_packed_since_nobody_knows_what_comes() -> None:
    chosen = nccl_format(None, PLENTY)

    assert is_packed(chosen)
    assert chosen.bucket_bytes == 2 * GIB


def test_the_reason_names_both_costs() -> None:
    assert nccl_format(EIGHT_B, PLENTY).reason == (
        "flat buckets: 8 cost 5 ms, one broadcast a tensor would 9 ms (291 tensors)"
    )
    assert nccl_format(FEW, PLENTY).reason == (
        "one broadcast a tensor: 20 tensors in 4 requests cost 4 ms, 8 flat buckets would 5 ms"
    )


SIZES = {GIB: "15 cost 12 ms", 3 * GIB // 2: "10 cost 4 ms", 4 * GIB: "4 cost 6 ms"}


@pytest.mark.parametrize("size", SIZES)
def test_requests_that_are_shorter_than_their_bytes_on_the_wire_cost_only_the_first(
    size: int,
) -> None:
    chosen = nccl_format(EIGHT_B, replace(PLENTY, bucket_bytes=size))

    assert f"flat buckets: {SIZES[size]}" in chosen.reason


def test_the_reason_tells_that_memory_is_short() -> None:
    tight = Terms(engine_bytes=GIB, in_place=True)

    assert "half of the memory that is free" in nccl_format(EIGHT_B, tight).reason
    assert "half of the memory" not in nccl_format(EIGHT_B, PLENTY).reason


MEMORY: dict[str, tuple[Terms, int | None]] = {
    "nobody knows": (Terms(), None),
    "nobody knows, values at hand": (Terms(in_place=True), None),
    "plenty": (Terms(engine_bytes=100 * GIB), 100 * GIB),
    "plenty, values at hand": (Terms(engine_bytes=100 * GIB, in_place=True), 100 * GIB),
    "a tight trainer": (Terms(engine_bytes=100 * GIB), 3 * GIB),
    "a tight engine": (Terms(engine_bytes=3 * GIB), 100 * GIB),
}


@pytest.mark.parametrize("case", MEMORY)
@pytest.mark.parametrize("specs", [EIGHT_B, MOE], ids=["8B", "experts"])
@pytest.mark.parametrize("seconds", [1e-4, 3.5e-3, 1.0])
def test_neither_side_takes_more_than_4_gib_or_half_of_what_is_free(
    case: str, specs: list[TensorSpec], seconds: float
) -> None:
    terms, trainer = MEMORY[case]

    chosen = nccl_format(specs, replace(terms, request_seconds=seconds), trainer_bytes=trainer)

    nothing = terms.in_place and not is_packed(chosen)
    on_trainer = 0 if nothing else 2 * chosen.bucket_bytes
    assert on_trainer <= min(4 * GIB, (trainer or 8 * GIB) // 2)
    assert chosen.bucket_bytes <= min(4 * GIB, (terms.engine_bytes or 8 * GIB) // 2)


def test_a_full_trainer_sends_what_lies_there_as_it_is() -> None:
    chosen = nccl_format(EIGHT_B, PLENTY, trainer_bytes=GIB)

    assert not is_packed(chosen)
    assert chosen.bucket_bytes == 4 * GIB


def test_the_plan_has_as_many_requests_as_the_reason_says() -> None:
    cpu = torch.device("cpu")
    for specs, said in ((FEW, "in 4 requests"), (EIGHT_B, "flat buckets: 8 cost")):
        weights = [Weight(spec, cpu, lambda: torch.zeros(0)) for spec in specs]
        chosen = nccl_format(specs, PLENTY)
        plan = plan_buckets(weights, chosen.bucket_bytes, chosen.packs, even=True)

        assert said in chosen.reason
        assert str(plan.requests) in said


AT_HAND: dict[str, tuple[Any, bool]] = {
    "a contiguous tensor": (torch.zeros(4, 4), True),
    "a transposed one": (torch.zeros(4, 2).mT, False),
}


@pytest.mark.parametrize("case", AT_HAND)
def test_only_a_contiguous_value_is_sent_from_where_it_lies(case: str) -> None:
    value, at_hand = AT_HAND[case]

    (weight,) = extract_weights({"w": value})

    assert weight.at_hand is at_hand
