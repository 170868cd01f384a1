"""Dynamo, which exposes vLLM's native weight transfer: a collective whose handshake is vLLM's."""

from __future__ import annotations

from collections.abc import Iterable

from weight_update.errors import ConfigurationError
from weight_update.synchronizers.rows.vllm import (
    CollectiveExchange,
    CollectiveWeightSynchronizer,
)

PEER = "vllm"


class DynamoExchange(CollectiveExchange):
    """A collective with vLLM's own receivers."""

    def check(self) -> None:
        """Raises unless the generation asks for vLLM's handshake; another one hangs."""
        peer = self.generation.get_collective_sender_spec().nccl_peer
        if isinstance(peer, str) and peer != PEER:
            raise ConfigurationError(
                f"dynamo's workers speak the handshake {PEER!r}, and the generation asks for "
                f"{peer!r}, on which both sides would wait for ever",
                phase="plan",
                remedy=f"have get_collective_sender_spec() return nccl_peer={PEER!r}",
            )

    def announce(self) -> None:
        """Tells the generation what will come, once the handshake is known to fit."""
        self.check()
        super().announce()


class DynamoWeightSynchronizer(CollectiveWeightSynchronizer):
    """Dynamo's workers: a collective over a fleet that does not change."""

    exchange = DynamoExchange

    def reconcile_communicator(
        self, absent_shards: Iterable[int], force: bool = False
    ) -> bool | None:
        """Which workers there are is dynamo's to decide: None."""
        return None
