"""Shared memory: what is in it, how much of it there is, and how long it stays."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from itertools import pairwise
from math import ceil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.multiprocessing import reductions

from weight_update.errors import ConfigurationError, WeightMismatchError
from weight_update.options import LoadFormat
from weight_update.transports import shared_memory
from weight_update.transports.shared_memory import (
    SharedMemoryPacker,
    SharedMemoryWay,
    check_on_this_host,
)
from weight_update.weights.buckets import Plan, plan_buckets
from weight_update.weights.cargo import Cargo, Format, SharedTensor, Terms
from weight_update.weights.extract import extract_weights
from weight_update.weights.specs import TensorSpec, Weight

CPU = torch.device("cpu")
GIB = 1 << 30
FILES = Path("/dev/shm")
SECONDS = 60.0

pytestmark = pytest.mark.skipif(not FILES.is_dir(), reason="shared memory is no file here")


def tensors(count: int = 4, size: int = 100) -> dict[str, torch.Tensor]:
    return {f"w{i}": torch.arange(size, dtype=torch.float32) + i for i in range(count)}


def planned(packer: SharedMemoryPacker, weights: Any, bucket_bytes: int | None = None) -> Plan:
    extracted = extract_weights(weights)
    chosen = packer.format([w.spec for w in extracted], Terms(bucket_bytes))
    plan = plan_buckets(extracted, chosen.bucket_bytes, chosen.packs, even=bucket_bytes is None)
    packer.reserve(plan)
    return plan


def packed(packer: SharedMemoryPacker, plan: Plan) -> list[Cargo]:
    return [packer.pack(bucket) for bucket in plan.buckets]


def opened(tensor: SharedTensor) -> torch.Tensor:
    """What an engine sees in the memory, through the file that it would open."""
    name = os.fsdecode(tensor.memory.opening[1]).lstrip("/")  # type: ignore[arg-type]
    raw = (FILES / name).read_bytes()[-tensor.memory.nbytes :][tensor.offset :]
    nbytes = torch.Size(tensor.shape).numel() * tensor.dtype.itemsize
    row = torch.tensor(list(raw[:nbytes]), dtype=torch.uint8)
    return row.view(tensor.dtype).view(tensor.shape)


def files() -> set[str]:
    """Of this process, less those whose packers are gone.

    Other tests of this process may have left some, which can go at any moment: ask for those that
    are here and were not here before, never whether all are the same.
    """
    gc.collect()
    return {path.name for path in FILES.glob(f"torch_{os.getpid()}_*")}


def wait_for(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + SECONDS
    while not condition():
        assert time.monotonic() < end, "the condition never came true"
        time.sleep(0.02)


# ---- what is packed


def test_a_flat_bucket_is_the_bytes_of_its_tensors_one_after_the_other():
    packer = SharedMemoryPacker(CPU)
    weights = tensors()

    (cargo,) = packed(packer, planned(packer, weights))

    (buffer,) = cargo.shared
    assert torch.equal(opened(buffer).view(torch.float32), torch.cat([*weights.values()]))
    assert cargo.tensors == []


def test_one_tensor_a_weight_keeps_dtypes_and_shapes_and_every_offset_fits_its_items():
    weights = {
        "a": torch.ones(3, dtype=torch.uint8),
        "b": torch.rand(5, 7),
        "c": torch.rand(4, 6).mT,
        "d": torch.empty(0),
        "e": torch.rand(2, dtype=torch.float64),
        "f": torch.tensor(3.0, dtype=torch.bfloat16),
    }
    packer = SharedMemoryPacker(CPU, "tensors")

    (cargo,) = packed(packer, planned(packer, weights))

    assert len({tensor.memory for tensor in cargo.shared}) == 1
    for tensor, value in zip(cargo.shared, weights.values(), strict=True):
        assert tensor.offset % value.itemsize == 0
        assert tensor.dtype == value.dtype
        assert torch.equal(opened(tensor), value)


def test_while_engines_read_a_bucket_the_next_one_is_packed_elsewhere():
    packer = SharedMemoryPacker(CPU)
    weights = tensors(6)

    plan = planned(packer, weights, bucket_bytes=400)
    memories = [cargo.shared[0].memory for cargo in packed(packer, plan)]

    assert len(plan.buckets) == 6
    assert len(set(memories)) == 2
    assert all(one != other for one, other in pairwise(memories))


@pytest.mark.parametrize(("all_answer", "buffers"), [(False, 3), (True, 2)])
def test_ranks_that_do_not_answer_themselves_get_a_request_more_of_time(
    all_answer: bool, buffers: int
):
    packer = SharedMemoryPacker(CPU, all_ranks_answer=all_answer)
    weights = extract_weights(tensors(6))
    chosen = packer.format([w.spec for w in weights], Terms(400, ranks=2))
    plan = plan_buckets(weights, chosen.bucket_bytes, chosen.packs)
    packer.reserve(plan)

    memories = [cargo.shared[0].memory for cargo in packed(packer, plan)]

    assert len(set(memories)) == buffers
    assert memories[:buffers] == memories[buffers : 2 * buffers]


@pytest.mark.parametrize("load_format", ["auto", "tensors"])
@pytest.mark.parametrize("bucket_bytes", [None, 1000])
def test_the_same_memory_serves_every_update(load_format: LoadFormat, bucket_bytes: int | None):
    before = files()
    packer = SharedMemoryPacker(CPU, load_format)
    used = []
    for start in range(5):
        weights = {name: value + start for name, value in tensors(7).items()}
        cargos = packed(packer, planned(packer, weights, bucket_bytes))
        used.append({t.memory for cargo in cargos for t in cargo.shared})

    assert used[0] == used[1] == used[4]
    assert len(files() - before) == len(used[0]) == (1 if bucket_bytes is None else 2)


def test_a_bucket_without_weights_is_memory_that_can_be_opened_all_the_same():
    packer = SharedMemoryPacker(CPU)
    plan = plan_buckets((), 1)
    assert plan.buckets == ()

    cargo = packer.pack(plan_buckets(extract_weights({"x": torch.empty(0)}), 1).buckets[0])

    assert cargo.shared[0].shape == (1,)


def test_a_value_of_another_shape_than_was_announced_is_refused():
    weight = Weight(TensorSpec("w", torch.float32, (3,)), CPU, lambda: torch.zeros(4))
    packer = SharedMemoryPacker(CPU)

    with pytest.raises(WeightMismatchError, match="was announced as"):
        packer.pack(plan_buckets([weight], 100).buckets[0])


# ---- how much there is


def on_gpu(monkeypatch: pytest.MonkeyPatch, free: int) -> Callable[..., Format]:
    """The choice on a GPU that has so much free."""
    monkeypatch.setattr(shared_memory, "free_bytes", lambda _: free)

    def choose(sizes: list[int] | None, load_format: LoadFormat = "auto", **terms: Any) -> Format:
        packer = SharedMemoryPacker(torch.device("cuda", 0), load_format)
        specs = sizes and [TensorSpec(f"w{i}", torch.uint8, (n,)) for i, n in enumerate(sizes)]
        return packer.format(specs, Terms(**terms))

    return choose


@pytest.mark.parametrize(
    ("free", "model", "bucket"),
    [
        (100, [1, 1], 2),  # everything fits into one buffer
        (100, [8, 8], 2),  # two buffers, 4 GiB in all
        (3, [8, 8], 1),  # a GiB is left to others
        (2, [8, 8], 0.5),
    ],
)
def test_a_bucket_is_as_large_as_memory_allows_and_4_gib_are_the_most(
    monkeypatch: pytest.MonkeyPatch, free: int, model: list[int], bucket: float
):
    choose = on_gpu(monkeypatch, free * GIB)
    assert choose([n * GIB for n in model]).bucket_bytes == bucket * GIB


def test_the_users_size_wins(monkeypatch: pytest.MonkeyPatch):
    choose = on_gpu(monkeypatch, 100 * GIB)
    assert choose([8 * GIB] * 2, bucket_bytes=16 * GIB) == Format(
        16 * GIB, shared_memory._packs_all
    )


def test_a_stream_gets_buckets_of_the_size_that_memory_allows(monkeypatch: pytest.MonkeyPatch):
    assert on_gpu(monkeypatch, 100 * GIB)(None).bucket_bytes == 2 * GIB


def test_parameters_that_are_shared_where_they_lie_travel_in_one_request(
    monkeypatch: pytest.MonkeyPatch,
):
    chosen = on_gpu(monkeypatch, 0)([8 * GIB] * 9, "tensors")
    assert chosen.bucket_bytes >= 72 * GIB
    assert not chosen.packs(TensorSpec("w", torch.uint8, (1,)))
    assert "where they lie" in chosen.reason


def test_on_the_cpu_the_report_says_that_they_are_copied():
    packer = SharedMemoryPacker(CPU, "tensors")
    assert "every tensor is copied" in packer.format([], Terms()).reason


def test_memory_that_is_its_own_already_is_no_reason_to_take_less(
    monkeypatch: pytest.MonkeyPatch,
):
    """Free memory shrinks by the buffers, which are used again."""
    free = 400 << 20
    monkeypatch.setattr(shared_memory, "_free", lambda _: free)
    packer = SharedMemoryPacker(CPU)
    weights = {f"w{i}": torch.zeros(60 << 20, dtype=torch.uint8) for i in range(5)}
    first = planned(packer, weights)
    packed(packer, first)
    free -= packer._held

    second = planned(packer, weights)

    assert [b.nbytes for b in second.buckets] == [b.nbytes for b in first.buckets]
    assert packer._held <= 256 << 20


def test_buffers_that_cannot_fit_are_objected_to_before_anything_is_paused(
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr(shared_memory, "_free", lambda _: 1000)
    packer = SharedMemoryPacker(CPU)
    plan = planned(packer, tensors(), bucket_bytes=800)

    (objection,) = packer.objections(plan)

    assert "1600 bytes of buffers do not fit on cpu, where 1000 bytes are free" in objection
    assert packer.objections(planned(packer, tensors(), bucket_bytes=400)) == []


def test_an_allocation_that_fails_says_what_to_do(monkeypatch: pytest.MonkeyPatch):
    size = ceil(os.statvfs(FILES).f_blocks * os.statvfs(FILES).f_frsize * 4)
    monkeypatch.setattr(shared_memory, "_free", lambda _: sys.maxsize)
    packer = SharedMemoryPacker(CPU)
    spec = TensorSpec("w", torch.uint8, (size,))

    with pytest.raises(ConfigurationError, match="no room for a buffer") as caught:
        packer.pack(plan_buckets([Weight(spec, CPU, lambda: torch.empty(0))], size).buckets[0])

    assert "bucket_bytes" in str(caught.value)


# ---- how long it stays


def test_memory_is_removed_with_the_packer():
    before = files()
    packer = SharedMemoryPacker(CPU)
    packed(packer, planned(packer, tensors(), bucket_bytes=400))
    assert len(files() - before) == 2

    del packer

    assert not files() - before


def test_a_group_that_is_given_up_leaves_memory_to_engines_that_were_told_of_it():
    """Those that find it gone end; the next update uses it again."""
    way = SharedMemoryWay()
    packer = way.open_packer(CPU)
    group = way.open_group(["http://127.0.0.1:1"], CPU)
    plan = planned(packer, tensors())
    first = packer.pack(plan.buckets[0]).shared[0].memory

    group.give_up()

    assert os.fsdecode(first.opening[1]).lstrip("/") in files()  # type: ignore[arg-type]
    assert way.open_packer(CPU).pack(plan.buckets[0]).shared[0].memory == first


def test_memory_that_an_engine_was_just_told_of_goes_with_its_answer():
    before = files()
    way = SharedMemoryWay()
    packer = way.open_packer(CPU)
    unanswered = packed(packer, planned(packer, tensors()))

    way.close()
    assert files() - before

    unanswered.clear()
    assert not files() - before


def test_a_pack_that_does_not_end_keeps_the_memory_that_it_writes():
    packer = SharedMemoryPacker(CPU)
    plan = planned(packer, tensors())
    first = packer.pack(plan.buckets[0]).shared[0].memory
    packer.abandon()

    assert packer.pack(plan.buckets[0]).shared[0].memory != first


def open_and_close(tensor: SharedTensor) -> None:
    """What an engine in another process does, as far as torch counts it."""
    reductions.shared_cache.clear()  # or this process would find its own memory there
    open_file: Any = reductions.rebuild_storage_filename
    open_file(torch.UntypedStorage, *tensor.memory.opening)


def test_however_often_engines_open_and_close_a_file_it_stays():
    """torch removes a file with its last count, and each opening takes one off."""
    packer = SharedMemoryPacker(CPU)
    plan = planned(packer, tensors())
    for _ in range(5):
        cargo = packer.pack(plan.buckets[0])
        for _ in range(100):
            open_and_close(cargo.shared[0])
    assert torch.equal(opened(cargo.shared[0])[:400].view(torch.float32), tensors()["w0"])


def test_payloads_that_nobody_opens_keep_no_memory():
    before = files()
    packer = SharedMemoryPacker(CPU)
    for _ in range(20):
        packed(packer, planned(packer, tensors()))
    packer.abandon()
    assert not files() - before


TRAINER = """
import os, sys, torch
from weight_update.transports.shared_memory import SharedMemoryPacker
from weight_update.weights.buckets import plan_buckets
from weight_update.weights.extract import extract_weights
packer = SharedMemoryPacker(torch.device("cpu"))
(bucket,) = plan_buckets(extract_weights({"w": torch.ones(9)}), 100).buckets
print(os.fsdecode(packer.pack(bucket).shared[0].memory.opening[1]).lstrip("/"), flush=True)
sys.stdin.readline()
"""


@pytest.mark.parametrize("how", ["ends", "is killed", "is terminated"])
def test_memory_is_removed_when_the_trainer(how: str):
    """An engine that had it open would keep torch's own manager, and with it the file."""
    trainer = subprocess.Popen(
        [sys.executable, "-c", TRAINER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert trainer.stdin is not None
    assert trainer.stdout is not None
    file = FILES / trainer.stdout.readline().strip()
    assert file.exists()
    if how == "ends":
        trainer.stdin.write("\n")
        trainer.stdin.flush()
    else:
        trainer.send_signal(signal.SIGKILL if how == "is killed" else signal.SIGTERM)
    trainer.wait(SECONDS)
    wait_for(lambda: not file.exists())


# ---- whom it reaches


@pytest.mark.parametrize("url", ["http://127.0.0.1:1", "http://localhost:30000", "http://[::1]:1"])
def test_engines_of_this_host_are_let_in(url: str):
    check_on_this_host([url])


def test_engines_of_other_hosts_are_named():
    here, away = "http://127.0.0.1:1", "http://192.0.2.1:30000"
    with pytest.raises(ConfigurationError, match="on this host") as caught:
        check_on_this_host([here, away])
    assert caught.value.engine == away
    assert caught.value.phase == "connect"
    assert "broadcast" in caught.value.remedy


def test_a_name_that_does_not_resolve_is_said_to():
    with pytest.raises(ConfigurationError, match="does not resolve"):
        check_on_this_host(["http://nowhere.invalid:1"])


PUSHER = """
import sys
from weight_update.torch_private.shared_memory import HostMemory

memory = HostMemory(4096)
print(*(part if isinstance(part, int) else part.decode() for part in memory.opening), flush=True)
sys.stdin.readline()
"""


def test_whoever_reads_what_the_trainer_writes_sees_it_end_while_an_engine_has_memory_open():
    """The process that torch starts lives as long as this engine, and holds no pipe of ours."""
    command = [sys.executable, "-c", PUSHER]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True) as trainer:
        assert trainer.stdout is not None
        manager, name, nbytes = trainer.stdout.readline().split()
        opened = reductions.rebuild_storage_filename(
            torch.UntypedStorage, manager.encode(), name.encode(), int(nbytes)
        )
        _, said = trainer.communicate("end\n", timeout=SECONDS)
    assert said == ""
    assert opened.nbytes() == 4096
