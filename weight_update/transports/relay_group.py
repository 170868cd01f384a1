"""The end of a group on another rank of the trainer, which takes what the engines get."""

from __future__ import annotations

from typing import Any

import torch

from weight_update.torch_private import process_groups
from weight_update.transports.process_group import UpdateGroup


class RelayGroup(UpdateGroup):
    """A rank between rank 0 and the engines; it calls rank 0, which listens.

    Its :meth:`broadcast` receives, and passes on what others are to have from it.

    Args:
        name: Name of the group that rank 0 made.
        address: Where rank 0 listens; on this host.
        port: Likewise.
        world_size: All ranks of the group.
        rank: The rank of this process.
        device: Device of the tensors that are received.
    """

    def __init__(
        self,
        *,
        name: str,
        address: str,
        port: int,
        world_size: int,
        rank: int,
        device: torch.device,
    ) -> None:
        self.rank = rank
        super().__init__(
            address=address, port=port, world_size=world_size, device=device, name=name
        )

    def _rendezvous(self, port: int | None) -> tuple[int, Any]:
        if port is None:
            raise ValueError("a relay calls a port that it was told")
        return port, process_groups.reach_store(self.address, port, self.world_size)
