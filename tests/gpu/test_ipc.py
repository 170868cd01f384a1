"""CUDA IPC: the trainer and a reference engine on one GPU, in two processes.

Run it where a GPU is: ``pytest tests/gpu/test_ipc.py``. Elsewhere it is skipped.
"""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import pytest
import torch

from tests.gpu.models import generated, greedy, llama
from weight_update import EngineState, SGLangWeightSender, SGLangWeightSyncScheme, WeightUpdateError
from weight_update.reference_engine import Fault, ReferenceEngine

pytestmark = pytest.mark.skipif(torch.cuda.device_count() < 1, reason="needs a GPU")

UPDATE = "/update_weights_from_tensor"
FORMATS = ({}, {"bucket_bytes": 50_000}, {"load_format": "tensors"})


@pytest.fixture(autouse=True)
def nothing_of_earlier_tests() -> None:
    """What they left must not be freed while this one counts."""
    gc.collect()


@pytest.fixture(scope="module")
def models() -> tuple[Any, Any]:
    both = llama(0).cuda(), llama(1).cuda()
    greedy(both[0])  # cuBLAS takes 32 MiB when it is first used, which no test must count
    return both


@pytest.fixture
def engine() -> Iterator[ReferenceEngine]:
    with ReferenceEngine(llama(0), device="cuda:0") as engine:
        yield engine


@contextmanager
def sender_of(engine: ReferenceEngine, **settings: Any) -> Iterator[SGLangWeightSender]:
    scheme = SGLangWeightSyncScheme(engine.url, transport="ipc", timeout=60, **settings)
    with scheme.create_sender() as sender:
        yield sender


def addresses(engine: ReferenceEngine) -> Any:
    return engine.call("GET", "/_reference/weights")["ranks"][0]["addresses"]


def open_files(pid: int | str) -> int:
    """How many files a process has open, less its sockets: HTTP connections come and go."""
    folder, count = f"/proc/{pid}/fd", 0
    for name in os.listdir(folder):
        with suppress(FileNotFoundError):  # it was closed meanwhile
            count += not os.readlink(f"{folder}/{name}").startswith("socket:")
    return count


def held(engine: ReferenceEngine) -> dict[str, Any]:
    """What both processes hold of what could grow."""
    torch.cuda.synchronize()
    return {
        "memory": torch.cuda.memory_allocated(),
        "files": open_files("self"),
        "engine's files": open_files(engine.pid),
        "shared files": sorted(n for n in os.listdir("/dev/shm") if n.startswith("torch_")),
    }


@pytest.mark.parametrize("settings", FORMATS, ids=str)
def test_a_hundred_updates_bring_the_values_and_nothing_grows(
    engine: ReferenceEngine, models: tuple[Any, Any], settings: dict[str, Any]
) -> None:
    outputs = [greedy(model) for model in models]
    places = addresses(engine)
    with sender_of(engine, **settings) as sender:
        for index in range(4):
            sender.update_weights(models[index % 2])
        before = held(engine)
        for index in range(100):
            report = sender.update_weights(models[index % 2])
            assert generated(engine) == outputs[index % 2]
        print(report)
        assert held(engine) == before
        assert report.route is not None
        assert report.route.backend == "cuda ipc"
    assert addresses(engine) == places


@pytest.mark.parametrize("settings", FORMATS, ids=str)
def test_an_engine_that_was_killed_opens_the_same_memory_when_it_is_back(
    engine: ReferenceEngine, models: tuple[Any, Any], settings: dict[str, Any]
) -> None:
    with sender_of(engine, **settings) as sender:
        sender.update_weights(models[1])
        before = torch.cuda.memory_allocated()
        for index in range(3):
            os.kill(engine.pid, signal.SIGKILL)
            with pytest.raises(WeightUpdateError):
                sender.update_weights(models[index % 2])
            engine.restart()
            sender.update_weights(models[index % 2])
            assert generated(engine) == greedy(models[index % 2])
        torch.cuda.synchronize()
        assert torch.cuda.memory_allocated() == before


def test_memory_that_was_never_opened_is_freed(
    engine: ReferenceEngine, models: tuple[Any, Any]
) -> None:
    """torch would keep it for an opener that never comes."""
    before = torch.cuda.memory_allocated()
    engine.inject(Fault(UPDATE, "refuse", times=1))
    with sender_of(engine) as sender, pytest.raises(WeightUpdateError):
        sender.update_weights({"x": torch.zeros(64 << 20, dtype=torch.uint8, device="cuda")})
    gc.collect()  # the error, its traceback, and the weights in it
    torch.cuda.synchronize()
    assert torch.cuda.memory_allocated() - before < 1 << 20


def test_what_was_just_written_in_place_arrives(
    engine: ReferenceEngine, models: tuple[Any, Any]
) -> None:
    """The engine opens memory while the trainer's own kernels may still be queued."""
    model = llama(0).cuda()
    with sender_of(engine, load_format="tensors") as sender, torch.no_grad():
        sender.update_weights(model)
        torch.cuda._sleep(10**8)
        for ours, theirs in zip(model.parameters(), models[1].parameters(), strict=True):
            ours.copy_(theirs)
        report = sender.update_weights(model)
    assert generated(engine) == greedy(models[1])
    assert report.buckets == 1


def test_what_cannot_be_read_where_it_lies_is_copied(
    engine: ReferenceEngine, models: tuple[Any, Any]
) -> None:
    weights = {
        name: value.mT.contiguous().mT if value.dim() == 2 else value
        for name, value in models[1].state_dict().items()
    }
    with sender_of(engine, load_format="tensors") as sender:
        sender.update_weights(weights)
        sender.update_weights(weights)
    assert generated(engine) == greedy(models[1])


def test_a_model_on_the_cpu_goes_through_shared_memory_into_an_engine_on_the_gpu(
    engine: ReferenceEngine, models: tuple[Any, Any]
) -> None:
    with sender_of(engine) as sender:
        report = sender.update_weights(llama(1))
    assert report.route is not None
    assert report.route.backend == "shared memory"
    assert report.engines[engine.url].state is EngineState.NEW
    assert generated(engine) == greedy(models[1])


def test_buffers_stay_below_the_cap_and_the_engine_needs_nothing_more(
    engine: ReferenceEngine,
) -> None:
    gigabyte = 1 << 30
    big = {f"x.{i}": torch.empty(gigabyte, dtype=torch.uint8, device="cuda") for i in range(6)}
    if torch.cuda.mem_get_info()[0] < 8 * gigabyte:
        pytest.skip("needs 8 GiB more")
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    with sender_of(engine, verify="off") as sender:
        engine.call("GET", "/_reference/weights")
        report = sender.update_weights(big)
        assert torch.cuda.max_memory_allocated() - before <= 4 * gigabyte + (1 << 20)
        looked = engine.call("GET", "/_reference/weights")["ranks"][0]
        assert looked["peak_bytes"] - looked["held_bytes"] < 1 << 20
    assert report.buckets == 3
    assert torch.cuda.memory_allocated() == before


@pytest.mark.parametrize("visible", [False, True], ids=["kept", "expandable"])
def test_it_works_with_the_allocator_that_the_trainer_uses(visible: bool) -> None:
    """Expandable segments are shared by other means than a CUDA IPC handle."""
    settings = "expandable_segments:True" if visible else ""
    program = (
        "from tests.gpu.test_ipc import *\n"
        "with ReferenceEngine(llama(0), device='cuda:0') as engine, sender_of(engine) as sender:\n"
        "    print(sender.update_weights(llama(1).cuda()))\n"
        "    assert generated(engine) == greedy(llama(1).cuda())\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "PYTORCH_CUDA_ALLOC_CONF": settings},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    print(done.stdout, done.stderr[-3000:])
    assert done.returncode == 0
