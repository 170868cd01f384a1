"""Groups for engines that know no torch group: over NCCL they join by the group's id."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from weakref import WeakValueDictionary

import torch

from weight_update.errors import UpdateTimeout, WeightUpdateError
from weight_update.options import UpdateOptions
from weight_update.torch_private import process_groups
from weight_update.transports.process_group import UpdateGroup, open_group
from weight_update.waiting import Deadline

_POLL_SECONDS = 0.005
# Releases of vLLM that take no id look for it in the trainer's store: a pickled ``ncclUniqueId``,
# which is their own class. Run against their rendezvous of 0.27.1 and 0.32.0.
RENDEZVOUS_KEY = "broadcast_from/0/0"
_CLASS = b"cvllm.distributed.device_communicators.pynccl_wrapper\nncclUniqueId\n"


class IdGroup(UpdateGroup):
    """Rank 0 of a group; its other ranks are told the id of its NCCL communicator.

    They join it at once and sum one number, in which every rank must take part: over NCCL,
    :meth:`join` builds the communicator and returns when all have come.
    """

    _meeting: Any = None

    def _rendezvous(self, port: int | None) -> tuple[int, Any]:
        port, self._meeting = super()._rendezvous(port)
        return port, self._meeting

    def give_up(self) -> None:
        """Frees both ends without waiting for anyone; safe to call at any time, repeatedly."""
        self._meeting = None  # the store closes when nothing refers to it
        super().give_up()

    def _build(self) -> None:
        super()._build()
        if self.backend == "nccl" and not self.given_up:
            with torch.cuda.device(self.device):
                self._group.allreduce(torch.zeros(1, device=self.device)).wait()
            self._built = True

    def unique_id(self, deadline: Deadline) -> bytes:
        """The id, as soon as :meth:`join` has begun; from then on it is in the store, too.

        Raises:
            UpdateTimeout: It had not begun at the deadline.
            WeightUpdateError: The group was given up.
        """
        while True:
            try:
                found = process_groups.nccl_unique_id(self._store)
            except process_groups.RendezvousAbandoned as error:
                raise WeightUpdateError("the group was given up", phase="connect") from error
            if found is not None:
                if self._meeting is not None:
                    self._meeting.set(RENDEZVOUS_KEY, pickled_id(found))
                return found
            if deadline.expired():
                raise UpdateTimeout("NCCL made no id for the group", phase="connect")
            deadline.sleep(_POLL_SECONDS)


def pickled_id(unique_id: bytes) -> bytes:
    """An id as vLLM's ranks pickle it for each other.

    Example:
        >>> import pickletools
        >>> [found for _, found, _ in pickletools.genops(pickled_id(bytes(128))) if found][1]
        '_ctypes _unpickle'
    """
    fields, size = b"}", bytes([len(unique_id)])
    state = fields + b"C" + size + unique_id + b"\x86"
    return b"\x80\x03" + b"c_ctypes\n_unpickle\n" + _CLASS + state + b"\x86R."


class IdGroups:
    """Opens groups, and tells their ids to who knows their names."""

    def __init__(self) -> None:
        self._groups: WeakValueDictionary[str, IdGroup] = WeakValueDictionary()

    def open_group(
        self,
        urls: Sequence[str],
        options: UpdateOptions,
        world_size: int,
        device: torch.device,
        *,
        name: str | None = None,
    ) -> IdGroup:
        """A group that listens where the engines at ``urls`` can reach it.

        Raises:
            ConfigurationError: No route leads to an engine, or the address or port cannot be used.
        """
        group = open_group(urls, options, world_size, device, kind=IdGroup, name=name)
        self._groups[group.name] = group
        return group

    def unique_id(self, name: str, deadline: Deadline) -> bytes:
        """The id of an NCCL group, as soon as it has one.

        Raises:
            WeightUpdateError: There is no such group any more, or it did not come in time.
        """
        group = self._groups.get(name)
        if group is None:
            raise WeightUpdateError(f"there is no group {name}", phase="connect")
        return group.unique_id(deadline)
