"""Ranks of a trainer that share GPUs with engines' ranks, in processes of their own, on the CPU.

Run as a script, it forks ranks as ``ranks.py`` does, for suites of its own.
"""

from __future__ import annotations

import base64
import os
import re
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import requests
import torch
from ranks import PATIENCE, Rank, Suites, outcome, serve
from torch import distributed
from trainers import SIZES, fsdp2, llama, mesh_of
from transformers import LlamaConfig, LlamaForCausalLM

from weight_update.synchronizers import SGLangGeneration, TorchPolicy, create_weight_synchronizer
from weight_update.torch_private.process_groups import default_store
from weight_update.transports import shared_memory
from weight_update.update.crew.sharer import Sharer
from weight_update.weights.stream import Stream

OPEN = "/update_weights_from_tensor"
PAUSE = "/pause_generation"
PROMPT = [3, 14, 15]
# A payload names the memory that it opens, and the name has the process that made it.
MEMORY = re.compile(rb"torch_(\d+)_")


def engines_of(me: Rank) -> list[str]:
    return list(dict.fromkeys([me.url, me.other_url]))


def sender_of(me: Rank, **options: Any) -> Any:
    return me.sender(engines_of(me), **{"transport": "ipc", **options})


def sharded(me: Rank, seed: int) -> Any:
    return fsdp2(llama(seed), mesh_of(range(me.ranks)))


def push(me: Rank, sender: Any, source: Any, seed: int) -> dict[str, Any]:
    """The outcome, what engines hold otherwise, and whose memory each of their ranks was given."""
    before = {url: len(asked(url)) for url in engines_of(me)} if me.rank == 0 else {}
    distributed.barrier()
    told = outcome(lambda: sender.update_weights(source))
    processes = gathered(os.getpid())
    if me.rank == 0:
        told["wrong"] = [me.wrong(llama(seed), url) for url in engines_of(me)]
        new = {url: asked(url)[before[url] :] for url in engines_of(me)}
        told["paused"] = any(path == PAUSE for url in new for path, _ in new[url])
        told["owners"] = [owners(new[url], processes) for url in engines_of(me)]
    distributed.barrier()
    return told


def gathered(value: int) -> list[int]:
    values: list[Any] = [None] * distributed.get_world_size()
    distributed.all_gather_object(values, value)
    return values


def asked(url: str) -> list[tuple[str, Any]]:
    answer = requests.get(f"{url}/_reference/requests", timeout=30).json()
    records = answer["requests"] if isinstance(answer, dict) else answer
    return [(record["path"], record["json"]) for record in records]


def owners(requests: list[tuple[str, Any]], processes: list[int]) -> list[list[list[int]]]:
    """For each request and each rank of the engine, the trainer's ranks whose memory it opens."""
    bodies = [body for path, body in requests if path == OPEN]
    payloads = [body["serialized_named_tensors"] for body in bodies]
    return [[_owners(entry, processes) for entry in entries] for entries in payloads]


def _owners(entry: str, processes: list[int]) -> list[int]:
    found = {int(process) for process in MEMORY.findall(base64.b64decode(entry))}
    return sorted(processes.index(process) for process in found)


def files() -> list[str]:
    """Shared memory of this process."""
    return sorted(path.name for path in Path("/dev/shm").glob(f"torch_{os.getpid()}_*"))


@contextmanager
def replaced(where: Any, name: str, value: Any) -> Iterator[None]:
    kept = getattr(where, name)
    setattr(where, name, value)
    try:
        yield
    finally:
        setattr(where, name, kept)


def updates(me: Rank) -> dict[str, Any]:
    """Several of one sender: nothing piles up, on no rank."""
    told: dict[str, Any] = {"keys": [], "files": []}
    with sender_of(me) as sender:
        for seed in (100, 101, 102):
            told[str(seed)] = push(me, sender, sharded(me, seed), seed)
            told["keys"].append(default_store().num_keys())
            told["files"].append(files())
            distributed.barrier()
    return told


def tensor_by_tensor(me: Rank) -> dict[str, Any]:
    with sender_of(me, load_format="tensors") as sender:
        return push(me, sender, sharded(me, 103), 103)


def cast(me: Rank) -> dict[str, Any]:
    """The engine's dtype is what the others plan by, too."""
    with sender_of(me, dtype="engine") as sender:
        return push(me, sender, sharded(me, 104).double(), 104)


def replicas(me: Rank) -> dict[str, Any]:
    """Every rank holds the whole model, and all take part; they connect first."""
    with sender_of(me, trainer_ranks="node") as sender:
        sender.init_all_workers_group(None)
        return push(me, sender, llama(105), 105)


def stream(me: Rank) -> dict[str, Any]:
    """What others cannot plan: all engines open the leader's memory."""
    with sender_of(me, trainer_ranks="node") as sender:
        pairs = iter(llama(106).state_dict().items())
        return push(me, sender, Stream(pairs, whole=True), 106)


def other_options(me: Rank) -> dict[str, Any]:
    """Rank 1 would cast what the others do not."""
    dtype = torch.bfloat16 if me.rank == 1 else None
    with sender_of(me, dtype=dtype) as sender:
        return push(me, sender, sharded(me, 107), 106)


def no_room(me: Rank) -> dict[str, Any]:
    """Rank 1 has no memory for its buffers; then it has."""
    free = shared_memory._free
    none = (lambda _: 0) if me.rank == 1 else free
    with sender_of(me) as sender:
        with replaced(shared_memory, "_free", none):
            first = push(me, sender, sharded(me, 108), 106)
        second = push(me, sender, sharded(me, 108), 108)
    return {"first": first, "second": second}


def failing_pack(me: Rank) -> dict[str, Any]:
    """Rank 1 cannot pack its second bucket; then it can."""
    pack, calls = Sharer.pack, iter(range(1000))

    def broken(*arguments: Any) -> Any:
        if next(calls) == 5:  # after four tries of the engines and one bucket
            raise shared_memory.ConfigurationError("out of memory", phase="transfer")
        return pack(*arguments)

    with sender_of(me) as sender:
        with replaced(Sharer, "pack", broken if me.rank == 1 else pack):
            first = push(me, sender, sharded(me, 109), 109)
        second = push(me, sender, sharded(me, 109), 109)
    return {"first": first, "second": second}


def refused_bucket(me: Rank) -> dict[str, Any]:
    """An engine says no to its second bucket; the next update heals both."""
    with sender_of(me) as sender:
        push(me, sender, sharded(me, 110), 110)
        me.arm(path=OPEN, kind="refuse", after=1, times=1, status=400)
        first = push(me, sender, sharded(me, 111), 111)
        second = push(me, sender, sharded(me, 111), 111)
    return {"first": first, "second": second}


def killed_rank(me: Rank) -> dict[str, Any]:
    """Rank 1 is killed when it packs its second bucket; a sender of one rank heals the engines."""
    pack, calls = Sharer.pack, iter(range(1000))

    def deadly(*arguments: Any) -> Any:
        if next(calls) == 5:
            os.kill(os.getpid(), signal.SIGKILL)
        return pack(*arguments)

    Sharer.pack = deadly if me.rank == 1 else pack  # type: ignore[method-assign]
    with sender_of(me) as sender:
        told = outcome(lambda: sender.update_weights(sharded(me, 112)))
    with me.sender(engines_of(me)) as sender:
        told["healed"] = outcome(lambda: sender.update_weights(llama(113)))
    return told | {"wrong": [me.wrong(llama(113), url) for url in engines_of(me)]}


def killed_leader(me: Rank) -> dict[str, Any]:
    def deadly(progress: Any) -> None:
        if progress.bucket == 2:
            os.kill(os.getpid(), signal.SIGKILL)

    with sender_of(me) as sender:
        return outcome(lambda: sender.update_weights(sharded(me, 114), progress=deadly))


def synchronizer(me: Rank, free: int | None = None, **options: Any) -> dict[str, Any]:
    """The row of the factory: each rank has its own, of its part of the model."""
    generation = SGLangGeneration(engines_of(me), timeout=PATIENCE, **options)
    policy: Any = TorchPolicy(sharded(me, 116))
    if free is not None:
        policy.get_free_memory_bytes = lambda: free
    sync = create_weight_synchronizer(policy, generation, "sglang", True)
    sync.init_communicator()

    def update() -> Any:
        sync.sync_weights()
        return sync.report

    told = push(me, SimpleNamespace(update_weights=lambda _: update()), None, 116)
    sync.shutdown()
    return told


def crossed(me: Rank) -> dict[str, Any]:
    """The first engine is on the second GPU, and the second on the first."""
    return synchronizer(me, engine_gpu_offsets=[1, 0])


def small_buffer(me: Rank) -> dict[str, Any]:
    """Every rank has other memory free: the leader's decides."""
    return synchronizer(me, 80_000 * (1 + me.rank))


class Journal:
    """What the ranks of a trainer did, as all of them see it."""

    def __init__(self, me: Rank) -> None:
        self._me, self._store = me, default_store()

    def note(self, what: str) -> None:
        self._store.set(f"journal/{what}", "")

    def has(self, what: str, seconds: float = 0.0) -> bool:
        """Whether something was noted, or is within some seconds."""
        end = time.monotonic() + seconds
        while not self._store.check([f"journal/{what}"]):
            if time.monotonic() >= end:
                return False
            time.sleep(0.01)
        return True


def making_room(me: Rank) -> dict[str, Any]:
    """Rank 1 is the last to make room; did rank 0 speak to an engine before it had?"""
    journal, early = Journal(me), []
    sync = synchronizer_of(me, 117)

    def offload() -> None:
        if me.rank == 1:
            early.append(journal.has("prepared", 1.0))

    def prepare(*, tags: Any) -> None:
        if me.rank == 0:
            journal.note("prepared")

    sync.policy.offload_before_refit = offload
    sync.generation.prepare_for_generation = prepare
    told = outcome(lambda: synced(sync))
    distributed.barrier()
    sync.shutdown()
    return told | {"early": early}


def failing_phases(me: Rank) -> dict[str, Any]:
    """One rank fails in one phase, and then in another; then none does."""
    sync, told = synchronizer_of(me, 118), {}
    for rank, side, phase in (
        (1, "policy", "offload_before_refit"),
        (0, "policy", "offload_before_refit"),
        (0, "generation", "prepare_for_generation"),
        (1, "policy", "offload_after_refit"),
    ):
        broken = _broken if me.rank == rank else getattr(getattr(sync, side), phase)
        before = len(asked(me.url)) if me.rank == 0 else 0
        distributed.barrier()
        with replaced(getattr(sync, side), phase, broken):
            told[f"{phase} {rank}"] = outcome(lambda: synced(sync)) | {"stale": sync.is_stale}
        distributed.barrier()
        if me.rank == 0:
            paths = [path for path, _ in asked(me.url)[before:]]
            told[f"{phase} {rank}"]["updated"] = OPEN in paths
    told["healed"] = push(me, SimpleNamespace(update_weights=lambda _: synced(sync)), None, 118)
    sync.shutdown()
    return told


def interrupted_phase(me: Rank) -> dict[str, Any]:
    """Somebody interrupts rank 1 while it makes room, when rank 0 already waits for it."""
    sync, journal = synchronizer_of(me, 119), Journal(me)

    def offload() -> None:
        if me.rank == 0:
            journal.note("waits")
        elif journal.has("waits", PATIENCE):
            raise KeyboardInterrupt

    sync.policy.offload_before_refit = offload
    try:
        told = outcome(lambda: synced(sync))
    except KeyboardInterrupt:
        told = {"interrupted": True}
    distributed.barrier()
    sync.shutdown()
    return told


def _broken(**_: Any) -> None:
    raise RuntimeError("no memory")


def synchronizer_of(me: Rank, seed: int) -> Any:
    generation = SGLangGeneration(engines_of(me), timeout=PATIENCE)
    sync = create_weight_synchronizer(
        TorchPolicy(sharded(me, seed)), generation, "sglang", colocated=True
    )
    sync.init_communicator()
    return sync


def synced(sync: Any) -> Any:
    sync.sync_weights()
    return sync.report


def wide(me: Rank) -> dict[str, Any]:
    """One engine of two ranks; a third rank of the trainer shares a GPU with none."""
    torch.manual_seed(115)
    model = LlamaForCausalLM(LlamaConfig(**{**SIZES, "vocab_size": 64, "intermediate_size": 64}))
    tokens = model.generate(torch.tensor([PROMPT]), max_new_tokens=8, do_sample=False)
    with sender_of(me) as sender:
        told = push(me, sender, fsdp2(model, mesh_of(range(3))), 115)
    return told | {"tokens": tokens[0, len(PROMPT) :].tolist()}


SUITES: Suites = {
    "two by two": (
        2,
        PATIENCE,
        (
            *(updates, tensor_by_tensor, cast, replicas, stream, other_options, no_room),
            *(failing_pack, refused_bucket, synchronizer, crossed, small_buffer),
            *(making_room, failing_phases, interrupted_phase),
        ),
    ),
    "wide engine": (3, PATIENCE, (wide,)),
    "killed rank": (2, PATIENCE, (killed_rank,)),
    "killed leader": (2, PATIENCE, (killed_leader,)),
}

if __name__ == "__main__":
    serve(SUITES)
