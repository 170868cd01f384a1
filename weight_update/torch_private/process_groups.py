"""Process groups that torch does not know of, and the store of the one it does.

Run on torch 2.11 (NCCL) and 2.13 (gloo). The group is built from the
backend classes themselves and not through ``torch.distributed``'s registry: torch never learns
of it, so no name is used up, no default group is split, and the group is disposed of by
dropping it.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

from weight_update.errors import ConfigurationError

_POLL_SECONDS = 0.005
_FOREVER = timedelta(days=1)
# Communicators of a group are counted from 0, and their ids kept under the number.
_FIRST_COMMUNICATOR = "0"


class RendezvousAbandoned(RuntimeError):
    """The trainer stopped waiting for its peers."""


class AbandonableStore(Store):
    """A store whose waits end as soon as the trainer gives the rendezvous up.

    A gloo group is built in a constructor that blocks until every peer has come, and nothing
    in torch interrupts it; the wait for a peer's key goes through here, so it can be.
    """

    def __init__(self, inner: Store) -> None:
        super().__init__()
        self._held: Store | None = inner
        self.awaited: tuple[str, ...] = ()

    def abandon(self) -> None:
        """Makes the wait that is running, and every later one, raise, and closes the store.

        The store lives as long as anything refers to it, and with it every peer that waits
        in the rendezvous: tracebacks must not decide when that is.
        """
        self._held = None

    @property
    def _inner(self) -> Store:
        held = self._held
        if held is None:
            raise RendezvousAbandoned(f"nobody set {', '.join(self.awaited) or 'anything'}")
        return held

    def set(self, key: str, value: Any) -> None:  # noqa: D102
        inner: Any = self._inner
        inner.set(key, value if isinstance(value, str) else bytes(value))

    def get(self, key: str) -> bytes:  # noqa: D102
        return self._inner.get(key)

    def add(self, key: str, amount: int) -> int:  # noqa: D102
        return self._inner.add(key, amount)

    def check(self, keys: Sequence[str]) -> bool:  # noqa: D102
        return self._inner.check(list(keys))

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:  # noqa: D102
        self.awaited = tuple(keys)
        while not self._inner.check(list(keys)):
            time.sleep(_POLL_SECONDS)
        self.awaited = ()


def serve_store(address: str, port: int, world_size: int, listener_fd: int) -> TCPStore:
    """Starts the rendezvous store on a socket that already listens; takes the socket over."""
    return TCPStore(
        address,
        port,
        world_size,
        is_master=True,
        timeout=timedelta(seconds=30),
        wait_for_workers=False,
        master_listen_fd=listener_fd,
    )


def reach_store(address: str, port: int, world_size: int) -> TCPStore:
    """The rendezvous store of another process, which serves it already; blocks while it calls."""
    return TCPStore(
        address,
        port,
        world_size,
        is_master=False,
        timeout=timedelta(seconds=30),
        wait_for_workers=False,
    )


def group_store(store: Store, group_name: str, device_type: str) -> AbandonableStore:
    """The key space that an engine's own ``_new_process_group_helper`` uses for the group.

    The engine prefixes with the group name, torch prefixes again with the group name and then
    with the device type; other prefixes never meet and both ends wait for their time-outs.
    """
    inner = PrefixStore(group_name, store)
    inner = PrefixStore(f"{group_name}/", inner)
    return AbandonableStore(PrefixStore(f"{device_type}/", inner))


def has_arrived(store: Store, rank: int) -> bool:
    """Whether a gloo rank has announced its address, which it does before it waits for others."""
    return store.check([f"0/{rank}"])


def places_of_gloo_ranks(store: Store, world_size: int) -> list[bytes]:
    """Where each rank of a gloo group that was built listens: socket addresses among other bytes.

    Of every two ranks one has called the other, so each connection of the group has one end here.
    """
    return [store.get(f"0/{rank}") for rank in range(world_size)]


def build_gloo(store: Store, world_size: int, address: str, rank: int = 0) -> Any:
    """Joins a gloo group as a rank, listening on ``address``; blocks until all peers came."""
    from torch._C._distributed_c10d import ProcessGroupGloo

    gloo: Any = ProcessGroupGloo
    options = gloo._Options()
    options._timeout = _FOREVER  # deadlines are kept by the caller, who drops the group
    options._threads = 2
    # Both ends must use one address family, and engines use gloo's default device: an IPv4 one.
    default = ":" in address
    device = gloo.create_default_device() if default else gloo.create_device(hostname=address)
    options._devices = [device]
    return gloo(store, rank, world_size, options)


def build_nccl(store: Store, world_size: int, group_name: str, rank: int = 0) -> Any:
    """Joins an NCCL group as a rank; its communicator is built by the first broadcast."""
    try:
        from torch._C._distributed_c10d import ProcessGroupNCCL
    except ImportError as error:
        raise ConfigurationError(
            "this torch has no NCCL", remedy="use backend='gloo', or a CUDA build of torch"
        ) from error
    nccl: Any = ProcessGroupNCCL
    options = nccl.Options()
    options.is_high_priority_stream = False
    # Past the group's own time-out torch's watchdog ends the whole process; the caller's
    # deadline aborts the communicator long before.
    options._timeout = _FOREVER
    options.group_name = group_name
    options.global_ranks_in_group = list(range(world_size))
    return nccl(store, rank, world_size, options)


def nccl_unique_id(store: Store) -> bytes | None:
    """What peers that have no torch group join an NCCL group by: NCCL's own id of it.

    Rank 0 makes it when its group is asked for the first collective, writes it here for the other
    ranks, and blocks until they all came. So ask for that collective in a thread of its own, and
    ask here again and again meanwhile. A peer calls ``ncclCommInitRank`` with the id, the group's
    world size and its rank, and takes part in that first collective like any rank.

    Args:
        store: What rank 0's group was built with; each serves one group.

    Returns:
        128 bytes, or None as long as rank 0 has not begun.
    """
    return store.get(_FIRST_COMMUNICATOR) if store.check([_FIRST_COMMUNICATOR]) else None


def broadcast(group: Any, tensor: torch.Tensor) -> Any:
    """Starts a broadcast from rank 0 and returns its work handle."""
    return group.broadcast(tensor, 0)


def default_store() -> Any:
    """The store of the trainer's own process group; None without such a group.

    All ranks can already reach it, and a message through it is no collective: a rank that waits
    for one keeps no training group from anything.
    """
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return None
    from torch.distributed.distributed_c10d import _get_default_store

    return _get_default_store()
