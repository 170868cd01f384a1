"""Adapters merged on a GPU: as exact as in fp32, rounded once, the same bits every time.

Run it where a GPU of NVIDIA's and Triton are: ``pytest tests/gpu``. Elsewhere it is skipped.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from weight_update.weights.lora import kernel
from weight_update.weights.lora.dense import Dense
from weight_update.weights.lora.formula import LowRank, Magnitude, Merge

pytest.importorskip("triton")
pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

# Of |base| + scale * |left| @ |right|: what fp32 may lose when it adds up in any order.
TINY = 2.0**-20
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
SHAPES = ((64, 128), (1000, 333), (3, 129, 200))
RANKS = (1, 16, 40)  # each is compiled anew


@pytest.fixture(autouse=True)
def settings_of_a_trainer() -> Iterator[None]:
    """What costs exactness in torch's own products is on."""
    matmul = torch.backends.cuda.matmul
    before = matmul.allow_tf32
    matmul.allow_tf32 = True
    yield
    matmul.allow_tf32 = before


def factors(shape: tuple[int, ...], rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(rank)
    left = torch.randn(*shape[:-1], rank, device="cuda")
    return left, torch.randn(*shape[:-2], rank, shape[-1], device="cuda")


def ulp(values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    info = torch.finfo(dtype)
    return values.abs().clamp_min(info.tiny).log2().floor().exp2() * info.eps


def low_rank(shape: tuple[int, int] = (96, 160), rank: int = 8) -> LowRank:
    left, right = factors(shape, rank)
    return LowRank(right, left, 0.5)


def merge_of(*steps: LowRank | Magnitude, dtype: torch.dtype = torch.bfloat16) -> Merge:
    torch.manual_seed(0)
    base = torch.randn(96, 160, device="cuda").to(dtype)
    return Merge(Dense.of(base), steps)


@pytest.mark.parametrize("rank", RANKS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_merged_value_is_the_exact_one_rounded_once(dtype, shape, rank) -> None:
    left, right = factors(shape, rank)
    base = torch.randn(shape, device="cuda").to(dtype)
    merged = torch.empty_like(base)

    assert kernel.add_low_rank(merged, base, left, right, 0.3)

    exact = base.double() + 0.3 * (left.double() @ right.double())
    size = base.double().abs() + 0.3 * (left.double().abs() @ right.double().abs())
    assert ((merged.double() - exact).abs() <= ulp(exact, dtype) / 2 + TINY * size).all()


def test_it_is_far_closer_than_a_merge_in_the_dtype_of_the_base() -> None:
    merge = merge_of(low_rank())
    step = merge.steps[0]
    exact = merge.base.value().double() + 0.5 * (step.b.double() @ step.a.double())
    in_bf16 = merge.base.value() + (step.b @ step.a * 0.5).bfloat16()

    ours, theirs = ((v.double() - exact).abs().mean() for v in (merge.read(), in_bf16))

    assert ours < 0.9 * theirs


@pytest.mark.parametrize("offset", [0, 1, 3, 8])
def test_the_place_in_memory_changes_no_bit(offset: int) -> None:
    merge = merge_of(low_rank())
    buffer = torch.zeros(96 * 160 + 8, dtype=torch.bfloat16, device="cuda")
    place = buffer[offset : offset + 96 * 160].view(96, 160)

    assert merge.into(place) is place
    assert torch.equal(place, merge.read())
    assert buffer.count_nonzero() == place.count_nonzero()


def test_some_rows_have_the_bits_that_all_of_them_have() -> None:
    merge = merge_of(low_rank())

    assert torch.equal(merge.rows(5, 71), merge.read()[5:71])


def test_adapters_on_the_cpu_are_brought_to_their_base() -> None:
    step = low_rank()
    away = LowRank(step.a.cpu(), step.b.cpu(), step.scale)

    assert torch.equal(merge_of(away).read(), merge_of(step).read())


def test_factors_may_be_transposed_views() -> None:
    step = low_rank((160, 96))
    swapped = LowRank(step.a, step.b, step.scale, transposed=True)
    plain = LowRank(step.b.mT.contiguous(), step.a.mT.contiguous(), step.scale)

    assert torch.equal(merge_of(swapped).read(), merge_of(plain).read())


def test_several_steps_are_added_up_in_fp32_and_rounded_once() -> None:
    step = low_rank()
    length = torch.rand(96, device="cuda")
    merge = merge_of(step, low_rank(rank=3), Magnitude(length))
    exact = merge.base.value().double()
    for each in merge.steps[:2]:
        exact += 0.5 * (each.b.double() @ each.a.double())
    exact *= (length.double() / exact.norm(dim=1)).unsqueeze(1)

    got = merge.read().double()

    assert ((got - exact).abs() <= ulp(exact, torch.bfloat16) / 2 + 2.0**-18).all()


def test_where_triton_fails_the_merge_is_made_without_it(monkeypatch, caplog) -> None:
    torch.backends.cuda.matmul.allow_tf32 = False
    expected = merge_of(low_rank()).read()
    monkeypatch.setattr(kernel, "_broken", set())
    monkeypatch.setattr(kernel, "_merge_tile", None)

    got = [merge_of(low_rank()).read() for _ in range(2)]

    torch.testing.assert_close(got[0], expected, rtol=2.0**-7, atol=0)
    assert torch.equal(*got)
    assert len(caplog.records) == 1
