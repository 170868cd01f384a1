"""vLLM, on the trainer's own GPUs (memory that it opens) or on others (a collective)."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

from weight_update.synchronizers.base import ColocatedSynchronizer, DeliverySynchronizer
from weight_update.synchronizers.exchange import Exchange, Refit, checked
from weight_update.synchronizers.membership import (
    RefitMembership,
    plan_refit_membership,
    present_shards,
)
from weight_update.synchronizers.protocols import Cluster, Generation, Policy
from weight_update.synchronizers.resolve import resolve
from weight_update.waiting import Deadline

_log = logging.getLogger("weight_update")


class IPCExchange(Exchange):
    """Workers of both sides meet at a socket a GPU, and pass handles of memory."""

    sends = "stream_weights_via_ipc_zmq"
    receives = "update_weights_via_ipc_zmq"

    def transfer(self, refit: Refit, deadline: Deadline) -> None:
        """Has the policy stream and the generation open; raises unless all came."""
        received = both(
            lambda: self.policy.stream_weights_via_ipc_zmq(
                buffer_size_bytes=refit.buffer_bytes, kv_scales=refit.kv_scales
            ),
            self.generation.update_weights_via_ipc_zmq,
            deadline,
        )
        checked(received)


class CollectiveExchange(Exchange):
    """All ranks of both sides are in one group; the policy's first broadcasts.

    Args:
        policy: Sends.
        generation: Receives.
        clusters: Where the policy's workers run, and where the generation's.
        timeout_s: Seconds for one transfer; workers watch it too.

    Attributes:
        wanted: Which engines the group is to span; None for all, as at first.
        built: Which it spans.
    """

    takes_buffer = False
    sends = "broadcast_weights_for_collective"
    receives = "update_weights_from_collective"

    def __init__(
        self,
        policy: Any,
        generation: Any,
        clusters: tuple[Cluster, Cluster],
        timeout_s: float | None = None,
    ) -> None:
        super().__init__(policy, generation, timeout_s)
        self.wanted: RefitMembership | None = None
        self.built: RefitMembership | None = None
        self._train, self._inference = clusters
        self._due = False

    def announce(self) -> None:
        """Tells the generation what will come; a group is to follow."""
        super().announce()
        self._due = True

    def _plan(self, absent_shards: Iterable[int]) -> RefitMembership:
        """Which engines the group would span without some."""
        workers = self.generation.worker_group
        return plan_refit_membership(
            surviving_shards=present_shards(absent_shards, workers.dp_size),
            dp_size=workers.dp_size,
            total_gen_workers=len(workers.workers),
            train_world_size=int(self._train.world_size()),
        )

    def choose(self, absent_shards: Iterable[int], *, force: bool) -> bool:
        """Says which engines the next group spans; whether one has to be made."""
        wanted = self._plan(absent_shards)
        if wanted == (self.built or self._plan(())) and not (force or self._due):
            return False
        self.wanted, self._due = wanted, True
        return True

    def connect(self, *, again: bool) -> None:
        """Makes the group, at a new port, where one is due or was given up."""
        if self._due or again:
            self.wait(self._joining(), "connect")
            self.built, self._due = self.wanted, False

    def _joining(self) -> list[Any]:
        """What the calls return by which both sides join."""
        address, port = self._train.get_master_address_and_port()
        train_ranks, member = int(self._train.world_size()), self.wanted
        ranks = train_ranks + self._inference_ranks() if member is None else member.world_size
        peer = self.generation.get_collective_sender_spec().nccl_peer
        joining = [
            self.policy.init_collective(
                address, port, ranks, train_world_size=train_ranks, nccl_peer=peer
            )
        ]
        if member is None:
            return [
                *joining,
                self.generation.init_collective(address, port, ranks, train_world_size=train_ranks),
            ]
        self.generation.set_refit_membership(member)
        return [*joining, self.generation.rebuild_collective(member, address, port)]

    def _inference_ranks(self) -> int:
        told = self.generation.get_inference_world_size()
        return int(self._inference.world_size() if told is None else told)

    def transfer(self, refit: Refit, deadline: Deadline) -> None:
        """Has the policy broadcast and the generation receive; raises unless all came."""
        spec = self.generation.get_collective_sender_spec()
        received = both(
            lambda: self.policy.broadcast_weights_for_collective(
                kv_scales=refit.kv_scales,
                refit_timeout_s=self.timeout_s,
                buffer_size_bytes=spec.buffer_size_bytes,
                num_buffers=spec.num_buffers,
            ),
            self._receive,
            deadline,
        )
        checked(received)

    def _receive(self) -> Any:
        if getattr(self.generation, "supports_refit_worker_timeout", None) is False:
            return self.generation.update_weights_from_collective()
        return self.generation.update_weights_from_collective(refit_timeout_s=self.timeout_s)


def both(send: Callable[[], Any], receive: Callable[[], Any], deadline: Deadline) -> Any:
    """Starts both sides, and waits for both; what the receivers said.

    A failure of one is raised when the other has ended too, or at the deadline.
    """
    sent = send()
    try:
        received = receive()
    except Exception:
        with suppress(Exception):
            resolve(sent, deadline)
        raise
    return resolve([sent, received], deadline)[1]


class IPCWeightSynchronizer(ColocatedSynchronizer):
    """The trainer and vLLM share GPUs; see :class:`ColocatedSynchronizer` for the steps."""

    takes_kv_scales = True

    def _exchange(self) -> Exchange:
        return IPCExchange(self.policy, self.generation, self._refit_timeout_s)


class CollectiveWeightSynchronizer(DeliverySynchronizer):
    """vLLM has GPUs of its own: one group spans the trainer and all engines.

    Args:
        policy: The trainer.
        generation: The engines.
        train_cluster: Where the trainer's workers run.
        inference_cluster: Where the engines' workers run.
        refit_timeout_s: Seconds for one refit; None takes the default, which is finite.
        release_grads_before_refit: Whether the trainer frees gradients before it sends.
        refit_buffer_size_gb: Size of a bucket. NeMo-RL's own sides agree on one by themselves.
    """

    takes_kv_scales = True
    connects_first = True
    exchange: type[CollectiveExchange] = CollectiveExchange

    def __init__(
        self,
        policy: Policy,
        generation: Generation,
        train_cluster: Cluster,
        inference_cluster: Cluster,
        refit_timeout_s: float | None = None,
        *,
        release_grads_before_refit: bool = False,
        refit_buffer_size_gb: float | None = None,
    ) -> None:
        self._clusters = (train_cluster, inference_cluster)
        self._releases = release_grads_before_refit
        super().__init__(policy, generation, refit_buffer_size_gb, refit_timeout_s=refit_timeout_s)

    def _exchange(self) -> Exchange:
        if self._refit_buffer_size_gb is not None:
            _log.warning(
                "refit_buffer_size_gb is not used here: the generation says how a collective's "
                "bytes are packed (get_collective_sender_spec)"
            )
        return self.exchange(self.policy, self.generation, self._clusters, self._refit_timeout_s)

    @contextmanager
    def _phases(self) -> Iterator[None]:
        if self._releases:
            self._carrier.together(self._offload)
        yield

    def reconcile_communicator(
        self, absent_shards: Iterable[int], force: bool = False
    ) -> bool | None:
        """Rebuilds the group if it spans other engines than it should; see the interface.

        Raises:
            NoSurvivingShards: No engine would be left.
            WeightUpdateError: An engine refused, or did not come.
        """
        with self._exclusively():
            if not self._carrier.choose(absent_shards, force=force):
                return False
            self._outdate()
            self._carrier.connect()
            return True
