"""The packer: bytes on the wire are the logical values, whatever the strides (C34, C26, C52)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from weight_update.errors import WeightMismatchError
from weight_update.options import LoadFormat
from weight_update.transports.broadcast import BucketPacker
from weight_update.weights.buckets import Bucket, plan_buckets
from weight_update.weights.cargo import Terms
from weight_update.weights.extract import extract_weights
from weight_update.weights.specs import TensorSpec, Weight

CPU = torch.device("cpu")
DTYPES = (
    torch.float64,
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.int64,
    torch.int32,
    torch.uint8,
    torch.bool,
    torch.complex64,
)
VIEWS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "plain": lambda t: t,
    "transposed": lambda t: t.mT if t.dim() >= 2 else t,
    "strided": lambda t: t[::2] if t.dim() else t,
    "sliced": lambda t: t[..., 1:] if t.dim() else t,
    "expanded": lambda t: t.unsqueeze(0).expand(3, *t.shape),
    "permuted": lambda t: t.permute(tuple(reversed(range(t.dim())))),
}


def random_tensor(dtype: torch.dtype, shape: tuple[int, ...], seed: int) -> torch.Tensor:
    """Random bits, NaNs and infinities included."""
    generator = torch.Generator().manual_seed(seed)
    top = 2 if dtype == torch.bool else 256
    count = torch.Size(shape).numel() * dtype.itemsize
    raw = torch.randint(0, top, (count,), generator=generator, dtype=torch.uint8)
    return raw.view(dtype).view(shape)


def bits(tensor: torch.Tensor) -> bytes:
    dense = tensor.clone(memory_format=torch.contiguous_format).flatten()
    return (
        torch.empty(dense.shape, dtype=dense.dtype).copy_(dense).view(torch.uint8).numpy().tobytes()
    )


def in_one_bucket(tensors: dict[str, torch.Tensor]) -> Bucket:
    (bucket,) = plan_buckets(extract_weights(tensors), 1 << 40).buckets
    return bucket


def unpacked(buffer: torch.Tensor, bucket: Bucket) -> dict[str, torch.Tensor]:
    """The values that an engine cuts out of a flat buffer, by the announced specs."""
    values, offset = {}, 0
    for spec in bucket.specs:
        end = offset + spec.nbytes
        values[spec.name] = buffer[offset:end].view(spec.dtype).view(spec.shape)
        offset = end
    assert offset == buffer.numel()
    return values


@st.composite
def tensor_dicts(draw: st.DrawFn) -> dict[str, torch.Tensor]:
    shapes = st.lists(st.integers(0, 4), max_size=3).map(tuple)
    kinds = st.tuples(
        st.sampled_from(DTYPES), shapes, st.sampled_from(sorted(VIEWS)), st.integers(0, 99)
    )
    return {
        f"w{i}": VIEWS[view](random_tensor(dtype, shape, seed))
        for i, (dtype, shape, view, seed) in enumerate(
            draw(st.lists(kinds, min_size=1, max_size=6))
        )
    }


@given(tensor_dicts())
def test_a_flat_bucket_cut_by_its_specs_gives_back_the_logical_values(
    tensors: dict[str, torch.Tensor],
) -> None:
    bucket = in_one_bucket(tensors)

    (buffer,) = BucketPacker(CPU).pack(bucket).tensors

    got = unpacked(buffer, bucket)
    assert got.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert got[name].dtype == tensor.dtype
        assert got[name].shape == tensor.shape
        assert bits(got[name]) == bits(tensor)


@given(tensor_dicts())
def test_a_flat_bucket_is_the_bytes_of_each_contiguous_tensor_in_wire_order(
    tensors: dict[str, torch.Tensor],
) -> None:
    bucket = in_one_bucket(tensors)

    (buffer,) = BucketPacker(CPU).pack(bucket).tensors

    assert buffer.dtype == torch.uint8
    assert bits(buffer) == b"".join(bits(tensors[spec.name]) for spec in bucket.specs)


@given(tensor_dicts())
def test_single_tensors_are_contiguous_and_hold_the_logical_values(
    tensors: dict[str, torch.Tensor],
) -> None:
    bucket = in_one_bucket(tensors)

    sent = BucketPacker(CPU).pack(replace(bucket, flat=False)).tensors

    assert [bits(t) for t in sent] == [bits(tensors[spec.name]) for spec in bucket.specs]
    assert all(t.is_contiguous() for t in sent)
    assert [tuple(t.shape) for t in sent] == [spec.shape for spec in bucket.specs]


@settings(max_examples=40)
@given(st.lists(tensor_dicts(), min_size=2, max_size=4))
def test_a_bucket_stays_whole_while_the_next_is_packed(
    buckets: list[dict[str, torch.Tensor]],
) -> None:
    packer = BucketPacker(CPU)
    travelling, expected = None, b""
    for tensors in buckets:
        bucket = in_one_bucket(tensors)
        (packed,) = packer.pack(bucket).tensors
        if travelling is not None:
            assert bits(travelling) == expected
        travelling, expected = packed, bits(packed.clone())


def test_two_buffers_serve_any_number_of_buckets() -> None:
    packer = BucketPacker(CPU)
    buckets = [in_one_bucket({"w": torch.full((64,), float(i))}) for i in range(10)]

    addresses = [packer.pack(bucket).tensors[0].data_ptr() for bucket in buckets]

    assert len(set(addresses)) == 2
    assert all(a != b for a, b in pairwise(addresses))


def test_buffers_are_made_for_the_largest_bucket_at_once() -> None:
    tensors = {f"w{i}": torch.zeros(size) for i, size in enumerate((10, 20, 30, 40))}
    plan = plan_buckets(extract_weights(tensors), 1)
    packer = BucketPacker(CPU)
    packer.reserve(plan)

    addresses = [packer.pack(bucket).tensors[0].data_ptr() for bucket in plan.buckets]

    assert addresses == [*addresses[:2], *addresses[:2]]
    assert [buffer.numel() for buffer in packer._buffers] == [160, 160]


def test_without_packed_buckets_no_buffer_is_made() -> None:
    plan = plan_buckets(extract_weights({"w": torch.zeros(10)}), 1 << 20, lambda _: False)
    packer = BucketPacker(CPU)
    packer.reserve(plan)
    packer.pack(plan.buckets[0])

    assert [buffer.numel() for buffer in packer._buffers] == [0, 0]


LARGE, SMALL = (1 << 20,), (64,)
F32, F8 = torch.float32, torch.float8_e4m3fn


@pytest.mark.parametrize(
    ("load_format", "device", "dtype", "shape", "packed"),
    [
        ("auto", "cpu", F32, LARGE, False),
        ("auto", "cpu", F32, SMALL, True),
        ("auto", "cpu", F8, LARGE, True),  # gloo cannot broadcast it
        ("auto", "cuda", F32, LARGE, True),
        ("auto", "cuda", F32, SMALL, True),
        ("flattened_bucket", "cpu", F32, LARGE, True),
        ("flattened_bucket", "cuda", F32, LARGE, True),
        ("tensors", "cpu", F32, SMALL, False),
        ("tensors", "cuda", F32, SMALL, False),
    ],
)
def test_what_is_packed_follows_from_format_device_size_and_dtype(
    load_format: LoadFormat, device: str, dtype: torch.dtype, shape: tuple[int], packed: bool
) -> None:
    # No buffer is made before it is needed, so a GPU can be named without having one.
    packer = BucketPacker(torch.device("meta"), load_format)
    packer.device = torch.device(device)

    assert packer.format(None, Terms()).packs(TensorSpec("w", dtype, shape)) is packed


@pytest.mark.parametrize("count", [3, 4000])
def test_runs_of_small_tensors_are_the_same_bytes(count: int) -> None:
    tensors = {f"w{i}": torch.full((500,), float(i)) for i in range(count)}
    bucket = in_one_bucket(tensors)

    (buffer,) = BucketPacker(CPU).pack(bucket).tensors

    assert bits(buffer) == b"".join(bits(tensor) for tensor in tensors.values())


def test_a_smaller_bucket_travels_in_a_part_of_the_buffer() -> None:
    packer = BucketPacker(CPU)
    for size in (100, 100, 3):
        (buffer,) = packer.pack(in_one_bucket({"w": torch.zeros(size)})).tensors

    assert buffer.numel() == 12


def test_released_buffers_hold_no_memory_and_come_back_when_needed() -> None:
    packer = BucketPacker(CPU)
    bucket = in_one_bucket({"w": torch.arange(1000.0)})
    packer.pack(bucket)

    packer.abandon()
    assert sum(buffer.numel() for buffer in packer._buffers) == 0

    assert bits(packer.pack(bucket).tensors[0]) == bits(torch.arange(1000.0))


@pytest.mark.parametrize("flat", [True, False])
def test_every_value_is_read_exactly_once(flat: bool) -> None:
    reads: list[str] = []

    def weight(name: str) -> Weight:
        def read() -> torch.Tensor:
            reads.append(name)
            return torch.ones(2)

        return Weight(TensorSpec(name, torch.float32, (2,)), CPU, read)

    BucketPacker(CPU).pack(Bucket((weight("a"), weight("b")), flat=flat))

    assert reads == ["a", "b"]


@pytest.mark.parametrize("flat", [True, False])
@pytest.mark.parametrize(
    "now",
    [
        torch.zeros(2, 3, dtype=torch.bfloat16),
        torch.zeros(3, 2),
        torch.zeros(6),
        torch.zeros(1, 3),
        torch.zeros(3),
        torch.zeros(0),
    ],
    ids=["dtype", "transposed", "flattened", "broadcastable", "fewer", "empty"],
)
def test_a_value_that_is_not_as_announced_is_never_packed(flat: bool, now: torch.Tensor) -> None:
    weight = Weight(TensorSpec("model.norm.weight", torch.float32, (2, 3)), CPU, lambda: now)

    with pytest.raises(WeightMismatchError, match=r"'model\.norm\.weight' was announced") as caught:
        BucketPacker(CPU).pack(Bucket((weight,), flat=flat))

    assert caught.value.phase == "transfer"
    assert str(tuple(now.shape)) in str(caught.value)


def test_a_flat_bucket_does_not_follow_the_model_once_it_is_packed() -> None:
    model = torch.nn.Linear(2, 2)
    (bucket,) = plan_buckets(extract_weights(model), 1 << 20).buckets
    (buffer,) = BucketPacker(CPU).pack(bucket).tensors
    before = bits(buffer)

    with torch.no_grad():
        model.weight.add_(1.0)

    assert bits(buffer) == before


def test_twenty_tensors_under_a_cap_of_two_need_two_caps_of_memory() -> None:
    packer = BucketPacker(CPU)
    tensors = {f"w{i}": torch.zeros(100) for i in range(20)}

    for bucket in plan_buckets(extract_weights(tensors), 800).buckets:
        packer.pack(bucket)

    assert sum(buffer.numel() for buffer in packer._buffers) == 2 * 800
