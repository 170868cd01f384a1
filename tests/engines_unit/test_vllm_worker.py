"""The gloo backend inside vLLM's workers meets the trainer's group, and gets every bit."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from weight_update.errors import WeightUpdateError
from weight_update.options import UpdateOptions
from weight_update.transports.broadcast import BucketPacker
from weight_update.transports.id_group import IdGroups
from weight_update.vllm_worker.gloo import GlooInitInfo, join_gloo, received
from weight_update.waiting import Deadline, spawn
from weight_update.weights.buckets import plan_buckets
from weight_update.weights.extract import extract_weights

SECONDS = 60.0
WEIGHTS = {
    "a.weight": torch.randn(3, 5),
    "half": torch.randn(7).bfloat16(),
    "scalar": torch.tensor(2.5),
    "numbers": torch.arange(5),
}


@pytest.fixture
def group() -> Iterator[object]:
    options = UpdateOptions(master_address="127.0.0.1")
    made = IdGroups().open_group(["http://127.0.0.1:1"], options, 2, torch.device("cpu"))
    yield made
    made.give_up()


@pytest.mark.parametrize("packed", [True, False], ids=["packed", "one broadcast a tensor"])
def test_every_bit_of_a_bucket_arrives(group, packed: bool) -> None:
    info = GlooInitInfo(
        master_address=group.address,
        master_port=group.port,
        rank_offset=1,
        world_size=2,
        group_name=group.name,
        packed=packed,
    )
    worker = spawn(join_gloo, info, 1)
    spawn(group.join).result(SECONDS)
    packer = BucketPacker(torch.device("cpu"), "flattened_bucket" if packed else "tensors")
    (bucket,) = plan_buckets(extract_weights(WEIGHTS), 1 << 20, lambda _: packed).buckets
    announced = [(spec.name, spec.dtype, spec.shape) for spec in bucket.specs]
    joined = worker.result(SECONDS)
    arriving = spawn(lambda: [p for b in received(joined, announced, packed=packed) for p in b])
    group.broadcast(packer.pack(bucket).tensors)

    arrived = dict(arriving.result(SECONDS))
    assert arrived.keys() == WEIGHTS.keys()
    for name, value in WEIGHTS.items():
        assert arrived[name].dtype == value.dtype
        assert torch.equal(arrived[name], value)


def test_a_group_that_was_given_up_has_no_id(group) -> None:
    group.give_up()
    with pytest.raises(WeightUpdateError, match="given up"):
        group.unique_id(Deadline(SECONDS))


def test_a_group_that_is_not_known_has_no_id() -> None:
    with pytest.raises(WeightUpdateError, match="no group"):
        IdGroups().unique_id("nobody's", Deadline(1.0))
