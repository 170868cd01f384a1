"""Packing runs on a stream of its own, in order with the caller's, and takes no fresh memory."""

from __future__ import annotations

from contextlib import contextmanager, suppress
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from weight_update.transports.broadcast import BucketPacker
from weight_update.transports.packing import SideStream
from weight_update.weights.buckets import plan_buckets
from weight_update.weights.extract import extract_weights

CPU = torch.device("cpu")


class FakeStream:
    """Writes down what it is told."""

    def __init__(self, name: str, log: list[str]) -> None:
        self.name = name
        self._log = log

    def wait_stream(self, other: FakeStream) -> None:
        self._log.append(f"{self.name} waits for {other.name}")


class FakeCuda:
    """Stands for ``torch.cuda``; it cannot synchronise anything."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.made = 0
        self._current = FakeStream("caller", self.log)

    def current_stream(self, device: torch.device) -> FakeStream:
        return self._current

    def Stream(self, device: torch.device) -> FakeStream:
        self.made += 1
        return FakeStream("side", self.log)

    @contextmanager
    def stream(self, stream: FakeStream) -> Any:
        before, self._current = self._current, stream
        yield
        self._current = before


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    fake = FakeCuda()
    monkeypatch.setattr(torch, "cuda", fake)
    return fake


def test_packing_begins_after_the_callers_work_and_the_callers_next_work_after_packing(
    cuda: FakeCuda,
) -> None:
    with SideStream(torch.device("cuda")).running():
        cuda.log.append(f"pack on {cuda.current_stream(CPU).name}")

    assert cuda.log == ["side waits for caller", "pack on side", "caller waits for side"]


def test_a_pack_that_fails_is_waited_for_too(cuda: FakeCuda) -> None:
    with suppress(ZeroDivisionError), SideStream(torch.device("cuda")).running():
        raise ZeroDivisionError

    assert cuda.log[-1] == "caller waits for side"


def test_a_packer_has_one_stream_for_all_its_packs(cuda: FakeCuda) -> None:
    side = SideStream(torch.device("cuda"))
    for _ in range(3):
        with side.running():
            pass

    assert cuda.made == 1


class Allocations(TorchDispatchMode):
    """Counts the calls that make new memory."""

    def __init__(self) -> None:
        super().__init__()
        self.made: list[str] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        known = {t.untyped_storage().data_ptr() for t in tensors_in([args, kwargs or {}])}
        result = func(*args, **(kwargs or {}))
        fresh = [t for t in tensors_in(result) if t.untyped_storage().data_ptr() not in known]
        self.made += [str(func)] * any(tensor.numel() for tensor in fresh)
        return result


def tensors_in(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, dict):
        value = list(value.values())
    return (
        [t for item in value for t in tensors_in(item)] if isinstance(value, list | tuple) else []
    )


def model(device: torch.device) -> dict[str, torch.Tensor]:
    shapes = {"large": (300, 100), "view": (40, 50), **{f"small{i}": (7, 3) for i in range(50)}}
    tensors = {name: torch.rand(shape, device=device) for name, shape in shapes.items()}
    return {**tensors, "view": tensors["view"].mT}


def test_an_update_after_the_first_takes_no_fresh_memory() -> None:
    packer = BucketPacker(CPU, "flattened_bucket")
    plan = plan_buckets(extract_weights(model(CPU)), 8_000)
    packer.reserve(plan)
    for bucket in plan.buckets:
        packer.pack(bucket)

    with Allocations() as seen:
        for bucket in plan.buckets:
            packer.pack(bucket)

    assert len(plan.buckets) > 2
    assert seen.made == []


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_an_update_after_the_first_takes_no_fresh_memory_of_a_gpu() -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    packer = BucketPacker(device, "flattened_bucket")
    plan = plan_buckets(extract_weights(model(device)), 8_000)
    packer.reserve(plan)
    for bucket in plan.buckets:
        packer.pack(bucket)

    before = torch.cuda.memory_stats(device)["allocation.all.allocated"]
    for bucket in plan.buckets:
        packer.pack(bucket)

    assert torch.cuda.memory_stats(device)["allocation.all.allocated"] == before


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_what_the_caller_has_only_been_asked_for_is_packed_once_it_is_there() -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    value = torch.zeros(1 << 22, device=device)
    (bucket,) = plan_buckets(extract_weights({"w": value}), 1 << 30).buckets
    packer = BucketPacker(device, "flattened_bucket")
    packer.pack(bucket)

    torch.cuda._sleep(50_000_000)
    value.fill_(1.0)
    (buffer,) = packer.pack(bucket).tensors
    value.fill_(2.0)

    assert buffer.view(torch.float32).eq(1.0).all()
