"""The owner of one weight-update group: rendezvous, join, broadcast, and giving it up.

A group serves one attempt to connect and all updates after it; once anything went wrong in
it, it is given up and a new one, under a new name and on a new port, takes its place.
"""

from __future__ import annotations

import atexit
import os
import secrets
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future, wait
from typing import Any, TypeVar
from weakref import WeakSet

import torch

from weight_update.errors import ConfigurationError, EngineUnreachable, WeightUpdateError
from weight_update.options import UpdateOptions
from weight_update.torch_private import process_groups
from weight_update.transports.address import check_address, choose_address, listen
from weight_update.transports.sockets import end_connections
from weight_update.waiting import spawn

_EXIT_SECONDS = 2.0


class UpdateGroup:
    """Rank 0 of a group whose other ranks are the engines'.

    The listener is bound in the constructor, so address and port are this process's own
    before any engine is told of them.

    Args:
        address: Address of this host that the engines reach.
        port: Port to listen on; None takes a free one.
        world_size: 1 + the ranks of all engines.
        device: Device of the tensors that are broadcast.
        name: Name of the group; None makes one that was never used.

    Attributes:
        name: Name of the group, never used twice.
        rank: The rank of this process.
    """

    rank = 0

    def __init__(
        self,
        *,
        address: str,
        port: int | None,
        world_size: int,
        device: torch.device,
        name: str | None = None,
    ) -> None:
        self.name = name or f"weight_update_{os.getpid()}_{secrets.token_hex(6)}"
        self._port_was_free = port is None
        self.address = address
        self.world_size = world_size
        self.device = device
        self.port, tcp_store = self._rendezvous(port)
        self._store = process_groups.group_store(tcp_store, self.name, device.type)
        self._group: Any = None
        self._works: list[Any] = []
        self._building: Future[list[Any]] | None = None
        self._built = self.backend == "gloo"
        self.given_up = False
        self._places: list[bytes] = []
        self._process = os.getpid()
        _living.add(self)

    def _rendezvous(self, port: int | None) -> tuple[int, Any]:
        """The port and the store where the ranks meet."""
        listener = listen(self.address, port)
        port = listener.getsockname()[1]
        return port, process_groups.serve_store(
            self.address, port, self.world_size, listener.detach()
        )

    @property
    def backend(self) -> str:
        """The torch backend, by device; the engines must use the same."""
        return "nccl" if self.device.type == "cuda" else "gloo"

    def join(self) -> None:
        """Joins as rank 0; blocks until every peer came or :meth:`give_up` is called."""
        joining: Future[None] = Future()
        _endings.append(joining)
        try:
            self._build()
        finally:
            joining.set_result(None)

    def _build(self) -> None:
        if self.backend == "nccl":
            group = process_groups.build_nccl(self._store, self.world_size, self.name, self.rank)
        else:
            group = process_groups.build_gloo(self._store, self.world_size, self.address, self.rank)
            self._places = process_groups.places_of_gloo_ranks(self._store, self.world_size)
        self._group = group
        if self.given_up:
            self.give_up()

    def arrived(self, rank: int) -> bool:
        """Whether a rank is seen waiting in the rendezvous; NCCL ranks answer at once instead."""
        return self.backend == "gloo" and process_groups.has_arrived(self._store, rank)

    def decoy(self) -> UpdateGroup | None:
        """A rendezvous of the same name and place, for engines that come when it is over.

        None where the port was the user's choice, since the next group needs it, or where
        somebody else has taken it.
        """
        if not self._port_was_free:
            return None
        try:
            group = UpdateGroup(
                address=self.address,
                port=self.port,
                world_size=self.world_size,
                device=self.device,
                name=self.name,
            )
        except ConfigurationError:
            return None
        group._port_was_free = True
        return group

    def missing_rank(self) -> int | None:
        """The rank that :meth:`join` is waiting for right now, when that is known."""
        key = next(iter(self._store.awaited), "")
        rank = key.rpartition("/")[2]
        return int(rank) if rank.isdecimal() else None

    def broadcast(self, tensors: list[torch.Tensor]) -> None:
        """Starts broadcasting the tensors from rank 0, in order; :meth:`moving` tells the rest.

        An NCCL group takes more while bytes still move: what the caller's stream is asked from now
        on begins when all but these tensors have left.

        The first broadcast of an NCCL group builds the communicator, which blocks until every
        peer takes part: it runs in a thread of its own, so that the answers can be watched.
        """
        group = self._group
        if group is None or self.given_up:
            raise WeightUpdateError("the group was given up", phase="transfer")
        if self._built:
            self._behind_what_moves()
            self._works += _broadcast_all(group, tensors)
            return
        torch.cuda.current_stream(self.device).synchronize()
        self._building = spawn(_broadcast_after, self._building, group, tensors)

    def _behind_what_moves(self) -> None:
        """Has the caller's stream wait for what NCCL was asked before; the host does not."""
        if self.backend == "nccl":
            _wait_for([*self._works])

    def moving(self) -> bool:
        """Whether bytes of any :meth:`broadcast` are still under way.

        Raises:
            EngineUnreachable: A peer is gone.
            WeightUpdateError: The group was given up: an aborted NCCL broadcast reads as
                completed, so what was given up is remembered here.
        """
        if self.given_up:
            raise WeightUpdateError("the group was given up", phase="transfer")
        if not self._collect_first_works():
            return True
        if not all(work.is_completed() for work in self._works):
            return True
        works, self._works = self._works, []
        _wait_for(works)
        return False

    def _collect_first_works(self) -> bool:
        if self._building is None:
            return True
        if not self._building.done():
            return False
        try:
            self._works = self._building.result()
        except RuntimeError as error:
            raise WeightUpdateError(
                f"the communicator was not built: {error}", phase="transfer"
            ) from error
        self._building, self._built = None, True
        return True

    def give_up(self) -> None:
        """Frees both ends without waiting for anyone; safe to call at any time, repeatedly.

        NCCL: ``abort()`` frees this end in half a second, while destroying the group hangs.
        gloo: aborting wakes nobody; dropping the last reference closes the sockets, but waits
        for broadcasts that wait for peers, for ever if one of them died (seen in gloo's
        ``waitSend``) - hence the thread, and hence the connections are ended before.
        """
        repeated, self.given_up = self.given_up, True
        held = [self._group, self._works]
        self._group, self._works = None, []
        if held[0] is not None and self.backend == "nccl":
            _endings.append(spawn(_abort, held, self._store))
        elif held[0] is not None or not repeated:
            if os.getpid() == self._process:  # a fork shares the connections
                end_connections(self._places)
            self._store.abandon()
            _endings.append(spawn(held.clear))

    def give_up_at_exit(self) -> None:
        """As :meth:`give_up`, of a group that is in use; a fork leaves it to its parent."""
        if not self.given_up and os.getpid() == self._process:
            self.give_up()


_endings: deque[Future[None]] = deque(maxlen=64)
_living: WeakSet[UpdateGroup] = WeakSet()


@atexit.register
def _let_groups_end() -> None:
    # A thread that comes back from dropping a group into an interpreter that is being torn
    # down takes the process down with it (SIGABRT); one that stays stuck does no harm. So does a
    # group that was never given up, if its peer died: its own threads end after Python has.
    for group in list(_living):
        group.give_up_at_exit()
    wait(list(_endings), timeout=_EXIT_SECONDS)


def _wait_for(works: list[Any]) -> None:
    """Waits for works as torch understands it, and lets go of them.

    Raises:
        EngineUnreachable: A peer is gone.
    """
    try:
        while works:
            works.pop(0).wait()
    except RuntimeError as error:
        # A work keeps the sockets of its group open, and with them every peer that waits:
        # a traceback, which lives as long as somebody looks at the error, must not hold one.
        works.clear()
        raise EngineUnreachable(f"the broadcast failed: {error}", phase="transfer") from error


def _broadcast_all(group: Any, tensors: list[torch.Tensor]) -> list[Any]:
    return [process_groups.broadcast(group, tensor) for tensor in tensors]


def _broadcast_after(
    before: Future[list[Any]] | None, group: Any, tensors: list[torch.Tensor]
) -> list[Any]:
    earlier = [] if before is None else before.result()
    return earlier + _broadcast_all(group, tensors)


def _abort(held: list[Any], store: process_groups.AbandonableStore) -> None:
    held[0].abort()
    held.clear()  # NCCL's monitor reads the store until its group is gone
    store.abandon()


_G = TypeVar("_G", bound=UpdateGroup)


def open_group(
    urls: Sequence[str],
    options: UpdateOptions,
    world_size: int,
    device: torch.device,
    *,
    kind: type[_G] = UpdateGroup,  # type: ignore[assignment]  # a default that mypy cannot bind
    name: str | None = None,
) -> _G:
    """A group that listens where the engines at ``urls`` can reach it.

    Raises:
        ConfigurationError: No route leads to an engine, or the address or port cannot be used.
    """
    given = options.master_address
    address = check_address(given) if given else choose_address(urls)
    port = options.master_port
    return kind(address=address, port=port, world_size=world_size, device=device, name=name)
