"""The gloo group that weights come in, built of torch's own parts."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
from torch import distributed

_SILENCE = timedelta(minutes=5)


class GlooWire:
    """The server's end of a trainer's group; the trainer is rank 0.

    Args:
        info: What the trainer said when it made the group.
    """

    def __init__(self, info: dict[str, Any]) -> None:
        world_size, name = info["world_size"], info["group_name"]
        store: Any = distributed.TCPStore(
            info["master_address"],
            info["master_port"],
            world_size,
            is_master=False,
            timeout=_SILENCE,
            wait_for_workers=False,
        )
        for prefix in (name, f"{name}/", "cpu/"):
            store = distributed.PrefixStore(prefix, store)
        self._group = distributed.ProcessGroupGloo(store, info["rank_offset"], world_size, _SILENCE)

    def receive(self, shape: list[int], dtype: torch.dtype) -> torch.Tensor:
        """The next tensor."""
        value = torch.empty(shape, dtype=dtype)
        self._group.broadcast(value, 0).wait()
        return value

    def close(self) -> None:
        """Leaves the group; its connections close with it."""
        del self._group
