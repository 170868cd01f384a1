"""Tensors of every kind reach the wire by their values (C34, C61)."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from weight_update.transports.broadcast import BucketPacker
from weight_update.weights.buckets import Bucket, plan_buckets
from weight_update.weights.cargo import Terms
from weight_update.weights.extract import extract_weights

BASE = torch.arange(24.0).reshape(4, 6)
COMPLEX = torch.complex(BASE, -BASE)

KINDS: dict[str, Callable[[], torch.Tensor]] = {
    "transposed": BASE.t,
    "every second row": lambda: BASE[::2],
    "every second column": lambda: BASE[:, ::2],
    "a slice of columns": lambda: BASE[:, 2:5],
    "flipped": lambda: BASE.flip(0),
    "expanded": lambda: BASE[:1].expand(4, 6),
    "expanded from one": lambda: torch.tensor(3.0).expand(2, 3),
    "permuted": lambda: torch.arange(24.0).reshape(2, 3, 4).permute(2, 0, 1),
    "channels last": lambda: torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last),
    "overlapping windows": lambda: torch.arange(6.0).unfold(0, 3, 1),
    "zero-dim": lambda: torch.tensor(5.0),
    "empty": lambda: torch.empty(0),
    "empty in one dimension": lambda: torch.empty(3, 0, 2),
    "float64": lambda: BASE.double() / 3,
    "bfloat16": BASE.bfloat16,
    "bool": lambda: BASE > 5,
    "int64": lambda: BASE.long() << 40,
    "uint8": lambda: BASE.to(torch.uint8),
    "fp8": lambda: BASE.to(torch.float8_e4m3fn),
    "complex64": lambda: COMPLEX,
    "complex128": lambda: COMPLEX.to(torch.complex128),
    "a conjugate view": COMPLEX.conj,
    "a negative view": lambda: COMPLEX.conj().imag,
    "the real half of a complex tensor": lambda: COMPLEX.real,
    "a tensor that needs a gradient": lambda: BASE.clone().requires_grad_(),
    "a parameter": lambda: nn.Parameter(BASE.clone()),
    "NaN and infinity": lambda: torch.tensor([float("nan"), float("-inf"), -0.0]),
}


def packed(tensors: dict[str, torch.Tensor], load_format: str) -> dict[str, bytes]:
    """The bytes of each tensor on the wire."""
    packer = BucketPacker(torch.device("cpu"), load_format)  # type: ignore[arg-type]
    found: dict[str, bytes] = {}
    for bucket in plan_buckets(
        extract_weights(tensors), 1 << 20, packer.format(None, Terms()).packs
    ).buckets:
        found |= parts_of(bucket, packer.pack(bucket).tensors)
    return found


def parts_of(bucket: Bucket, sent: list[torch.Tensor]) -> dict[str, bytes]:
    assert all(tensor.is_contiguous() for tensor in sent)
    wire = b"".join(raw(tensor) for tensor in sent)
    found, offset = {}, 0
    for spec in bucket.specs:
        found[spec.name] = wire[offset : offset + spec.nbytes]
        offset += spec.nbytes
    assert offset == len(wire)
    return found


def raw(tensor: torch.Tensor) -> bytes:
    """The bytes of a tensor's values in row order, made without the packer's code."""
    plain = (
        tensor.detach().resolve_conj().resolve_neg().clone(memory_format=torch.contiguous_format)
    )
    return bytes(plain.reshape(-1).view(torch.uint8).numpy()) if plain.numel() else b""


FORMATS = pytest.mark.parametrize("load_format", ["flattened_bucket", "tensors"])


@FORMATS
@pytest.mark.parametrize("kind", KINDS)
def test_a_tensor_of_any_kind_travels_by_its_values(kind: str, load_format: str) -> None:
    value = KINDS[kind]()

    assert packed({"w": value}, load_format) == {"w": raw(value)}


@FORMATS
def test_tensors_of_all_kinds_travel_together(load_format: str) -> None:
    tensors = {kind: make() for kind, make in KINDS.items()}

    assert packed(tensors, load_format) == {kind: raw(value) for kind, value in tensors.items()}


@FORMATS
def test_views_of_one_storage_are_weights_of_their_own(load_format: str) -> None:
    fused = torch.randn(6, 4)
    q, k, v = fused.split(2)
    tensors = {"q": q, "k": k, "v": v, "columns": fused[:, 1], "all": fused}

    assert packed(tensors, load_format) == {name: raw(value) for name, value in tensors.items()}


class Tied(nn.Module):
    """An embedding and its output layer."""

    def __init__(self, *, tied: bool) -> None:
        super().__init__()
        self.embed = nn.Embedding(4, 2)
        self.head = nn.Linear(2, 4, bias=False)
        self.register_buffer("steps", torch.tensor(7))
        self.register_buffer("table", torch.ones(2), persistent=False)
        if tied:
            self.head.weight = self.embed.weight


@pytest.mark.parametrize("tied", [True, False])
def test_a_tied_weight_travels_once_and_an_untied_one_always(tied: bool) -> None:
    names = [weight.spec.name for weight in extract_weights(Tied(tied=tied))]

    assert names == ["steps", "embed.weight", *([] if tied else ["head.weight"])]


def test_equal_values_are_not_taken_for_tied_ones() -> None:
    model = Tied(tied=False)
    with torch.no_grad():
        model.head.weight.copy_(model.embed.weight)

    assert "head.weight" in {weight.spec.name for weight in extract_weights(model)}


def test_a_value_is_that_of_the_moment_when_its_bucket_is_packed() -> None:
    value = torch.zeros(3)
    (weight,) = extract_weights({"w": value})
    value.fill_(2.0)

    assert weight.read().tolist() == [2.0] * 3


@FORMATS
def test_packing_leaves_the_trainers_tensors_as_they_are(load_format: str) -> None:
    tensors = {kind: make() for kind, make in KINDS.items()}
    before = {kind: (raw(v), v.stride(), v.dtype, v.is_conj()) for kind, v in tensors.items()}

    packed(tensors, load_format)

    after = {kind: (raw(v), v.stride(), v.dtype, v.is_conj()) for kind, v in tensors.items()}
    assert after == before
