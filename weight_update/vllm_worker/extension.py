"""Methods for ``/collective_rpc``."""

from __future__ import annotations

from typing import Any

import torch

from weight_update.vllm_worker.memory import uuid_of
from weight_update.vllm_worker.reload import LayerwiseReload
from weight_update.vllm_worker.shared_update import receive_shared_weights


class WorkerExtension:
    """Methods that vLLM adds to each of its workers, for ``POST /collective_rpc``."""

    rank: int
    device: torch.device

    def weight_update_put_back(self) -> None:
        """Puts old weights back into layers that an update of vLLM's own routes left waiting.

        An empty update does so too, unless a layer got some of its weights, or a wrong one: these
        it would be made of.
        """
        LayerwiseReload(self).put_back()

    def weight_update_place(self) -> dict[str, Any]:
        """Which worker this is, and the UUID of its GPU; empty on the CPU."""
        return {"rank": self.rank, "device": uuid_of(self.device)}

    def weight_update_from_memory(
        self, addresses: dict[str, str], seconds: float
    ) -> dict[str, Any]:
        """Takes one update in memory of the trainer; see :func:`receive_shared_weights`.

        Args:
            addresses: Of the trainer's sockets, by the worker's rank.
            seconds: How long the first message may take at most.
        """
        address = addresses[str(self.rank)]
        return receive_shared_weights(address, LayerwiseReload(self), self.device, seconds)
