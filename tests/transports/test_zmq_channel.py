"""The channel to vLLM's workers, over real sockets: what arrives, and what happens when it cannot.

The worker's end is the one that runs in vLLM, with a plain mapping in the place of a model.
"""

from __future__ import annotations

import json
import socket
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
import torch

from weight_update.errors import (
    ConfigurationError,
    EngineUnreachable,
    UpdateTimeout,
    WeightUpdateError,
)
from weight_update.options import LoadFormat
from weight_update.transports.shared_memory import SharedMemoryPacker
from weight_update.transports.zmq_channel import ZmqChannel, check_zmq
from weight_update.vllm_worker import shared_update
from weight_update.vllm_worker.shared_update import receive_shared_weights
from weight_update.waiting import Deadline, spawn
from weight_update.weights.buckets import Bucket, Plan, plan_buckets
from weight_update.weights.cargo import Terms
from weight_update.weights.extract import extract_weights

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))

from zmq_worker import SECONDS, Shelf, Worker, described  # noqa: E402

URL = "http://engine:1"
CPU = torch.device("cpu")
TENSORS = {
    "odd": torch.arange(3, dtype=torch.uint8),
    "scalar": torch.tensor(2.5),
    "empty": torch.empty(0, 4),
    "wide": torch.arange(1001, dtype=torch.float32).view(7, 143),
    "half": torch.arange(5, dtype=torch.bfloat16),
    "double": torch.tensor([[1.5]], dtype=torch.float64),
    "bits": torch.tensor([True, False, True]),
    "turned": torch.arange(12, dtype=torch.float32).view(3, 4).mT,
}

pytestmark = pytest.mark.skipif(not Path("/dev/shm").is_dir(), reason="no shared memory here")


class Trainer:
    """Packs as the library does, and brings what was packed to workers of one engine."""

    def __init__(self, load_format: LoadFormat = "auto", over: str | None = None) -> None:
        self.packer = SharedMemoryPacker(CPU, load_format)
        self.over = over
        self.channel = ZmqChannel(URL, over)
        self.check: Callable[[], None] = lambda: None

    def plan(self, weights: Any, bucket_bytes: int | None = None) -> Plan:
        extracted = extract_weights(weights)
        chosen = self.packer.format([w.spec for w in extracted], Terms(bucket_bytes))
        plan = plan_buckets(extracted, chosen.bucket_bytes, chosen.packs)
        self.packer.reserve(plan)
        return plan

    def connect(self, count: int = 1) -> list[str]:
        """A new channel; the addresses of its sockets."""
        self.channel.close()
        self.channel = ZmqChannel(URL, self.over)
        return list(self.channel.bind([f"{rank}-cpu" for rank in range(count)]).values())

    def begin(self, seconds: float = SECONDS) -> list[Any]:
        return self.channel.begin(Deadline(seconds), self.check)

    def bring(self, bucket: Bucket, seconds: float = SECONDS) -> list[Any]:
        shared = self.packer.pack(bucket).shared
        return self.channel.bring(bucket, shared, Deadline(seconds), self.check)

    def complete(self, seconds: float = SECONDS) -> list[Any]:
        return self.channel.complete(Deadline(seconds), self.check)

    def push(self, worker: Worker, weights: Any, bucket_bytes: int | None = None) -> dict[str, Any]:
        """A whole update; what the worker says at its end."""
        (address,) = self.connect()
        call = worker.update(address)
        answers = self.begin()
        for bucket in self.plan(weights, bucket_bytes).buckets:
            answers += self.bring(bucket)
        answers += self.complete()
        assert not any("error" in answer for answer in answers)
        return call.result(SECONDS)


@pytest.fixture
def trainer() -> Iterator[Trainer]:
    trainer = Trainer()
    yield trainer
    trainer.channel.close()


@pytest.fixture(scope="module")
def worker() -> Iterator[Worker]:
    with Worker() as worker:
        yield worker


def receive(address: str, shelf: Shelf, seconds: float = SECONDS) -> Future[dict[str, Any]]:
    """The worker's end, in a thread of this process."""
    return spawn(receive_shared_weights, address, shelf, CPU, seconds)


def bucket_of(weights: dict[str, torch.Tensor]) -> Bucket:
    return Bucket(extract_weights(weights))


def _raise_of(call: Future[Any]) -> None:
    if call.done():
        call.result()


def only(answers: Sequence[Any]) -> Any:
    (answer,) = answers
    return answer


# ---- what arrives


@pytest.mark.parametrize("load_format", ["auto", "tensors"])
@pytest.mark.parametrize("bucket_bytes", [None, 64, 1], ids="bucket={}".format)
def test_weights_arrive_bit_for_bit_in_another_process(
    worker: Worker, load_format: LoadFormat, bucket_bytes: int | None
) -> None:
    trainer = Trainer(load_format)

    said = trainer.push(worker, TENSORS, bucket_bytes)

    trainer.channel.close()
    assert said["result"] == {}
    assert {name: said["weights"][name] for name in TENSORS} == described(TENSORS)


def test_a_tensor_larger_than_a_bucket_travels_alone_between_small_ones(
    worker: Worker, trainer: Trainer
) -> None:
    weights = {"a": torch.ones(4), "large": torch.rand(500), "z": torch.zeros(4)}

    said = trainer.push(worker, weights, bucket_bytes=40)

    assert [len(b.specs) for b in trainer.plan(weights, 40).buckets] == [1, 1, 1]
    assert {name: said["weights"][name] for name in weights} == described(weights)


def test_twenty_updates_use_the_same_memory(worker: Worker, trainer: Trainer) -> None:
    def push(fill: int) -> dict[str, Any]:
        weights = {f"w{i}": torch.full((1000,), fill + i) for i in range(8)}
        said = trainer.push(worker, weights, bucket_bytes=5000)
        assert {name: said["weights"][name] for name in weights} == described(weights)
        return said

    push(0)
    files = {buffer.memory for shelf in trainer.packer._shelves for buffer in shelf.buffers}
    mapped = [push(fill)["mapped"] for fill in range(1, 21)]

    assert {b.memory for s in trainer.packer._shelves for b in s.buffers} == files
    assert mapped == [0] * 20


def test_every_worker_of_an_engine_gets_every_message(worker: Worker, trainer: Trainer) -> None:
    shelf = Shelf()
    first, second = trainer.connect(2)
    calls = [worker.update(first), receive(second, shelf)]
    weights = {"w": torch.rand(50), "v": torch.rand(3)}

    assert len(trainer.begin()) == 2
    for bucket in trainer.plan(weights, 16).buckets:
        assert trainer.bring(bucket) == [{}, {}]
    assert trainer.complete() == [{}, {}]

    said = calls[0].result(SECONDS)
    assert {name: said["weights"][name] for name in weights} == described(weights)
    assert calls[1].result(SECONDS) == {}
    assert described(shelf.weights) == described(weights)


def test_tcp_will_do_where_files_are_not_shared(worker: Worker) -> None:
    trainer = Trainer(over="tcp://127.0.0.1:*")

    said = trainer.push(worker, {"w": torch.arange(9.0)})

    trainer.channel.close()
    assert said["weights"]["w"] == described({"w": torch.arange(9.0)})["w"]


def test_a_buffer_is_announced_when_the_one_before_was_taken(trainer: Trainer) -> None:
    shelf = Shelf()
    call = receive(only(trainer.connect()), shelf)
    trainer.begin()

    first = spawn(trainer.bring, bucket_of({"stall": torch.ones(1)}))
    assert shelf.stalled.wait(SECONDS)
    second = spawn(trainer.bring, bucket_of({"next": torch.ones(1)}))
    with pytest.raises(TimeoutError):
        second.result(0.2)
    assert "next" not in shelf.fresh
    shelf.go_on.set()

    assert [first.result(SECONDS), second.result(SECONDS)] == [[{}], [{}]]
    assert trainer.complete() == [{}]
    assert call.result(SECONDS) == {}


def test_what_follows_the_last_bucket_is_waited_for_before_the_update_counts(
    trainer: Trainer,
) -> None:
    shelf = Shelf()
    shelf.slow = True
    call = receive(only(trainer.connect()), shelf)
    trainer.begin()
    trainer.bring(bucket_of({"w": torch.ones(1)}))

    completed = spawn(trainer.complete)
    assert shelf.stalled.wait(SECONDS)
    with pytest.raises(TimeoutError):
        completed.result(0.2)
    shelf.go_on.set()

    assert completed.result(SECONDS) == [{}]
    assert call.result(SECONDS) == {}


# ---- what is refused


def test_the_words_of_a_loader_come_back_and_the_update_is_undone(trainer: Trainer) -> None:
    shelf = Shelf()
    call = receive(only(trainer.connect()), shelf)
    trainer.begin()
    trainer.bring(bucket_of({"w": torch.ones(1)}))

    answer = only(trainer.bring(bucket_of({"unknown": torch.ones(1)})))

    assert "at 'unknown': KeyError: 'there is no parameter named unknown'" in answer["error"]
    assert (answer["changed"], answer["restored"]) == (True, True)
    assert call.result(SECONDS) == answer
    assert shelf.weights == {}


def test_a_failure_before_anything_was_loaded_says_so(trainer: Trainer) -> None:
    receive(only(trainer.connect()), Shelf())
    trainer.begin()

    assert only(trainer.bring(bucket_of({"unknown": torch.ones(1)})))["changed"] is False


@pytest.mark.parametrize("again", ["in the same bucket", "in the next bucket"])
def test_a_name_that_comes_twice_is_refused(trainer: Trainer, again: str) -> None:
    receive(only(trainer.connect()), Shelf())
    trainer.begin()
    (weight,) = extract_weights({"w": torch.ones(1)})

    if again == "in the same bucket":
        answer = only(trainer.bring(Bucket((weight, weight))))
    else:
        assert trainer.bring(Bucket((weight,))) == [{}]
        answer = only(trainer.bring(Bucket((weight,))))

    assert "'w' was sent twice" in answer["error"]


def test_an_update_that_lacks_weights_is_not_completed(trainer: Trainer) -> None:
    shelf = Shelf()
    receive(only(trainer.connect()), shelf)
    trainer.begin()
    trainer.bring(bucket_of({"w": torch.ones(1)}))
    trainer.channel._tensors += 1  # one that never left

    answer = only(trainer.complete())

    assert "1 weights came, and 2 were sent" in answer["error"]
    assert shelf.weights == {}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"names": []}, "longer"),
        ({"shapes": [[100]]}, "bytes 0 to 400 are not in a memory of 4"),
        ({"shapes": [[-1]]}, "are not in a memory"),
        ({"dtypes": ["floof"]}, "floof"),
    ],
    ids=str,
)
def test_an_announcement_that_does_not_fit_is_refused(
    trainer: Trainer, change: dict[str, Any], words: str
) -> None:
    receive(only(trainer.connect()), Shelf())
    trainer.begin()
    bucket = bucket_of({"w": torch.ones(1)})
    announced = {"names": ["w"], "dtypes": ["float32"], "shapes": [[1]]} | change
    bucket.__dict__["announcement"] = json.dumps(announced)

    assert words in only(trainer.bring(bucket))["error"]


def test_memory_that_is_gone_is_refused_in_words(trainer: Trainer) -> None:
    call = receive(only(trainer.connect()), Shelf())
    trainer.begin()
    bucket = bucket_of({"w": torch.ones(1)})
    (tensor,) = trainer.packer.pack(bucket).shared
    manager, name, nbytes = tensor.memory.opening
    lost = type(tensor.memory)("", (manager, name + b"-gone", nbytes), tensor.memory.nbytes)
    shared = (type(tensor)(lost, tensor.dtype, tensor.shape),)

    answer = only(trainer.channel.bring(bucket, shared, Deadline(SECONDS), trainer.check))

    assert "-gone" in answer["error"]
    assert call.result(SECONDS) == answer


def test_without_pyzmq_the_remedy_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "zmq", None)

    with pytest.raises(ConfigurationError, match="run: pip install pyzmq"):
        check_zmq()


# ---- either side dies, or is silent


def test_a_worker_that_dies_ends_the_update_at_once(trainer: Trainer) -> None:
    with Worker() as mortal:
        call = mortal.update(only(trainer.connect()))
        trainer.begin()

        with pytest.raises(EngineUnreachable, match="worker 0-cpu is gone") as caught:
            trainer.bring(bucket_of({"kill": torch.ones(1)}))

    assert (caught.value.engine, caught.value.phase) == (URL, "transfer")
    assert isinstance(call.exception(SECONDS), RuntimeError)


def test_what_the_engine_says_of_a_dead_worker_is_preferred(trainer: Trainer) -> None:
    with Worker() as mortal:
        call = mortal.update(only(trainer.connect()))
        trainer.check = lambda: _raise_of(call)
        trainer.begin()

        with pytest.raises(RuntimeError, match="the worker is dead"):
            trainer.bring(bucket_of({"kill": torch.ones(1)}))


def test_a_worker_that_does_not_come_is_waited_for_no_longer_than_the_deadline(
    trainer: Trainer,
) -> None:
    trainer.connect(2)

    with pytest.raises(UpdateTimeout, match=r"worker 0-cpu, 1-cpu within 0\.2 s") as caught:
        trainer.begin(0.2)

    assert caught.value.phase == "begin"


def test_a_worker_that_is_stuck_is_waited_for_no_longer_than_the_deadline(
    trainer: Trainer,
) -> None:
    shelf = Shelf()
    receive(only(trainer.connect()), shelf)
    trainer.begin()

    with pytest.raises(UpdateTimeout):
        trainer.bring(bucket_of({"stall": torch.ones(1)}), 0.2)

    shelf.go_on.set()


def test_closing_the_channel_ends_a_wait_for_an_answer(trainer: Trainer) -> None:
    shelf = Shelf()
    call = receive(only(trainer.connect()), shelf)
    trainer.begin()
    waiting = spawn(trainer.bring, bucket_of({"stall": torch.ones(1)}))
    assert shelf.stalled.wait(SECONDS)

    trainer.channel.close()

    with pytest.raises(WeightUpdateError, match="given up"):
        waiting.result(SECONDS)
    shelf.go_on.set()
    assert "gave the update up" in call.result(SECONDS)["error"]
    assert shelf.weights == {}


def test_a_trainer_that_is_killed_ends_the_update_at_once(worker: Worker) -> None:
    script = [sys.executable, str(HERE / "zmq_trainer.py"), "cpu"]
    with subprocess.Popen(script, stdout=subprocess.PIPE, text=True) as mortal:
        assert mortal.stdout is not None
        shelf = Shelf()
        call = receive(mortal.stdout.readline().strip(), shelf)
        assert mortal.stdout.readline() == "brought\n"
        mortal.kill()

        result = call.result(SECONDS)

    assert "the trainer is gone" in result["error"]
    assert (result["changed"], result["restored"]) == (True, True)
    assert shelf.weights == {}


def test_a_trainer_that_is_silent_is_waited_for_as_long_as_it_said(
    trainer: Trainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared_update, "_LATE_SECONDS", 0.0)
    call = receive(only(trainer.connect()), Shelf())
    trainer.begin()

    trainer.bring(bucket_of({"w": torch.ones(1)}), seconds=30)
    with pytest.raises(TimeoutError):
        call.result(0.2)
    trainer.channel.bring(
        bucket_of({"v": torch.ones(1)}),
        trainer.packer.pack(bucket_of({"v": torch.ones(1)})).shared,
        _Running(2.0),
        trainer.check,
    )

    assert "nothing came from the trainer" in call.result(SECONDS)["error"]


class _Running(Deadline):
    """A deadline that a busy machine does not reach: it says so much is left, always."""

    def remaining(self) -> float:
        return self.seconds


def test_a_socket_that_is_not_there_is_an_error_at_once(tmp_path: Path) -> None:
    result = receive_shared_weights(f"ipc://{tmp_path}/0", Shelf(), CPU, SECONDS)

    assert f"there is no {tmp_path}/0 here" in result["error"]
    assert result["changed"] is False


def test_a_socket_whose_trainer_is_dead_is_an_error_at_once(tmp_path: Path) -> None:
    path = tmp_path / "0"
    with socket.socket(socket.AF_UNIX) as bound:
        bound.bind(str(path))

    result = receive_shared_weights(f"ipc://{path}", Shelf(), CPU, SECONDS)

    assert "the trainer is gone" in result["error"]


# ---- what stays


@pytest.mark.parametrize("end", ["all workers are there", "the channel is closed"])
def test_sockets_lie_where_this_user_alone_can_reach_them_until(trainer: Trainer, end: str) -> None:
    address = only(trainer.connect())
    path = Path(address.removeprefix("ipc://"))
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700

    if end == "all workers are there":
        receive(address, Shelf())
        trainer.begin()
    else:
        trainer.channel.close()

    assert not path.parent.exists()


def test_an_update_after_one_that_failed_is_told_of_it(trainer: Trainer) -> None:
    shelf = Shelf()
    call = receive(only(trainer.connect()), shelf)
    assert trainer.begin() == [{"unfinished": False}]
    trainer.bring(bucket_of({"w": torch.ones(1)}))
    trainer.channel.close()
    assert "error" in call.result(SECONDS)

    receive(only(trainer.connect()), shelf)

    assert trainer.begin() == [{"unfinished": True}]


def test_a_long_path_to_temporary_files_does_not_matter(
    worker: Worker, trainer: Trainer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    deep = tmp_path / ("x" * 100)
    deep.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(deep))

    said = trainer.push(worker, {"w": torch.ones(2)})

    assert said["result"] == {}
    assert list(deep.iterdir()) == []
