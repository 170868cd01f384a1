"""Models as trainers hold them: in parts, by every scheme of torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import distributed, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

CPU = torch.device("cpu")
# On three ranks, none of these dimensions is even.
SIZES: dict[str, Any] = {
    "vocab_size": 65,
    "hidden_size": 32,
    "intermediate_size": 70,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "initializer_range": 0.2,
}
_COLUMNS = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
_COLUMNS += ("mlp.gate_proj", "mlp.up_proj")
_ROWS = ("self_attn.o_proj", "mlp.down_proj")


def llama(seed: int, *, tied: bool = False) -> LlamaForCausalLM:
    """A tiny model; equal seeds give equal weights on all ranks."""
    torch.manual_seed(seed)
    return LlamaForCausalLM(LlamaConfig(**SIZES, tie_word_embeddings=tied)).eval()


def fsdp2(model: Any, mesh: DeviceMesh, **options: Any) -> Any:
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh, **options)
    return fully_shard(model, mesh=mesh, **options)


def tensor_parallel(model: Any, mesh: DeviceMesh) -> Any:
    plan: dict[str, Any] = {}
    for index in range(len(model.model.layers)):
        path = f"model.layers.{index}"
        plan |= {f"{path}.{name}": ColwiseParallel() for name in _COLUMNS}
        plan |= {f"{path}.{name}": RowwiseParallel() for name in _ROWS}
    return parallelize_module(model, mesh, plan)


def fsdp1(model: Any, **options: Any) -> Any:
    policy = ModuleWrapPolicy({LlamaDecoderLayer})
    return FullyShardedDataParallel(model, auto_wrap_policy=policy, device_id=CPU, **options)


def mesh_of(ranks: Sequence[int]) -> DeviceMesh:
    return DeviceMesh("cpu", list(ranks))


def grid(first: str, second: str) -> DeviceMesh:
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=(first, second))


def _on(ranks: Sequence[int], shard: Callable[[Any, DeviceMesh], Any]) -> Callable[[Any], Any]:
    """Shards on a mesh of some ranks, which all ranks make; the others get None."""

    def sharded(model: Any) -> Any:
        mesh = mesh_of(ranks)
        return shard(model, mesh) if distributed.get_rank() in ranks else None

    return sharded


def _with_plain_parameters(model: Any, mesh: DeviceMesh) -> Any:
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    return model  # embeddings, norm and head are whole on every rank


def _both(model: Any) -> Any:
    mesh = grid("dp", "tp")
    return fsdp2(tensor_parallel(model, mesh["tp"]), mesh["dp"])


def _fsdp1_of_two(**options: Any) -> Callable[[Any], Any]:
    def shard(model: Any) -> Any:
        group = distributed.new_group([0, 1])
        if distributed.get_rank() > 1:
            return None
        return fsdp1(model, process_group=group, **options)

    return shard


def _fsdp1_hybrid(model: Any) -> Any:
    strategy = ShardingStrategy.HYBRID_SHARD
    mesh = grid("replica", "shard")
    return fsdp1(model, device_mesh=mesh, sharding_strategy=strategy, use_orig_params=True)


def _fsdp1_with_mesh(model: Any) -> Any:
    return fsdp1(model, device_mesh=init_device_mesh("cpu", (4,)), use_orig_params=True)


Shard = Callable[[Any], nn.Module | None]

# Four ranks; where fewer take part, the others get None.
LAYOUTS: dict[str, tuple[Sequence[int], Shard]] = {
    "fsdp2 on three ranks": ((0, 1, 2), _on((0, 1, 2), fsdp2)),
    "fsdp2, not resharded": (
        range(4),
        lambda m: fsdp2(m, mesh_of(range(4)), reshard_after_forward=False),
    ),
    "fsdp2 in two replicas": (range(4), lambda m: fsdp2(m, grid("replica", "shard"))),
    "fsdp2 beside plain parameters": (
        range(4),
        lambda m: _with_plain_parameters(m, mesh_of(range(4))),
    ),
    "tensor parallel": ((0, 1), _on((0, 1), tensor_parallel)),
    "tensor parallel and fsdp2": (range(4), _both),
    "fsdp1 with flat parameters": ((0, 1), _fsdp1_of_two(use_orig_params=False)),
    "fsdp1 with original parameters": ((0, 1), _fsdp1_of_two(use_orig_params=True)),
    "fsdp1 with a mesh": (range(4), _fsdp1_with_mesh),
    "fsdp1 in two replicas": (range(4), _fsdp1_hybrid),
}
