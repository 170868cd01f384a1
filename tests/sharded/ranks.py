"""Ranks of one trainer, in processes of their own, and what they do there.

Run as a script, this file imports the library once. For each line of JSON on its standard
input it then forks the ranks of one suite, and prints what each scenario returned on each.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
import traceback
import warnings
import weakref
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import requests
import torch
import trainers
from torch import distributed, nn
from torch.distributed.device_mesh import DeviceMesh
from trainers import LAYOUTS, fsdp2, llama, mesh_of

from weight_update import SGLangWeightSyncScheme, WeightUpdateError
from weight_update.ports import free_port
from weight_update.torch_private.process_groups import default_store
from weight_update.weights.shards import gather

UPDATE = "/update_weights_from_distributed"
PATIENCE = 60.0


@dataclass
class Rank:
    """What a scenario knows."""

    rank: int
    ranks: int
    url: str
    other_url: str

    def sender(self, url: Any = "", **options: Any) -> Any:
        options = {"timeout": PATIENCE, "bucket_bytes": 20_000, **options}
        return SGLangWeightSyncScheme(url or self.url, **options).create_sender()

    def arm(self, **fault: Any) -> None:
        """Have the engine misbehave."""
        if self.rank == 0:
            requests.post(
                f"{self.url}/_reference/faults", json=fault, timeout=30
            ).raise_for_status()

    def paths(self) -> list[str]:
        """What the engine was asked so far."""
        answer = requests.get(f"{self.url}/_reference/requests", timeout=30).json()
        found = answer["requests"] if isinstance(answer, dict) else answer
        return [record["path"] for record in found]

    def wrong(self, model: nn.Module, url: str = "") -> list[str] | None:
        """Parameters that the engine holds otherwise than ``model``; the leader looks."""
        if self.rank:
            return None
        answer = requests.post(
            f"{url or self.url}/weights_checker", json={"action": "checksum"}, timeout=60
        ).json()
        found, wanted = answer["ranks"][0]["checksums"], digests(model)
        return sorted(name for name in {*found, *wanted} if found.get(name) != wanted.get(name))


def digests(model: nn.Module) -> dict[str, str]:
    import hashlib

    return {
        name: hashlib.sha256(tensor.detach().contiguous().view(-1).numpy().data).hexdigest()
        for name, tensor in model.named_parameters()
    }


def outcome(call: Callable[[], Any]) -> dict[str, Any]:
    """The report or the error of an update, as JSON, and the seconds it took."""
    start = time.monotonic()
    try:
        return {"report": call().to_dict(), "seconds": time.monotonic() - start}
    except WeightUpdateError as error:
        told = {"error": error.to_dict(), "text": str(error), "cause": repr(error.__cause__)}
        return told | {"seconds": time.monotonic() - start}


def collectives(*meshes: DeviceMesh) -> int:
    """How many collectives the groups of some meshes have begun."""
    groups = [group for mesh in meshes for group in mesh.get_all_groups()]
    return sum(group._get_sequence_number_for_group() for group in groups)


# ---- four ranks, and nothing that breaks the training group


def values(me: Rank) -> dict[str, Any]:
    """Every layout into the engine; and read once more, to compare on each rank."""
    found: dict[str, Any] = {}
    for seed, (name, (ranks, shard)) in enumerate(LAYOUTS.items(), start=10):
        model = shard(llama(seed))
        if me.rank in ranks:
            with me.sender() as sender:
                found[name] = outcome(lambda: sender.update_weights(model))  # noqa: B023
            found[name]["wrong"] = me.wrong(llama(seed))
            found[name]["names"] = list(gather_names(model))
        distributed.barrier()
    return found


def gather_names(model: nn.Module) -> list[str]:
    from weight_update.weights.extract import extract_weights

    return [weight.spec.name for weight in extract_weights(model)]


def tied(me: Rank) -> dict[str, Any]:
    model = fsdp2(llama(30, tied=True), mesh_of(range(4)))
    with me.sender(me.other_url) as sender:
        told = outcome(lambda: sender.update_weights(model))
    return told | {"wrong": me.wrong(llama(30, tied=True), me.other_url)}


def several_updates(me: Rank) -> dict[str, Any]:
    """Of one sender: collectives, messages left behind, and what was registered is sent."""
    mesh = mesh_of(range(4))
    model = fsdp2(llama(31), mesh)
    store = default_store()
    found: dict[str, Any] = {"keys": [], "collectives": [], "versions": []}
    with me.sender() as sender:
        sender.register_model(model)
        for _ in range(3):
            before = collectives(mesh)
            found["versions"].append(sender.update_weights().version)
            found["collectives"].append(collectives(mesh) - before)
            distributed.barrier()
            found["keys"].append(store.num_keys())
            distributed.barrier()
        found["sender"] = sender.version
    return found | {"wrong": me.wrong(llama(31))}


def refused_bucket(me: Rank) -> dict[str, Any]:
    """The engine fails at its second bucket; the next update heals it."""
    model = fsdp2(llama(32), mesh_of(range(4)))
    me.arm(path=UPDATE, kind="refuse", after=1, times=1, status=400)
    distributed.barrier()
    with me.sender() as sender:
        first = outcome(lambda: sender.update_weights(model))
        second = outcome(lambda: sender.update_weights(model))
    return {"first": first, "second": second, "wrong": me.wrong(llama(32))}


def slow_engine(me: Rank) -> dict[str, Any]:
    """It takes longer for a bucket than the training group waits for a rank."""
    limit = timedelta(seconds=8)
    group = distributed.new_group(list(range(4)), timeout=limit)
    model = fsdp2(llama(33), DeviceMesh.from_group(group, "cpu"))
    me.arm(path=UPDATE, kind="slow", after=1, times=1, seconds=10.0)
    distributed.barrier()
    with me.sender() as sender:
        told = outcome(lambda: sender.update_weights(model))
    return told | {"wrong": me.wrong(llama(33)), "limit": limit.total_seconds()}


def absent_rank(me: Rank) -> dict[str, Any]:
    """Rank 2 does not call; then all do."""
    model = fsdp2(llama(34), mesh_of(range(4)))
    first = None
    distributed.barrier()
    if me.rank != 2:
        with me.sender(timeout=4.0) as sender:
            first = outcome(lambda: sender.update_weights(model))
    distributed.barrier()
    with me.sender() as sender:
        second = outcome(lambda: sender.update_weights(model))
    return {"first": first, "second": second, "wrong": me.wrong(llama(34))}


def emptied_parameter(me: Rank) -> dict[str, Any]:
    """On rank 1, somebody unknown has taken a parameter away."""
    model = fsdp2(llama(35), mesh_of(range(4)))
    if me.rank == 1:
        model.register_parameter("taken", nn.Parameter(torch.empty(0)))
    before = len(me.paths())
    distributed.barrier()
    with me.sender() as sender:
        told = outcome(lambda: sender.update_weights(model))
    distributed.barrier()
    return told | {"asked": me.paths()[before:]}


def other_weights(me: Rank) -> dict[str, Any]:
    model = fsdp2(llama(36), mesh_of(range(4)))
    if me.rank == 2:
        model.register_buffer("one_more", torch.ones(1))
    with me.sender() as sender:
        return outcome(lambda: sender.update_weights(model))


def crossed_senders(me: Rank) -> dict[str, Any]:
    """Two senders, which rank 1 calls in another order than the others."""
    model = fsdp2(llama(38), mesh_of(range(4)))
    with me.sender(me.other_url if me.rank == 1 else me.url) as sender:
        return outcome(lambda: sender.update_weights(model))


def outsider(me: Rank) -> dict[str, Any]:
    """Rank 3 calls too, and holds no part."""
    from torch.distributed.tensor import DTensor, Shard

    mesh = mesh_of((0, 1, 2))
    part = torch.ones(2 if me.rank < 3 else 0, 2)
    sent = {"weight": DTensor.from_local(part, mesh, [Shard(0)], run_check=False)}
    if me.rank < 3:
        return {}
    with me.sender() as sender:
        return outcome(lambda: sender.update_weights(sent))


def memory(me: Rank) -> dict[str, Any]:
    """Bytes of whole values that exist together."""
    model = fsdp2(llama(38), mesh_of(range(4)))
    with whole_values() as live, me.sender() as sender:
        told = outcome(lambda: sender.update_weights(model))
    sizes = [4 * parameter.numel() for parameter in llama(38).parameters()]
    return told | {"peak": live["peak"], "largest": max(sizes), "model": sum(sizes)}


@contextmanager
def whole_values() -> Any:
    live = {"now": 0, "peak": 0}
    full = gather.full

    def watched(tensor: torch.Tensor) -> torch.Tensor:
        value = full(tensor)
        size = value.nbytes
        live["now"] += size
        live["peak"] = max(live["peak"], live["now"])
        weakref.finalize(value.untyped_storage(), gone, size)
        return value

    def gone(size: int) -> None:
        live["now"] -= size

    gather.full = watched
    try:
        yield live
    finally:
        gather.full = full


def adapters(me: Rank) -> dict[str, Any]:
    """LoRA on FSDP2: merged a layer at a time, from gathered parts."""
    model = fsdp2_of_peft(with_lora(39))
    with me.sender() as sender:
        told = outcome(lambda: sender.update_weights(model))
    return told | {"wrong": me.wrong(with_lora(39).merge_and_unload())}


def with_lora(seed: int) -> Any:
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(r=2, target_modules=["q_proj", "down_proj"], init_lora_weights=False)
    return get_peft_model(llama(seed), config)


def fsdp2_of_peft(model: Any) -> Any:
    fsdp2(model.get_base_model(), mesh_of(range(4)))
    return model


def bound_default_group(me: Rank) -> dict[str, Any]:
    """The trainer's default group is bound to a device: nothing may be split off it."""
    model = fsdp2(llama(40), mesh_of(range(4)))
    default = distributed.group.WORLD
    made: list[str] = []
    default.bound_device_id = torch.device("cpu", 0)
    watched = {name: getattr(distributed.distributed_c10d, name) for name in _MAKERS}
    try:
        for name in _MAKERS:
            setattr(distributed.distributed_c10d, name, lambda *a, _n=name, **k: made.append(_n))
        with me.sender() as sender:
            told = outcome(lambda: sender.update_weights(model))
        bound = str(default.bound_device_id)
    finally:
        for name, function in watched.items():
            setattr(distributed.distributed_c10d, name, function)
        default.bound_device_id = None
    return told | {"made": made, "bound": bound, "wrong": me.wrong(llama(40))}


_MAKERS = ("new_group", "split_group", "_new_process_group_helper")


def rows(me: Rank) -> dict[str, Any]:
    """Rows of a fused tensor: the same as of the whole one, in every layout that reads them."""
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    line, square = mesh_of(range(4)), trainers.grid("a", "b")
    whole = torch.arange(10 * 3 * 4, dtype=torch.float32).view(10, 3, 4).to(torch.bfloat16)
    found: dict[str, Any] = {}
    for mesh, places in (
        (line, [Shard(0)]),
        (line, [Shard(1)]),
        (line, [Replicate()]),
        (square, [Replicate(), Shard(0)]),
        (square, [Shard(0), Replicate()]),
        (square, [Shard(0), Shard(0)]),
        (square, [Shard(0), Shard(1)]),
    ):
        read = gather.rows_of(distribute_tensor(whole, mesh, places))
        found[str(places)] = (
            None
            if read is None
            else [
                (first, end)
                for first in range(10)
                for end in range(first, 11)
                if not torch.equal(read(first, end), whole[first:end])
            ]
        )
    return found


def rows_cost(me: Rank) -> dict[str, Any]:
    """Only the owners of rows send them; nobody gathers the rest."""
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh = mesh_of(range(4))
    read = gather.rows_of(distribute_tensor(torch.ones(8, 2), mesh, [Shard(0)]))
    before = collectives(mesh)
    read(2, 4)
    one = collectives(mesh) - before
    read(1, 5)
    return {"of one owner": one, "of three": collectives(mesh) - before - one}


# ---- three ranks whose training group breaks


def raising_read(me: Rank) -> dict[str, Any]:
    """Rank 2 fails where the others wait for it; the training group's time-out ends that."""
    model = fsdp2(llama(50), mesh_of(range(3)))
    whole, reads = gather.full, iter(range(100))

    def broken(tensor: torch.Tensor) -> torch.Tensor:
        if next(reads) == 5:
            raise RuntimeError("boom")
        return whole(tensor)

    with me.sender() as sender:
        gather.full = broken if me.rank == 2 else whole
        first = outcome(lambda: sender.update_weights(model))
        gather.full = whole
        second = outcome(lambda: sender.update_weights(model))
    return {"first": first, "second": second}


def killed_reader(me: Rank) -> dict[str, Any]:
    model = fsdp2(llama(51), mesh_of(range(3)))
    whole, reads = gather.full, iter(range(100))

    def deadly(tensor: torch.Tensor) -> torch.Tensor:
        if next(reads) == 5:
            os.kill(os.getpid(), signal.SIGKILL)
        return whole(tensor)

    gather.full = deadly if me.rank == 2 else whole
    with me.sender(timeout=10.0) as sender:
        return outcome(lambda: sender.update_weights(model))


def killed_leader(me: Rank) -> dict[str, Any]:
    model = fsdp2(llama(52), mesh_of(range(3)))

    def deadly(progress: Any) -> None:
        if progress.bucket == 2:
            os.kill(os.getpid(), signal.SIGKILL)

    with me.sender(timeout=10.0) as sender:
        return outcome(lambda: sender.update_weights(model, progress=deadly))


Suites = dict[str, tuple[int, float, tuple[Callable[[Rank], dict[str, Any]], ...]]]

SUITES: Suites = {
    "whole": (
        4,
        PATIENCE,
        (
            *(values, tied, several_updates, refused_bucket, slow_engine, absent_rank),
            *(emptied_parameter, other_weights, crossed_senders, outsider, memory, adapters),
            *(bound_default_group, rows, rows_cost),
        ),
    ),
    "raising": (3, 6.0, (raising_read,)),
    "killed": (3, PATIENCE, (killed_reader,)),
    "leaderless": (3, PATIENCE, (killed_leader,)),
}


# ---- processes


def serve(suites: Suites) -> None:
    for line in sys.stdin:
        asked = json.loads(line)
        home = Path(asked["home"])
        suite, port = suites[asked["suite"]], free_port()
        children = [start(rank, port, home, asked, suite) for rank in range(suite[0])]
        for child in children:
            os.waitpid(child, 0)
        (home / "done").touch()


def start(rank: int, port: int, home: Path, asked: dict[str, Any], suite: Any) -> int:
    child = os.fork()
    if child:
        return child
    try:
        work(rank, port, home, asked, suite)
    except BaseException:  # noqa: BLE001 - the test shows it
        (home / f"{rank}.trace").write_text(traceback.format_exc())
    finally:
        os._exit(0)


def work(rank: int, port: int, home: Path, asked: dict[str, Any], suite: Any) -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    ranks, limit, scenarios = suite
    distributed.init_process_group(
        "gloo",
        init_method=f"tcp://127.0.0.1:{port}",
        rank=rank,
        world_size=ranks,
        timeout=timedelta(seconds=limit),
    )
    me = Rank(rank, ranks, asked["url"], asked["other_url"])
    for scenario in scenarios:
        result = scenario(me)
        (home / f"{scenario.__name__}.{rank}.json").write_text(json.dumps(result))
        if len(scenarios) > 1:
            distributed.barrier()


if __name__ == "__main__":
    serve(SUITES)
