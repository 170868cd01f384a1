"""An engine's end of a weight-update group, driven over stdin; run as a script.

The group is built with torch's own helper, as engines build theirs, so that the trainer's end
is tested against the real key space. Each line in is a JSON command, each line out its answer.
"""

from __future__ import annotations

import json
import sys
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d
from torch.distributed.rendezvous import rendezvous


class Peer:
    """One rank of one group at a time."""

    def __init__(self) -> None:
        self._group: Any = None

    def join(self, url: str, rank: int, world_size: int, name: str, timeout: float) -> str:
        limit = timedelta(seconds=timeout)
        store, rank, world_size = next(rendezvous(url, rank, world_size, timeout=limit))
        store.set_timeout(limit)
        self._group, _ = c10d._new_process_group_helper(
            world_size,
            rank,
            [],
            c10d.Backend("gloo"),
            c10d.PrefixStore(name, store),
            group_name=name,
            backend_options=None,
            timeout=limit,
        )
        c10d._world.pg_group_ranks[self._group] = {i: i for i in range(world_size)}
        return "joined"

    def receive(self, specs: list[tuple[str, list[int]]]) -> list[list[int]]:
        """Receives tensors one after the other; answers with their bytes."""
        received = []
        for dtype, shape in specs:
            tensor = torch.empty(shape, dtype=getattr(torch, dtype))
            dist.broadcast(tensor, src=0, group=self._group)
            received.append(tensor.reshape(-1).view(torch.uint8).tolist())
        return received

    def swallow(self, size: int) -> int:
        """Receives so many bytes; answers with their sum alone."""
        tensor = torch.empty(size, dtype=torch.uint8)
        dist.broadcast(tensor, src=0, group=self._group)
        return int(tensor.sum())

    def leave(self) -> str:
        group, self._group = self._group, None
        dist.destroy_process_group(group)
        return "left"


def main() -> None:
    peer = Peer()
    for line in sys.stdin:
        command, arguments = json.loads(line)
        try:
            answer = {"ok": getattr(peer, command)(**arguments)}
        except Exception as error:  # noqa: BLE001 - the test judges it
            answer = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
