"""CUDA IPC to a worker of vLLM: the trainer and the worker's end on one GPU, in two processes.

vLLM itself is not there: a plain mapping stands in the place of its model. Run it where a GPU and
pyzmq are: ``pytest tests/gpu/test_vllm_colocated.py``. Elsewhere it is skipped.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from weight_update.errors import EngineUnreachable
from weight_update.options import LoadFormat
from weight_update.transports.shared_memory import SharedMemoryWay
from weight_update.transports.zmq_channel import ZmqChannel
from weight_update.waiting import Deadline
from weight_update.weights.buckets import Bucket, Plan, plan_buckets
from weight_update.weights.cargo import Cargo, Terms
from weight_update.weights.extract import extract_weights

KIT = Path(__file__).parents[1] / "transports"
sys.path.insert(0, str(KIT))

from zmq_worker import SECONDS, Worker, described  # noqa: E402

pytestmark = pytest.mark.skipif(torch.cuda.device_count() < 1, reason="needs a GPU")

URL = "http://engine:1"
CUDA = torch.device("cuda", 0)
FORMATS = [
    ("auto", None),
    ("auto", 50_000),
    ("auto", 1),
    ("tensors", None),
]


def weights_of(seed: int, device: torch.device = CUDA) -> dict[str, torch.Tensor]:
    """Odd sizes, several dtypes, a scalar, an empty one, and one that is large beside them."""
    generator = torch.Generator().manual_seed(seed)
    made = {
        "odd": torch.randint(0, 255, (3,), dtype=torch.uint8, generator=generator),
        "scalar": torch.rand((), generator=generator),
        "empty": torch.empty(0, 4),
        "half": torch.rand(77, 5, generator=generator).bfloat16(),
        "eighth": torch.rand(33, generator=generator).to(torch.float8_e4m3fn),
        "large": torch.rand(1000, 301, generator=generator),
        **{f"w{i}": torch.rand(64, 65, generator=generator) for i in range(8)},
    }
    return {name: value.to(device) for name, value in made.items()}


class Trainer:
    """Shares weights as the library does, and tells one worker of them."""

    def __init__(self, load_format: LoadFormat = "auto", device: torch.device = CUDA) -> None:
        self.way = SharedMemoryWay(load_format, all_ranks_answer=True)
        self.packer = self.way.open_packer(device)
        self.channel = ZmqChannel(URL)

    def connect(self) -> str:
        self.channel.close()
        self.channel = ZmqChannel(URL)
        return self.channel.bind(["0"])["0"]

    def plan(self, weights: Any, bucket_bytes: int | None = None) -> Plan:
        extracted = extract_weights(weights)
        chosen = self.packer.format([w.spec for w in extracted], Terms(bucket_bytes))
        plan = plan_buckets(extracted, chosen.bucket_bytes, chosen.packs)
        self.packer.reserve(plan)
        return plan

    def begin(self) -> None:
        assert self.channel.begin(Deadline(SECONDS), lambda: None) == [{"unfinished": False}]

    def bring(self, bucket: Bucket, cargo: Cargo | None = None) -> Any:
        shared = (cargo or self.packer.pack(bucket)).shared
        (answer,) = self.channel.bring(bucket, shared, Deadline(SECONDS), lambda: None)
        return answer

    def push(self, worker: Worker, weights: Any, bucket_bytes: int | None = None) -> dict[str, Any]:
        call = worker.update(self.connect())
        self.begin()
        for bucket in self.plan(weights, bucket_bytes).buckets:
            assert self.bring(bucket) == {}
        assert self.channel.complete(Deadline(SECONDS), lambda: None) == [{}]
        said = call.result(SECONDS)
        assert said["result"] == {}
        return said

    def close(self) -> None:
        self.channel.close()
        self.way.close()


@pytest.fixture(scope="module")
def worker() -> Iterator[Worker]:
    with Worker("cuda:0") as worker:
        yield worker


@pytest.fixture
def trainer() -> Iterator[Trainer]:
    trainer = Trainer()
    yield trainer
    trainer.close()


def open_files(pid: int | str) -> int:
    """How many files a process has open, less its sockets."""
    folder, count = f"/proc/{pid}/fd", 0
    for name in os.listdir(folder):
        with suppress(FileNotFoundError):  # it was closed meanwhile
            count += not os.readlink(f"{folder}/{name}").startswith("socket:")
    return count


@pytest.mark.parametrize(("load_format", "bucket_bytes"), FORMATS)
def test_weights_arrive_bit_for_bit_and_nothing_grows_over_twenty_updates(
    worker: Worker, load_format: LoadFormat, bucket_bytes: int | None
) -> None:
    trainer = Trainer(load_format)
    models = [weights_of(0), weights_of(1)]
    expected = [described(model) for model in models]

    def push(index: int) -> dict[str, Any]:
        said = trainer.push(worker, models[index % 2], bucket_bytes)
        assert said["weights"] == expected[index % 2]
        torch.cuda.synchronize()
        return {
            "trainer": torch.cuda.memory_allocated(),
            "worker": said["allocated"],
            "trainer's files": open_files("self"),
            "worker's files": open_files(worker.pid),
        }

    for index in range(4):
        before = push(index)
    for index in range(20):
        after = push(index)
    trainer.close()

    assert after == before


def test_a_worker_that_dies_is_noticed_and_the_next_one_opens_the_same_memory(
    trainer: Trainer,
) -> None:
    weights = weights_of(2)
    for _ in range(2):
        with Worker("cuda:0") as mortal:
            trainer.push(mortal, weights, 50_000)
            mortal.update(trainer.connect())
            trainer.begin()
            with pytest.raises(EngineUnreachable, match="worker 0 is gone"):
                trainer.bring(Bucket(extract_weights({"kill": torch.ones(1, device=CUDA)})))
            torch.cuda.synchronize()
            held = torch.cuda.memory_allocated()
    with Worker("cuda:0") as heir:
        assert trainer.push(heir, weights, 50_000)["weights"] == described(weights)

    torch.cuda.synchronize()
    assert torch.cuda.memory_allocated() == held


def test_a_trainer_that_is_killed_is_noticed_and_another_one_heals(
    worker: Worker, trainer: Trainer
) -> None:
    before = trainer.push(worker, weights_of(3))
    script = [sys.executable, str(KIT / "zmq_trainer.py"), "cuda:0"]
    with subprocess.Popen(script, stdout=subprocess.PIPE, text=True) as mortal:
        assert mortal.stdout is not None
        call = worker.update(mortal.stdout.readline().strip())
        assert mortal.stdout.readline() == "brought\n"
        mortal.kill()
        said = call.result(SECONDS)
    assert "the trainer is gone" in said["result"]["error"]
    assert said["weights"] == before["weights"]

    call = worker.update(trainer.connect())
    assert trainer.channel.begin(Deadline(SECONDS), lambda: None) == [{"unfinished": True}]
    for bucket in trainer.plan(weights_of(4)).buckets:
        assert trainer.bring(bucket) == {}
    trainer.channel.complete(Deadline(SECONDS), lambda: None)

    said = call.result(SECONDS)
    assert {name: said["weights"][name] for name in weights_of(4)} == described(weights_of(4))


def test_memory_of_a_gpu_that_the_worker_does_not_see_is_refused(
    worker: Worker, trainer: Trainer
) -> None:
    call = worker.update(trainer.connect())
    trainer.begin()
    bucket = Bucket(extract_weights({"w": torch.ones(4, device=CUDA)}))
    (tensor,) = trainer.packer.pack(bucket).shared
    elsewhere = replace(tensor, memory=replace(tensor.memory, device="no-such-gpu"))

    answer = trainer.bring(bucket, Cargo(shared=(elsewhere,)))

    assert "GPU no-such-gpu, which this worker does not see" in answer["error"]
    assert call.result(SECONDS)["result"] == answer


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_a_worker_on_another_gpu_reads_the_trainers_memory_from_there() -> None:
    weights = weights_of(5, torch.device("cuda", 1))
    trainer = Trainer(device=torch.device("cuda", 1))

    with Worker("cuda:0") as neighbour:
        said = trainer.push(neighbour, weights, 50_000)

    trainer.close()
    assert said["weights"] == described(weights)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_a_worker_that_numbers_its_gpus_otherwise_opens_the_right_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    weights = weights_of(6, torch.device("cuda", 1))
    trainer = Trainer(device=torch.device("cuda", 1))
    with monkeypatch.context() as only_the_workers:
        only_the_workers.setenv("CUDA_VISIBLE_DEVICES", "1")
        other = Worker("cuda:0")

    with other:
        said = trainer.push(other, weights)

    trainer.close()
    assert said["weights"] == described(weights)
