"""The row "SGLang, colocated" over CUDA IPC: trainer and reference engine share one GPU, or two.

Run it where a GPU is: ``pytest tests/gpu/test_synchronizer_colocated.py``. Elsewhere it is skipped.
"""

from __future__ import annotations

import base64
import gc
import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.gpu.models import generated, greedy, llama
from weight_update import EngineState, WeightUpdateError
from weight_update.ports import free_port
from weight_update.reference_engine import Fault, ReferenceEngine
from weight_update.synchronizers import SGLangGeneration, TorchPolicy, create_weight_synchronizer

pytestmark = pytest.mark.skipif(torch.cuda.device_count() < 1, reason="needs a GPU")
two_gpus = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")

UPDATE = "/update_weights_from_tensor"
SCRIPT = Path(__file__).with_name("colocated_trainer.py")
MIB = 1 << 20


class Policy(TorchPolicy):
    """Notes what this process holds of the GPU while an update runs.

    Args:
        seed: Of the model.
        ballast: Elements of a parameter of its own, whose state is worth moving.
    """

    def __init__(self, seed: int, ballast: int = 0) -> None:
        self.model = llama(seed).cuda()
        spare = torch.nn.Parameter(torch.zeros(max(ballast, 1), device="cuda"))
        optimizer = torch.optim.AdamW([*self.model.parameters(), spare])
        spare.sum().backward()
        optimizer.step()
        spare.grad = None
        self.held_during: list[int] = []
        super().__init__(self.model, optimizer)

    def source(self) -> Any:
        torch.cuda.synchronize()
        self.held_during.append(torch.cuda.memory_allocated())
        return super().source()


@pytest.fixture
def engine() -> Iterator[ReferenceEngine]:
    with ReferenceEngine(llama(0), device="cuda:0") as engine:
        yield engine


@contextmanager
def synchronizer(engine: ReferenceEngine, policy: TorchPolicy, **options: Any) -> Iterator[Any]:
    generation = SGLangGeneration(engine.url, timeout=60.0, **options)
    made = create_weight_synchronizer(policy, generation, "sglang", True)
    made.init_communicator()
    yield made
    made.shutdown()


def wrong(engine: ReferenceEngine, model: Any) -> list[str]:
    """Parameters that the engine does not hold bit for bit."""
    answer = engine.call("POST", "/weights_checker", {"action": "checksum"})
    held = answer["ranks"][0]["checksums"]
    wanted = {
        name: hashlib.sha256(value.detach().cpu().contiguous().view(-1).numpy().data).hexdigest()
        for name, value in model.named_parameters()
    }
    return sorted(name for name in wanted if held.get(name) != wanted[name])


def open_files(pid: int | str) -> int:
    """How many files a process has open, less its sockets: HTTP connections come and go."""
    folder, count = f"/proc/{pid}/fd", 0
    for name in os.listdir(folder):
        with suppress(FileNotFoundError):  # it was closed meanwhile
            count += not os.readlink(f"{folder}/{name}").startswith("socket:")
    return count


@pytest.mark.parametrize(
    "options", [{}, {"bucket_bytes": 50_000}, {"load_format": "tensors"}], ids=str
)
def test_the_engine_holds_the_policys_weights_bit_for_bit(
    engine: ReferenceEngine, options: dict[str, Any]
) -> None:
    policy = Policy(1)
    assert wrong(engine, policy.model)
    with synchronizer(engine, policy, **options) as sync:
        sync.sync_weights()
        assert wrong(engine, policy.model) == []
        assert generated(engine) == greedy(policy.model)
        assert sync.report.route.backend == "cuda ipc"
        with torch.no_grad():
            for parameter in policy.model.parameters():
                parameter.mul_(1.5)
        sync.sync_weights()
        assert wrong(engine, policy.model) == []


def test_the_optimizers_memory_is_free_while_weights_move(engine: ReferenceEngine) -> None:
    gc.collect()
    policy = Policy(1, ballast=64 * MIB)  # two moments of 256 MiB each
    before = torch.cuda.memory_allocated()
    with synchronizer(engine, policy) as sync:
        policy.held_during.clear()
        sync.sync_weights()
    assert min(policy.held_during) <= before - 2 * 4 * 60 * MIB
    assert torch.cuda.memory_allocated() >= before - MIB  # and it is back


def test_memory_stays_flat_over_twenty_syncs(engine: ReferenceEngine) -> None:
    policy = Policy(1)

    def held() -> tuple[int, int, int]:
        torch.cuda.synchronize()
        return torch.cuda.memory_allocated(), open_files("self"), open_files(engine.pid)

    with synchronizer(engine, policy) as sync:
        for _ in range(3):
            sync.sync_weights()
        before, free = held(), torch.cuda.mem_get_info()[0]
        for _ in range(20):
            sync.sync_weights()
        assert held() == before
        assert torch.cuda.mem_get_info()[0] >= free - 64 * MIB
        assert generated(engine) == greedy(policy.model)


def test_a_failed_sync_gives_the_optimizer_its_memory_back_and_the_next_one_heals(
    engine: ReferenceEngine,
) -> None:
    policy = Policy(1, ballast=64 * MIB)
    with synchronizer(engine, policy, bucket_bytes=50_000) as sync:
        sync.sync_weights()
        before = torch.cuda.memory_allocated()
        engine.inject(Fault(UPDATE, "refuse", after=1, times=1))
        with pytest.raises(WeightUpdateError) as caught:
            sync.sync_weights()
        assert caught.value.report is not None
        assert caught.value.report.engines[engine.url].state is EngineState.MIXED
        assert sync.is_stale
        assert torch.cuda.memory_allocated() >= before - MIB
        sync.sync_weights()
        assert wrong(engine, policy.model) == []


@two_gpus
def test_each_rank_of_an_engine_opens_the_memory_of_its_own_gpu(tmp_path: Path) -> None:
    """Two ranks of a trainer, FSDP2 over NCCL, and an engine's two ranks on the same GPUs."""
    saved = tmp_path / "whole.pt"
    with ReferenceEngine(llama(0), device="cuda:0", tp=2) as engine:
        port, environment = str(free_port()), os.environ | {"SAVED": str(saved)}
        ranks = [
            subprocess.Popen(
                [sys.executable, str(SCRIPT), str(rank), port, engine.url],
                env=environment,
                stdout=subprocess.PIPE,
                text=True,
            )
            for rank in range(2)
        ]
        told = [rank.communicate(timeout=110)[0] for rank in ranks]
        assert [rank.returncode for rank in ranks] == [0, 0]
        first, second = (json.loads(text.splitlines()[-1]) for text in told)
        assert first == second
        assert first == [[version, "cuda ipc", "checksum"] for version in (1, 2, 3)]
        model = llama(1)
        model.load_state_dict(torch.load(saved, weights_only=True))
        assert generated(engine) == greedy(model.cuda())
        bodies = [r["json"] for r in engine.requests() if r["path"] == UPDATE]
    gpus = [str(torch.cuda.get_device_properties(index).uuid).encode() for index in range(2)]
    assert bodies
    for body in bodies:
        entries = [base64.b64decode(entry) for entry in body["serialized_named_tensors"]]
        assert [[uuid in entry for uuid in gpus] for entry in entries] == [
            [True, False],
            [False, True],
        ]
