"""Block-quantised weights: what is quantised, how close it is, and that it is read once."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from weight_update.errors import ConfigurationError
from weight_update.facts import Intake
from weight_update.transports.broadcast import BucketPacker
from weight_update.weights import fp8
from weight_update.weights.buckets import plan_buckets
from weight_update.weights.extract import extract_weights
from weight_update.weights.specs import TensorSpec, Turn, Weight

FP8 = torch.float8_e4m3fn
INTAKE = Intake(quantization="fp8", block=(128, 128))


def dequantised(value: torch.Tensor, scales: torch.Tensor, block: tuple[int, int]) -> torch.Tensor:
    wide = scales.repeat_interleave(block[0], 0).repeat_interleave(block[1], 1)
    return value.float() * wide[: value.shape[0], : value.shape[1]]


def naive(value: torch.Tensor, block: tuple[int, int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Block by block, as it is defined."""
    high, wide = block
    grid = (-(-value.shape[0] // high), -(-value.shape[1] // wide))
    scales, result = torch.ones(grid), torch.zeros(value.shape, dtype=FP8)
    for i, j in product(*map(range, grid)):
        place = slice(i * high, (i + 1) * high), slice(j * wide, (j + 1) * wide)
        part = value[place].float()
        if part.abs().max():
            scales[i, j] = part.abs().max() / 448
        result[place] = (part / scales[i, j]).clamp(-448, 448).to(FP8)
    return result, scales


def bits(value: torch.Tensor) -> list[int]:
    return value.contiguous().view(torch.uint8).flatten().tolist()


@given(
    st.integers(1, 9),
    st.integers(1, 9),
    st.sampled_from([(1, 1), (2, 3), (4, 4), (16, 16)]),
    st.sampled_from([torch.float32, torch.bfloat16, torch.float16, torch.float64]),
    st.integers(0, 99),
)
def test_values_and_scales_are_those_of_the_definition(
    rows: int, columns: int, block: tuple[int, int], dtype: torch.dtype, seed: int
) -> None:
    value = torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed)).to(dtype)
    value[0] = 0

    quantised, scales = fp8.block_quantised(value, block)

    expected, expected_scales = naive(value, block)
    assert torch.equal(scales, expected_scales)
    assert bits(quantised) == bits(expected)


def test_large_matrices_are_quantised_in_runs_that_meet_without_a_seam(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    value = torch.randn(1000, 300)
    whole = fp8.block_quantised(value, (128, 128))
    monkeypatch.setattr(fp8, "_RUN_ELEMENTS", 300 * 256)

    runs = fp8.block_quantised(value, (128, 128))

    assert bits(runs[0]) == bits(whole[0])
    assert torch.equal(runs[1], whole[1])


@pytest.mark.parametrize("shape", [(256, 256), (200, 130), (1, 1), (128, 7)])
def test_each_number_is_as_close_as_three_bits_of_mantissa_allow(shape: tuple[int, int]) -> None:
    value = torch.randn(shape) * torch.logspace(-6, 6, shape[1])
    result = dequantised(*fp8.block_quantised(value, (128, 128)), (128, 128))

    largest = naive(value, (128, 128))[1].repeat_interleave(128, 0).repeat_interleave(128, 1)
    # Below the least normal number of the dtype, steps are even.
    step = largest[: shape[0], : shape[1]] * 2**-9
    assert bool(((result - value).abs() <= value.abs() / 16 + step).all())


@pytest.mark.parametrize("value", [0.0, 1e-44, 1e-40, 3e38])
def test_extreme_blocks_stay_finite(value: float) -> None:
    block = torch.full((4, 4), value)
    block[0, 0] = 0.0
    quantised, scales = fp8.block_quantised(block, (4, 4))

    assert bool(torch.isfinite(quantised.float()).all())
    assert bool(torch.isfinite(scales).all())


def test_a_nan_stays_one() -> None:
    value = torch.ones(2, 2)
    value[0, 0] = float("nan")

    assert bool(fp8.block_quantised(value, (1, 2))[0].float().isnan().any())


def test_the_trainers_weight_is_untouched() -> None:
    value = torch.randn(256, 256)
    before = value.clone()

    fp8.block_quantised(value, (128, 128))

    assert torch.equal(value, before)


# -- which weights -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "shape", "expected"),
    [
        ("model.layers.0.self_attn.q_proj.weight", (256, 256), True),
        ("model.layers.0.mlp.experts.3.w2.weight", (256, 256), True),
        ("model.layers.0.self_attn.q_proj.bias", (256,), False),
        ("model.layers.0.input_layernorm.weight", (256,), False),
        ("model.layers.0.mlp.gate.weight", (8, 256), False),
        ("model.layers.0.mlp.gate_proj.weight", (512, 256), True),
        ("model.layers.0.mlp.shared_expert_gate.weight", (1, 256), False),
        ("model.embed_tokens.weight", (1000, 256), False),
        ("lm_head.weight", (1000, 256), False),
        ("visual.patch_embed.proj.weight", (256, 3, 2, 14, 14), False),
    ],
)
def test_linear_layers_are_quantised_and_nothing_else(
    name: str, shape: tuple[int, ...], expected: bool
) -> None:
    assert fp8.is_quantised(TensorSpec(name, torch.bfloat16, shape), INTAKE) is expected


@pytest.mark.parametrize(
    ("left_out", "expected"),
    [
        ("model.layers.0.self_attn.q_proj", False),
        ("layers.0.self_attn", False),
        ("model.layers.0", False),
        ("self_attn.q_proj.", False),
        ("q", True),
        ("model.layers.1", True),
        ("self_attn.q", True),
    ],
)
def test_modules_that_are_left_out_are_matched_by_whole_parts_of_their_path(
    left_out: str, expected: bool
) -> None:
    intake = Intake(quantization="fp8", block=(128, 128), unconverted=(left_out,))
    spec = TensorSpec("model.layers.0.self_attn.q_proj.weight", torch.bfloat16, (8, 8))

    assert fp8.is_quantised(spec, intake) is expected


def test_the_checkpoints_own_list_wins_over_every_rule() -> None:
    intake = Intake(quantization="fp8", block=(128, 128), scaled=frozenset({"lm_head.weight"}))

    assert fp8.is_quantised(TensorSpec("lm_head.weight", torch.bfloat16, (8, 8)), intake)
    assert not fp8.is_quantised(TensorSpec("a.q_proj.weight", torch.bfloat16, (8, 8)), intake)


# -- as weights --------------------------------------------------------------------------------


def counted(value: torch.Tensor, turn: Turn | None = None) -> tuple[Weight, list[int]]:
    reads: list[int] = []

    def read() -> torch.Tensor:
        reads.append(1)
        return value

    spec = TensorSpec("a.o_proj.weight", value.dtype, tuple(value.shape))
    return Weight(spec, value.device, read, None, turn is not None, turn), reads


def test_a_weight_becomes_its_scales_and_itself_in_eight_bits() -> None:
    source, _ = counted(torch.randn(200, 300, dtype=torch.bfloat16))

    scales, value = fp8.quantised(source, (128, 128))

    assert scales.spec == TensorSpec("a.o_proj.weight_scale_inv", torch.float32, (2, 3))
    assert value.spec == TensorSpec("a.o_proj.weight", FP8, (200, 300))


def test_both_are_made_of_one_reading_at_every_update() -> None:
    source, reads = counted(torch.randn(256, 256))
    pair = fp8.quantised(source, (128, 128))

    for update in (1, 2):
        for part in pair:
            part.read()
        assert len(reads) == update


def test_nothing_is_kept_after_both_were_read() -> None:
    source, reads = counted(torch.randn(256, 256))
    scales, value = fp8.quantised(source, (128, 128))
    scales.read()
    first, second = value.read(), value.read()

    assert bits(first) == bits(second)
    assert len(reads) == 2


def test_only_one_of_the_two_is_announced_to_other_ranks() -> None:
    turn = Turn(3, lambda _: None)
    source, _ = counted(torch.randn(256, 256), turn)

    scales, value = fp8.quantised(source, (128, 128))

    assert (scales.turn, value.turn) == (turn, None)
    with pytest.raises(RuntimeError, match="before its scales"):
        value.read()


def test_what_is_no_matrix_is_refused_by_name() -> None:
    spec = TensorSpec("a.o_proj.weight", torch.float32, (2, 2, 2))

    with pytest.raises(ConfigurationError, match=r"'a\.o_proj\.weight' of shape \(2, 2, 2\)"):
        fp8.quantised(Weight(spec, torch.device("cpu"), lambda: torch.zeros(2, 2, 2)), (2, 2))


@pytest.mark.parametrize("limit", [1, 1 << 20])
def test_the_packer_sends_the_bytes_of_both(limit: int) -> None:
    (source,) = extract_weights({"a.o_proj.weight": torch.randn(256, 256)})
    pair = fp8.quantised(source, (128, 128))
    (bucket,) = plan_buckets(pair, limit).buckets

    (buffer,) = BucketPacker(torch.device("cpu")).pack(bucket).tensors

    quantised, scales = fp8.block_quantised(source.read(), (128, 128))
    assert buffer.tolist() == bits(scales) + bits(quantised)
