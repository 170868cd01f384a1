"""A gloo backend for vLLM's weight transfer."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from math import prod
from typing import Any

import torch
from torch import distributed

GLOO_BACKEND = "weight_update_gloo"
# A trainer that gives an update up closes the group; this is for one whose host is gone.
_SILENCE = timedelta(minutes=10)

try:
    from vllm.distributed.weight_transfer.nccl_engine import NCCLWeightTransferEngine as _Native
except ImportError:  # outside vLLM there is nothing to register, and all else can be tried
    _Native = object

inside_vllm = _Native is not object

Announced = Sequence[tuple[str, torch.dtype, Sequence[int]]]
Named = list[tuple[str, torch.Tensor]]


@dataclass(kw_only=True)
class GlooInitInfo:
    """What ``/init_weight_transfer_engine`` brings.

    Attributes:
        master_address: Where the trainer, which is rank 0, listens.
        master_port: Likewise.
        rank_offset: Rank of the server's first worker.
        world_size: All ranks of the group.
        group_name: The name that the trainer gave it.
        packed: Whether the weights of a request come as the bytes of one broadcast, one after the
            other without padding, or in one broadcast each.
    """

    master_address: str
    master_port: int
    rank_offset: int
    world_size: int
    group_name: str
    packed: bool


class GlooEngine(_Native):  # type: ignore[misc]
    """vLLM's engine for NCCL, over a gloo group: weights are opened, loaded and closed as there.

    A request brings ``names``, ``dtype_names`` and ``shapes``.
    """

    init_info_cls = GlooInitInfo
    packed = False
    gloo: Any = None

    def init_transfer_engine(self, init_info: GlooInitInfo) -> None:
        """Joins the trainer's group, and leaves the one before."""
        self.shutdown()
        config = self.parallel_config
        workers_before = config.data_parallel_index * config.world_size + config.rank
        self.packed = init_info.packed
        self.gloo = join_gloo(init_info, init_info.rank_offset + workers_before)

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Receives the weights of a request and loads them."""
        # The native one ends by waiting for an accelerator, which need not be there.
        self.receive_weights(self.parse_update_info(update_info))

    def receive_weights(self, update_info: Any) -> None:
        """Receives and loads; a failure closes the group, since others may wait for this rank."""
        if self.gloo is None:
            raise RuntimeError("no group: /init_weight_transfer_engine was not called")
        specs = zip(update_info.names, update_info.dtype_names, update_info.shapes, strict=True)
        announced = [(name, getattr(torch, dtype), shape) for name, dtype, shape in specs]
        try:
            for batch in received(self.gloo, announced, packed=self.packed):
                self.model.load_weights(batch)
        except BaseException:
            self.shutdown()
            raise

    def shutdown(self) -> None:
        """Leaves the group; its connections close with it."""
        self.gloo = None


def join_gloo(init_info: GlooInitInfo, rank: int) -> Any:
    """Joins a group by the keys under which torch's own groups meet; blocks until all came."""
    torch_distributed: Any = distributed
    store = torch_distributed.TCPStore(
        init_info.master_address,
        init_info.master_port,
        init_info.world_size,
        is_master=False,
        timeout=_SILENCE,
        wait_for_workers=False,
    )
    for prefix in (init_info.group_name, f"{init_info.group_name}/", "cpu/"):
        store = torch_distributed.PrefixStore(prefix, store)
    return torch_distributed.ProcessGroupGloo(store, rank, init_info.world_size, _SILENCE)


def received(group: Any, announced: Announced, *, packed: bool) -> Iterator[Named]:
    """The weights that were announced, as they come: all at once, or one by one."""
    if packed:
        sizes = [prod(shape) * dtype.itemsize for _, dtype, shape in announced]
        buffer = torch.empty(sum(sizes), dtype=torch.uint8)
        group.broadcast(buffer, 0).wait()
        yield cut(buffer, announced, sizes)
        return
    for name, dtype, shape in announced:
        value = torch.empty(tuple(shape), dtype=dtype)
        group.broadcast(value, 0).wait()
        yield [(name, value)]


def cut(buffer: torch.Tensor, announced: Announced, sizes: Sequence[int]) -> Named:
    """Weights that lie in a buffer of bytes, one after the other.

    Example:
        >>> buffer = torch.arange(2, dtype=torch.int32).view(torch.uint8)
        >>> cut(buffer, [("a", torch.int32, [1]), ("b", torch.int32, [1, 1])], [4, 4])
        [('a', tensor([0], dtype=torch.int32)), ('b', tensor([[1]], dtype=torch.int32))]
    """
    parts = zip(announced, torch.split(buffer, list(sizes)), strict=True)
    return [(name, part.view(dtype).view(tuple(shape))) for (name, dtype, shape), part in parts]


def register_gloo() -> None:
    """Makes the backend known to the vLLM that this process runs; repeated, it does nothing."""
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    with suppress(ValueError):  # known already
        WeightTransferEngineFactory.register_engine(GLOO_BACKEND, GlooEngine)
