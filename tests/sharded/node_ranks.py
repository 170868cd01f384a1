"""Ranks of a trainer that all join the group of their updates, in processes of their own.

Run as a script, it forks ranks as ``ranks.py`` does, for suites of its own.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import requests
import torch
from ranks import PATIENCE, UPDATE, Rank, Suites, outcome, serve
from torch import distributed
from trainers import fsdp2, llama, mesh_of

from weight_update.torch_private.process_groups import default_store
from weight_update.transports import rank_channel
from weight_update.update.crew import relay
from weight_update.weights.stream import Stream

JOIN = "/init_weights_update_group"


def engines_of(me: Rank) -> list[str]:
    return [me.url, me.other_url]


def sender_of(me: Rank, **options: Any) -> Any:
    return me.sender(engines_of(me), trainer_ranks="node", **options)


def push(me: Rank, sender: Any, model: Any, seed: int) -> dict[str, Any]:
    """The outcome of an update, what the engines hold otherwise, and where they were to join."""
    before = {url: len(joins(url)) for url in engines_of(me)} if me.rank == 0 else {}
    distributed.barrier()
    told = outcome(lambda: sender.update_weights(model))
    distributed.barrier()
    if me.rank == 0:
        told["wrong"] = [me.wrong(llama(seed), url) for url in engines_of(me)]
        told["joined"] = [joins(url)[before[url] :] for url in engines_of(me)]
    told["group"] = held_by(sender)
    return told


def joins(url: str) -> list[tuple[int, int]]:
    """Rank offset and world size of each request to join a group."""
    answer = requests.get(f"{url}/_reference/requests", timeout=30).json()
    records = answer["requests"] if isinstance(answer, dict) else answer
    bodies = [record["json"] for record in records if record["path"] == JOIN]
    return [(body["rank_offset"], body["world_size"]) for body in bodies]


def held_by(sender: Any) -> str:
    """The group that this rank is in as a follower, as far as it knows."""
    held: str = sender._transport._ranks._relaying.relay.group
    return held


@contextmanager
def replaced(where: Any, name: str, value: Any) -> Iterator[None]:
    kept = getattr(where, name)
    setattr(where, name, value)
    try:
        yield
    finally:
        setattr(where, name, kept)


def replicas(me: Rank) -> dict[str, Any]:
    """Every rank holds the whole model; two updates in one group."""
    with sender_of(me) as sender:
        first = push(me, sender, llama(60), 60)
        second = push(me, sender, llama(61), 61)
        world = sender._transport.world_size
    return {"first": first, "second": second, "world": world}


def tensor_by_tensor(me: Rank) -> dict[str, Any]:
    """Broadcasts of many sizes and dtypes in one bucket."""
    with sender_of(me, load_format="tensors", bucket_bytes=1 << 30) as sender:
        return push(me, sender, llama(62), 62)


def sharded(me: Rank) -> dict[str, Any]:
    """Gathers and broadcasts side by side; messages do not pile up."""
    mesh = mesh_of(range(me.ranks))
    told: dict[str, Any] = {"keys": []}
    with sender_of(me) as sender:
        for seed in (63, 64, 65):
            told[str(seed)] = push(me, sender, fsdp2(llama(seed), mesh), seed)
            distributed.barrier()
            told["keys"].append(default_store().num_keys())
            distributed.barrier()
    return told


def stream(me: Rank) -> dict[str, Any]:
    """Sizes are not known beforehand; the leader's alone is read."""
    read: list[str] = []

    def pairs() -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in llama(66).state_dict().items():
            read.append(name)
            yield name, tensor

    with sender_of(me) as sender:
        told = push(me, sender, Stream(pairs(), whole=True), 66)
    return told | {"read": len(read)}


def connected_first(me: Rank) -> dict[str, Any]:
    """All ranks make the group together, and use it."""
    with sender_of(me) as sender:
        sender.init_all_workers_group(None)
        connected = sender._transport.check_connection()
        return push(me, sender, llama(67), 67) | {"connected": connected}


def refused_bucket(me: Rank) -> dict[str, Any]:
    """An engine says no to its second bucket; the next update heals both."""
    with sender_of(me) as sender:
        push(me, sender, llama(68), 68)
        me.arm(path=UPDATE, kind="refuse", after=1, times=1, status=400)
        first = push(me, sender, llama(69), 69)
        second = push(me, sender, llama(69), 69)
    return {"first": first, "second": second}


def dead_wire(me: Rank) -> dict[str, Any]:
    """An engine never takes the second bucket, and the deadline ends it."""
    with sender_of(me, timeout=8.0) as sender:
        me.arm(path=UPDATE, kind="hang", after=1, times=1, seconds=20.0)
        first = push(me, sender, llama(70), 70)
    with sender_of(me) as sender:
        second = push(me, sender, llama(70), 70)
    return {"first": first, "second": second}


def quorum(me: Rank) -> dict[str, Any]:
    """An engine is left out of an update that has begun: the ranks meet anew with the other."""
    with sender_of(me, quorum=1) as sender:
        me.arm(path=UPDATE, kind="refuse", after=1, times=1, status=400)
        first = push(me, sender, llama(71), 71)
        second = push(me, sender, llama(71), 71)
    return {"first": first, "second": second}


def another_host(me: Rank) -> dict[str, Any]:
    """The last rank is elsewhere: it follows, and does not join."""
    host = "elsewhere" if me.rank == me.ranks - 1 else "here"
    with replaced(rank_channel, "this_host", lambda: host), sender_of(me) as sender:
        return push(me, sender, llama(72), 72)


def late_rank(me: Rank) -> dict[str, Any]:
    """The last rank hears of the group, and does not come; then it does."""
    last = me.rank == me.ranks - 1
    ignored = (lambda *_: None) if last else relay.Relay.join
    with sender_of(me, timeout=8.0) as sender:
        with replaced(relay.Relay, "join", ignored):
            first = push(me, sender, llama(73), 73)
        second = push(me, sender, llama(73), 73)
    return {"first": first, "second": second}


def failing_rank(me: Rank) -> dict[str, Any]:
    """The last rank has no memory for the second bucket; then it has."""
    places, calls = relay.Scratch.places, iter(range(1000))

    def broken(*arguments: Any) -> Any:
        if next(calls) == 1:
            raise RuntimeError("out of memory")
        return places(*arguments)

    with sender_of(me) as sender:
        with replaced(relay.Scratch, "places", broken if me.rank == me.ranks - 1 else places):
            first = push(me, sender, llama(74), 74)
        second = push(me, sender, llama(74), 74)
    return {"first": first, "second": second}


def forgotten_group(me: Rank) -> dict[str, Any]:
    """Between two updates a rank makes its sender anew: the ranks meet anew."""
    sender = sender_of(me)
    first = push(me, sender, llama(75), 75)
    if me.rank == 1:
        sender.shutdown()
        sender = sender_of(me)
    second = push(me, sender, llama(76), 76)
    sender.shutdown()
    return {"first": first, "second": second}


def by_disk(me: Rank) -> dict[str, Any]:
    """Where nothing is broadcast, all call and follow."""
    with sender_of(me, transport="disk") as sender:
        return push(me, sender, llama(77), 77)


def background(me: Rank) -> dict[str, Any]:
    with sender_of(me) as sender:
        return outcome(lambda: sender.update_weights_async(llama(78)).result(PATIENCE))


def killed_rank(me: Rank) -> dict[str, Any]:
    """Rank 1 is killed at its second bucket; a sender of one rank then heals the engines."""
    places, calls = relay.Scratch.places, iter(range(1000))

    def deadly(*arguments: Any) -> Any:
        if next(calls) == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return places(*arguments)

    relay.Scratch.places = deadly if me.rank == 1 else places  # type: ignore[method-assign]
    with sender_of(me) as sender:
        told = outcome(lambda: sender.update_weights(llama(80)))
    if me.rank == 0:
        with me.sender(engines_of(me)) as sender:
            told["healed"] = outcome(lambda: sender.update_weights(llama(81)))
        told["wrong"] = [me.wrong(llama(81), url) for url in engines_of(me)]
    return told


def killed_leader(me: Rank) -> dict[str, Any]:
    def deadly(progress: Any) -> None:
        if progress.bucket == 2:
            os.kill(os.getpid(), signal.SIGKILL)

    with sender_of(me, timeout=10.0) as sender:
        return outcome(lambda: sender.update_weights(llama(82), progress=deadly)) | {
            "group": held_by(sender)
        }


Scenario = Callable[[Rank], dict[str, Any]]
WHOLE: tuple[Scenario, ...] = (
    *(replicas, tensor_by_tensor, sharded, stream, connected_first, refused_bucket, dead_wire),
    *(quorum, another_host, late_rank, failing_rank, forgotten_group, by_disk, background),
)
SUITES: Suites = {
    "node of two": (2, PATIENCE, (replicas, sharded)),
    "node of three": (3, PATIENCE, WHOLE),
    "killed rank": (3, PATIENCE, (killed_rank,)),
    "killed leader": (3, PATIENCE, (killed_leader,)),
}

if __name__ == "__main__":
    serve(SUITES)
