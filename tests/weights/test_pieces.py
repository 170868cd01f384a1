"""Neighbours in one tensor are read as one, and nothing else is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from weight_update.errors import WeightMismatchError
from weight_update.transports.packing import fill
from weight_update.weights.buckets import Bucket, plan_buckets
from weight_update.weights.families.experts import split
from weight_update.weights.families.layouts import Stack
from weight_update.weights.fitting import with_dtype
from weight_update.weights.pieces import pieces
from weight_update.weights.specs import TensorSpec, Weight

EXPERTS, INNER, HIDDEN = 4, 2, 3
PREFIX = "model.layers.0.mlp.experts"


def stacks() -> list[torch.Tensor]:
    gate_up = torch.arange(EXPERTS * 2 * INNER * HIDDEN, dtype=torch.float32)
    return [
        gate_up.view(EXPERTS, 2 * INNER, HIDDEN),
        -gate_up[: EXPERTS * INNER * HIDDEN].view(EXPERTS, HIDDEN, INNER),
    ]


def layer(tensors: list[torch.Tensor]) -> list[Weight]:
    """The experts of a layer, as they are sent."""
    found: list[Weight] = []
    for tensor, name, parts in zip(
        tensors,
        ("gate_up_proj", "down_proj"),
        (("gate_proj", "up_proj"), ("down_proj",)),
        strict=True,
    ):
        spec = TensorSpec(f"{PREFIX}.{name}", tensor.dtype, tuple(tensor.shape))
        whole = Weight(spec, tensor.device, tensor.detach)
        found += split(whole, Stack(name, parts), None)
    return found


def packed(weights: tuple[Weight, ...]) -> bytes:
    buffer = torch.empty(sum(weight.spec.nbytes for weight in weights), dtype=torch.uint8)
    fill(buffer, weights)
    return bytes(buffer.tolist())


def test_the_experts_of_a_layer_are_two_pieces_of_the_same_bytes() -> None:
    (bucket,) = plan_buckets(layer(stacks()), 1 << 20).buckets

    assert len(bucket.weights) == 3 * EXPERTS
    assert len(bucket.pieces) == 2
    assert packed(bucket.pieces) == packed(bucket.weights)


def test_a_layer_that_is_divided_between_buckets_is_two_pieces_in_each() -> None:
    weights = layer(stacks())
    plan = plan_buckets(weights, sum(weight.spec.nbytes for weight in weights) // 2)

    assert [len(bucket.pieces) for bucket in plan.buckets] == [2, 2]
    assert all(packed(bucket.pieces) == packed(bucket.weights) for bucket in plan.buckets)


MAKE: dict[str, Callable[[list[Weight]], list[Weight]]] = {
    "backwards": lambda weights: weights[::-1],
    "cast": lambda weights: [with_dtype(weight, torch.bfloat16) for weight in weights],
    "read in another way": lambda weights: [
        replace(weight, read=lambda weight=weight: weight.read() + 1)  # type: ignore[misc]
        for weight in weights
    ],
}


@pytest.mark.parametrize("made", MAKE)
def test_what_does_not_lie_as_it_is_sent_is_read_one_by_one(made: str) -> None:
    weights = tuple(MAKE[made](layer(stacks())))

    assert len(list(pieces(weights))) == len(weights)
    assert packed(Bucket(weights).pieces) == packed(weights)


def test_a_tensor_that_does_not_lie_without_gaps_is_read_one_by_one() -> None:
    gate_up, down = stacks()
    weights = layer([gate_up.mT.contiguous().mT, down])

    assert len(list(pieces(weights))) == 2 * EXPERTS + 1


def test_a_tensor_that_got_another_shape_is_refused() -> None:
    gate_up, down = stacks()
    weights = layer([gate_up, down])
    gate_up.resize_(EXPERTS + 1, 2 * INNER, HIDDEN)

    with pytest.raises(WeightMismatchError, match="gate_up_proj"):
        packed(tuple(pieces(weights)))
