"""Whole values of tensors that ranks hold in parts."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache, partial
from typing import Any

import torch
from torch import distributed

from weight_update.weights.shards import zero
from weight_update.weights.specs import TensorSpec, Weight

Rows = Callable[[int, int], torch.Tensor]


def is_shard(tensor: torch.Tensor) -> bool:
    """Whether other ranks hold parts of it, so that all must read it together."""
    return hasattr(tensor, "full_tensor") or zero.is_part(tensor)


def full(tensor: torch.Tensor) -> torch.Tensor:
    """The whole value, detached; of a shard, every rank must ask at the same time."""
    if zero.is_part(tensor):
        return zero.full(tensor)
    if not is_shard(tensor):
        return tensor.detach()
    value: torch.Tensor = _where_it_travels(tensor).full_tensor()
    return value.to(tensor.device)


def shape_of(tensor: torch.Tensor) -> tuple[int, ...]:
    """The shape of the whole value."""
    return zero.shape_of(tensor) if zero.is_part(tensor) else tuple(tensor.shape)


def weight_of(name: str, tensor: torch.Tensor) -> Weight:
    """A weight whose value is the whole of a tensor.

    Example:
        >>> weight_of("bias", torch.ones(2)).read()
        tensor([1., 1.])
    """
    spec = TensorSpec(name, tensor.dtype, shape_of(tensor))
    if not is_shard(tensor):
        return Weight(spec, tensor.device, tensor.detach)
    return Weight(
        spec,
        tensor.device,
        partial(full, tensor),
        rows_of(tensor),
        collective=True,
        ranks=ranks_of(tensor),
    )


def ranks_of(tensor: torch.Tensor) -> tuple[int, ...]:
    """Which ranks of the default group take part in a gather; empty for all."""
    mesh = getattr(tensor, "device_mesh", None)
    return () if mesh is None else _ranks_of_mesh(mesh)


@lru_cache(maxsize=8)
def _ranks_of_mesh(mesh: Any) -> tuple[int, ...]:
    return tuple(sorted(mesh.mesh.flatten().tolist()))


def rows_of(tensor: torch.Tensor) -> Rows | None:
    """Reads some rows of the first dimension, whole; None where that gathers all of them.

    A tensor of all experts of a layer is taken apart this way without ever being whole. All
    ranks must ask for the same rows at the same time.
    """
    from torch.distributed.tensor import DTensor, Replicate, Shard

    if not isinstance(tensor, DTensor) or tensor.ndim == 0 or tensor.numel() == 0:
        return None
    if all(type(p) in (Shard, Replicate) and not p.is_shard(0) for p in tensor.placements):
        return partial(_local_rows, tensor)
    split = [i for i, place in enumerate(tensor.placements) if type(place) is Shard]
    others = [place for place in tensor.placements if type(place) not in (Shard, Replicate)]
    if others or len(split) != 1:
        return None
    return partial(_rows_from_owners, tensor, split[0])


def _local_rows(tensor: torch.Tensor, first: int, end: int) -> torch.Tensor:
    """Every rank holds its part of each row."""
    rows: Any = _where_it_travels(tensor)[first:end]
    value: torch.Tensor = rows.full_tensor()
    return value.to(tensor.device)


def _rows_from_owners(tensor: torch.Tensor, mesh_dim: int, first: int, end: int) -> torch.Tensor:
    """Each rank along a dimension of the mesh holds some whole rows: it sends them to all."""
    shard = _where_it_travels(tensor)
    mesh, mine = shard.device_mesh, shard.to_local()
    share = -(-tensor.shape[0] // mesh.size(mesh_dim))  # as torch.chunk deals them out
    group, me = mesh.get_group(mesh_dim), mesh.get_local_rank(mesh_dim)
    value: torch.Tensor = mine.new_empty((end - first, *tensor.shape[1:]))
    for owner in range(first // share, -(-end // share)):
        start, stop = max(first, owner * share), min(end, (owner + 1) * share)
        piece = value[start - first : stop - first]
        if owner == me:
            piece.copy_(mine[start - owner * share : stop - owner * share])
        source = distributed.get_global_rank(group, owner)
        distributed.broadcast(piece.view(torch.uint8), source, group)
    return value.to(tensor.device)


def _where_it_travels(tensor: torch.Tensor) -> Any:
    """Offloaded shards lie on the CPU, where the group of their mesh may not reach."""
    shard: Any = tensor.detach()
    return shard.to(shard.device_mesh.device_type)
