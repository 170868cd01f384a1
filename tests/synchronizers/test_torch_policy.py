"""A PyTorch trainer as a policy: what it sends, what it moves out of the way, what is free."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from tests.integration import kit
from weight_update import ConfigurationError, WeightUpdateError
from weight_update.synchronizers.facades import optimizer_state
from weight_update.synchronizers.facades.optimizer_state import OptimizerState
from weight_update.synchronizers.facades.torch_policy import TorchPolicy, free_host_bytes
from weight_update.weights.stream import Stream


@pytest.fixture
def group() -> Iterator[None]:
    """A training group of one rank."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def own_llama(seed: int = 0) -> Any:
    return copy.deepcopy(kit.llama(seed))


# ---- what it sends


def shapes(model: nn.Module) -> dict[str, Any]:
    return {name: (tuple(p.shape), p.dtype) for name, p in model.named_parameters()}


def test_it_tells_shape_and_dtype_of_everything_that_it_sends():
    assert TorchPolicy(kit.llama(0)).prepare_refit_info() == shapes(kit.llama(0))


def test_of_adapters_it_tells_the_merged_weights():
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False)
    model = peft.get_peft_model(own_llama(), config)

    assert TorchPolicy(model).prepare_refit_info() == shapes(kit.llama(0))


@pytest.mark.usefixtures("group")
def test_behind_ddp_it_tells_the_bare_names():
    model = nn.parallel.DistributedDataParallel(own_llama())

    assert TorchPolicy(model).prepare_refit_info() == shapes(kit.llama(0))


@pytest.mark.usefixtures("group")
def test_of_shards_it_tells_the_whole_shapes():
    model = fully_shard(own_llama(), mesh=init_device_mesh("cpu", (1,)))

    assert TorchPolicy(model).prepare_refit_info() == shapes(kit.llama(0))


def test_of_a_stream_it_cannot_tell_beforehand():
    policy = TorchPolicy(lambda: Stream(iter([("a", torch.ones(1))]), whole=True))

    assert policy.prepare_refit_info() is None


def test_a_function_is_asked_at_every_update():
    given = iter([{"a": torch.ones(1)}, {"b": torch.ones(1)}])
    policy = TorchPolicy(lambda: next(given))

    assert [list(policy.source()), list(policy.source())] == [["a"], ["b"]]


@pytest.mark.parametrize("model", [None, {"a": torch.ones(1)}, nn.Linear, nn.ReLU()])
def test_what_holds_no_weights_is_refused(model: Any):
    with pytest.raises(ConfigurationError):
        TorchPolicy(model)


def test_an_optimizer_without_state_is_refused():
    with pytest.raises(ConfigurationError, match="int has no optimizer's state"):
        TorchPolicy(nn.Linear(1, 1), 5)


@pytest.mark.parametrize(("given", "told"), [(None, {}), ({"a": 1}, {"a": 1})])
def test_it_may_have_a_configuration(given: Any, told: Any):
    assert TorchPolicy(nn.Linear(1, 1), cfg=given).cfg == told


# ---- what it moves out of the way; the CPU stands for a GPU here


class Trained:
    """A model, an optimizer with some steps behind it, and its state as if it were on a GPU."""

    def __init__(self, kind: Any = torch.optim.AdamW, **options: Any) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
        self.optimizer = kind(self.model.parameters(), **{"lr": 0.1, **options})
        self.state = OptimizerState(self.optimizer, self.model, {"cpu"})
        self.losses = [self.step() for _ in range(2)]

    def step(self) -> float:
        def loss() -> torch.Tensor:
            self.optimizer.zero_grad()
            made = self.model(torch.ones(3, 4)).square().sum()
            made.backward()
            return made

        return self.optimizer.step(loss).item()

    def tensors(self) -> list[torch.Tensor]:
        return tensors_in(self.optimizer.state)


def tensors_in(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    inner = value.values() if isinstance(value, dict) else value
    nested = isinstance(value, (dict, list, tuple))
    return [tensor for one in inner for tensor in tensors_in(one)] if nested else []


KINDS = [
    pytest.param(torch.optim.AdamW, {}, id="AdamW"),
    pytest.param(torch.optim.AdamW, {"fused": True}, id="AdamW, fused"),
    pytest.param(torch.optim.SGD, {"momentum": 0.9}, id="SGD with momentum"),
    pytest.param(torch.optim.LBFGS, {}, id="LBFGS, lists in its state"),
    pytest.param(torch.optim.Adafactor, {}, id="Adafactor"),
]


@pytest.mark.parametrize(("kind", "options"), KINDS)
def test_the_state_is_given_up_and_comes_back_as_it_was(kind: Any, options: dict[str, Any]):
    trained = Trained(kind, **options)
    before = trained.tensors()
    values = [tensor.clone() for tensor in before]

    trained.state.to_host()
    given_up = [tensor.untyped_storage().nbytes() for tensor in before]
    trained.state.to_devices()

    assert set(given_up) == {0}
    after = trained.tensors()
    assert [id(tensor) for tensor in after] == [id(tensor) for tensor in before]
    for tensor, value in zip(after, values, strict=True):
        assert (tensor.dtype, tensor.device) == (value.dtype, value.device)
        assert torch.equal(tensor, value)


@pytest.mark.parametrize(("kind", "options"), KINDS)
def test_training_goes_on_as_if_nothing_had_happened(kind: Any, options: dict[str, Any]):
    moved, stayed = Trained(kind, **options), Trained(kind, **options)

    moved.state.to_host()
    moved.state.to_devices()

    assert [moved.step() for _ in range(3)] == [stayed.step() for _ in range(3)]


def test_the_weights_stay_readable_meanwhile():
    trained = Trained()
    values = [p.detach().clone() for p in trained.model.parameters()]

    trained.state.to_host()

    assert all(map(torch.equal, trained.model.parameters(), values))


@pytest.mark.parametrize("use", ["step", "state_dict"])
def test_an_optimizer_that_is_used_meanwhile_refuses(use: str):
    trained = Trained()
    trained.state.to_host()

    with pytest.raises(WeightUpdateError, match=r"call offload_after_refit\(\) first"):
        getattr(trained.optimizer, use)()

    trained.state.to_devices()
    getattr(trained.optimizer, use)()


def test_an_optimizer_inside_of_another_is_the_one_that_is_moved():
    class Wrapper:
        def __init__(self, optimizer: torch.optim.Optimizer) -> None:
            self.optimizer = optimizer
            self.state = optimizer.state

    trained = Trained()
    TorchPolicy(trained.model, Wrapper(trained.optimizer))
    state = OptimizerState(Wrapper(trained.optimizer), trained.model, {"cpu"})

    state.to_host()
    assert {tensor.untyped_storage().nbytes() for tensor in trained.tensors()} == {0}
    with pytest.raises(WeightUpdateError, match="on the host"):
        trained.optimizer.step()
    state.to_devices()


def test_moving_twice_is_moving_once():
    trained = Trained()
    values = [tensor.clone() for tensor in trained.tensors()]

    for call in (trained.state.to_host, trained.state.to_devices):
        call()
        hosted = trained.state.hosted_bytes
        call()
        assert trained.state.hosted_bytes == hosted

    assert all(map(torch.equal, trained.tensors(), values))


def test_moving_back_what_was_never_moved_changes_nothing():
    trained = Trained()
    values = [tensor.clone() for tensor in trained.tensors()]

    trained.state.to_devices()

    assert all(map(torch.equal, trained.tensors(), values))


def test_state_that_is_a_part_of_the_weights_stays():
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.state[model.weight]["master"] = model.weight.detach()
    optimizer.state[model.weight]["own"] = torch.ones(3)
    state = OptimizerState(optimizer, model, {"cpu"})

    state.to_host()

    assert state.hosted_bytes == 12
    assert model.weight.untyped_storage().nbytes() == 16


def test_views_of_one_buffer_are_views_of_it_afterwards():
    buffer = torch.arange(8.0)
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1)
    first, second = buffer[:4], buffer.view(2, 4).t()
    optimizer.state["somebody"] = {"a": first, "b": [second, {"again": first}]}
    state = OptimizerState(optimizer, None, {"cpu"})

    state.to_host()
    assert state.hosted_bytes == 32
    state.to_devices()
    buffer += 1

    assert torch.equal(first, torch.arange(1.0, 5.0))
    assert torch.equal(second, torch.arange(1.0, 9.0).view(2, 4).t())


@pytest.mark.usefixtures("group")
def test_the_local_parts_of_sharded_state_are_moved():
    model = fully_shard(nn.Linear(4, 4), mesh=init_device_mesh("cpu", (1,)))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    moments = [m for s in optimizer.state.values() for m in s.values() if isinstance(m, DTensor)]
    values = [moment.to_local().clone() for moment in moments]
    state = OptimizerState(optimizer, model, {"cpu"})

    state.to_host()
    assert {moment.to_local().untyped_storage().nbytes() for moment in moments} == {0}
    state.to_devices()

    assert len(moments) == 4
    assert all(torch.equal(m.to_local(), v) for m, v in zip(moments, values, strict=True))


def fail_at(number: int) -> Any:
    """A function that does nothing but count, and fails once."""
    calls = iter(range(1000))

    def count() -> None:
        if next(calls) == number:
            raise RuntimeError("out of memory")

    return count


def test_a_host_that_is_full_leaves_everything_where_it_was(monkeypatch: pytest.MonkeyPatch):
    trained = Trained()
    values = [tensor.clone() for tensor in trained.tensors()]
    count, make = fail_at(2), optimizer_state._Hosted.copied
    monkeypatch.setattr(
        optimizer_state._Hosted, "copied", lambda storage: (count(), make(storage))[1]
    )

    with pytest.raises(WeightUpdateError, match="out of memory") as caught:
        trained.state.to_host()

    assert "as much free memory" in str(caught.value)
    assert all(map(torch.equal, trained.tensors(), values))
    trained.state.to_host()
    trained.state.to_devices()
    assert all(map(torch.equal, trained.tensors(), values))


def test_a_gpu_that_is_full_loses_nothing_and_can_be_tried_again(monkeypatch: pytest.MonkeyPatch):
    trained = Trained()
    values = [tensor.clone() for tensor in trained.tensors()]
    trained.state.to_host()
    count, restore = fail_at(2), optimizer_state._Hosted.restore
    monkeypatch.setattr(optimizer_state._Hosted, "restore", lambda one: (count(), restore(one)))

    with pytest.raises(WeightUpdateError, match=r"offload_after_refit\(\) again"):
        trained.state.to_devices()
    assert {tensor.untyped_storage().nbytes() for tensor in trained.tensors()} == {0}
    trained.state.to_host()
    trained.state.to_devices()

    assert all(map(torch.equal, trained.tensors(), values))


def test_without_a_gpu_offloading_moves_nothing():
    trained = Trained()
    policy = TorchPolicy(trained.model, trained.optimizer)
    places = [tensor.data_ptr() for tensor in trained.tensors()]

    policy.offload_before_refit()
    during = [tensor.data_ptr() for tensor in trained.tensors()]
    policy.offload_after_refit()

    assert places == during == [tensor.data_ptr() for tensor in trained.tensors()]


def test_a_trainer_without_an_optimizer_has_nothing_to_move():
    policy = TorchPolicy(nn.Linear(1, 1))

    policy.offload_before_refit()
    policy.offload_after_refit()


# ---- what is free


GIB = 1 << 30


def host(root: Path, available: int, **cgroup: Any) -> Path:
    """The files of a host that has so much available, in a container with a bound."""
    (root / "proc").mkdir()
    (root / "proc/meminfo").write_text(f"MemTotal: 9 kB\nMemAvailable: {available >> 10} kB\n")
    folder = root / "sys/fs/cgroup"
    folder.mkdir(parents=True)
    for name, text in cgroup.items():
        (folder / f"memory.{name}").write_text(f"{text}\n")
    return root


BOUNDS = [
    pytest.param({}, 8 * GIB, id="no container"),
    pytest.param({"max": "max", "current": 5 * GIB, "stat": "anon 1"}, 8 * GIB, id="no bound"),
    pytest.param(
        {"max": 6 * GIB, "current": 5 * GIB, "stat": f"anon 1\ninactive_file {GIB}"},
        2 * GIB,
        id="a bound, and files that could be dropped",
    ),
    pytest.param({"max": 100 * GIB, "current": GIB, "stat": ""}, 8 * GIB, id="a bound above all"),
    pytest.param({"max": GIB, "current": 2 * GIB, "stat": ""}, 0, id="a bound that is exceeded"),
]


@pytest.mark.parametrize(("cgroup", "free"), BOUNDS)
def test_the_hosts_free_memory_is_what_a_container_leaves_of_it(
    tmp_path: Path, cgroup: dict[str, Any], free: int
):
    assert free_host_bytes(host(tmp_path, 8 * GIB, **cgroup)) == free


def test_a_trainer_without_a_gpu_counts_the_hosts_memory():
    free = TorchPolicy(nn.Linear(1, 1)).get_free_memory_bytes()

    assert 1 << 20 < free < 1 << 50
