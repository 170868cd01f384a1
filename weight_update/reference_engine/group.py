"""The process group on which weights arrive, built as SGLang builds it."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d
from torch.distributed.rendezvous import rendezvous


@dataclass(frozen=True)
class GroupAddress:
    """Where a group meets and who comes.

    Args:
        host: Address of rank 0, which is the trainer; IPv6 without brackets is fine.
        port: Its port.
        rank: The rank of this process.
        world_size: How many ranks meet.
        name: Name of the group; both ends must use the same.
        backend: ``nccl`` or ``gloo``; both ends must use the same.
        raw: Whether the host is used as it is, so that IPv6 without brackets fails.
    """

    host: str
    port: int
    rank: int
    world_size: int
    name: str
    backend: str
    raw: bool = False

    @property
    def url(self) -> str:
        """The rendezvous address; an IPv6 host needs brackets to be parsed."""
        if self.raw:
            return f"tcp://{self.host}:{self.port}"
        bare = self.host.strip("[]")
        return f"tcp://[{bare}]:{self.port}" if ":" in bare else f"tcp://{bare}:{self.port}"


def join(address: GroupAddress, timeout: timedelta) -> Any:
    """Meet the other ranks and return the group; blocks until all came or time is out.

    The group stays apart from torch's default group, and its store keys carry the group's
    name: the public ``init_process_group`` uses another prefix and would never meet it.
    """
    store, rank, world_size = next(
        rendezvous(address.url, address.rank, address.world_size, timeout=timeout)
    )
    store.set_timeout(timeout)
    group, _ = c10d._new_process_group_helper(
        world_size,
        rank,
        [],
        c10d.Backend(address.backend),
        c10d.PrefixStore(address.name, store),
        group_name=address.name,  # type: ignore[arg-type]
        backend_options=None,
        timeout=timeout,
    )
    c10d._world.pg_group_ranks[group] = {i: i for i in range(world_size)}
    return group


def leave(group: Any) -> None:
    """Destroy ``group`` on this side."""
    dist.destroy_process_group(group)
