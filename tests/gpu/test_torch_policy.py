"""A trainer on a GPU that moves its optimizer's state to the host and back.

Run it where a GPU is: ``pytest tests/gpu/test_torch_policy.py``. Elsewhere it is skipped.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from weight_update.synchronizers import TorchPolicy

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

MIB = 1 << 20
WIDTH = 2048


@pytest.fixture(autouse=True)
def memory_of_its_own() -> None:
    """Nothing lies beside what earlier tests left: torch gives back what is free as a whole."""
    gc.collect()
    torch.cuda.empty_cache()


class Trained:
    """A model on the GPU and an optimizer with two steps behind it."""

    def __init__(self, kind: Any = torch.optim.AdamW, shard: bool = False, **options: Any) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 1)).cuda()
        if shard:
            fully_shard(self.model, mesh=init_device_mesh("cuda", (1,)))
        self.optimizer = kind(self.model.parameters(), **{"lr": 1e-3, **options})
        self.policy = TorchPolicy(self.model, self.optimizer)
        self.losses = [self.step() for _ in range(2)]

    def step(self) -> float:
        self.optimizer.zero_grad()
        loss = self.model(torch.ones(2, WIDTH, device="cuda")).square().sum()
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.item()

    def tensors(self) -> list[torch.Tensor]:
        found = [t for state in self.optimizer.state.values() for t in state.values()]
        return [t.to_local() if isinstance(t, DTensor) else t for t in found]


@pytest.fixture
def group() -> Iterator[None]:
    """A training group of one rank."""
    distributed.init_process_group("nccl", store=distributed.HashStore(), rank=0, world_size=1)
    yield
    distributed.destroy_process_group()


KINDS = [
    pytest.param({}, id="AdamW"),
    pytest.param({"fused": True}, id="fused, its step counters on the GPU"),
    pytest.param({"capturable": True, "foreach": True}, id="capturable"),
]


@pytest.mark.parametrize("options", KINDS)
def test_the_state_is_on_the_host_meanwhile_and_comes_back_as_it_was(options: dict[str, Any]):
    trained = Trained(**options)
    before = [(t, t.device, t.dtype, t.clone()) for t in trained.tensors()]
    held = torch.cuda.memory_allocated()
    free, _ = torch.cuda.mem_get_info()

    trained.policy.offload_before_refit()
    freed = held - torch.cuda.memory_allocated()
    given_back = torch.cuda.mem_get_info()[0] - free
    trained.policy.offload_after_refit()

    assert freed >= 2 * 4 * WIDTH * WIDTH
    assert given_back >= 2 * 4 * WIDTH * WIDTH
    assert torch.cuda.memory_allocated() == held
    for tensor, device, dtype, value in before:
        assert (tensor.device, tensor.dtype) == (device, dtype)
        assert torch.equal(tensor, value)


@pytest.mark.parametrize("options", KINDS)
def test_training_goes_on_as_if_nothing_had_happened(options: dict[str, Any]):
    moved, stayed = Trained(**options), Trained(**options)

    for _ in range(2):
        moved.policy.offload_before_refit()
        moved.policy.offload_after_refit()
        assert moved.step() == stayed.step()


@pytest.mark.usefixtures("group")
def test_the_local_parts_of_sharded_state_are_moved():
    trained = Trained(shard=True)
    values = [tensor.clone() for tensor in trained.tensors()]
    held = torch.cuda.memory_allocated()

    trained.policy.offload_before_refit()
    assert held - torch.cuda.memory_allocated() >= 2 * 4 * WIDTH * WIDTH
    trained.policy.offload_after_refit()

    assert all(map(torch.equal, trained.tensors(), values))
    info = trained.policy.prepare_refit_info() or {}
    assert info["0.weight"] == ((WIDTH, WIDTH), torch.float32)


def test_the_weights_can_be_read_meanwhile():
    trained = Trained()
    values = [parameter.detach().clone() for parameter in trained.model.parameters()]

    trained.policy.offload_before_refit()

    assert all(map(torch.equal, trained.model.parameters(), values))
    trained.policy.offload_after_refit()


def test_it_waits_on_the_host_in_pinned_memory():
    trained = Trained()
    trained.policy.offload_before_refit()

    hosted = trained.policy._state._hosted
    assert {one.copy.device.type for one in hosted} == {"cpu"}
    assert all(one.copy.is_pinned() for one in hosted)
    trained.policy.offload_after_refit()


def test_a_gpu_that_is_full_loses_nothing_and_can_be_tried_again():
    trained = Trained()
    values = [tensor.clone() for tensor in trained.tensors()]
    trained.policy.offload_before_refit()
    torch.cuda.set_per_process_memory_fraction(1e-6)  # whatever other processes hold
    try:
        with pytest.raises(RuntimeError, match=r"offload_after_refit\(\) again"):
            trained.policy.offload_after_refit()
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)

    trained.policy.offload_after_refit()

    assert all(map(torch.equal, trained.tensors(), values))


def test_what_is_free_is_what_the_driver_and_torch_have_left():
    policy = TorchPolicy(nn.Linear(1, 1).cuda())
    torch.cuda.empty_cache()
    before = policy.get_free_memory_bytes()

    held = torch.empty(512 * MIB, dtype=torch.uint8, device="cuda")
    during = policy.get_free_memory_bytes()
    del held  # torch keeps it, and it may be used all the same
    after = policy.get_free_memory_bytes()

    assert before - during >= 400 * MIB
    assert after - during >= 400 * MIB
    assert before <= torch.cuda.mem_get_info()[1]
