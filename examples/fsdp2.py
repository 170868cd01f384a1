"""A model that FSDP2 shards over two ranks, pushed into a live inference server.

    torchrun --nproc-per-node 2 examples/fsdp2.py

Every rank calls ``update_weights()``. Rank 0 talks to the server; the other gathers with it, one
bucket at a time, so that no rank ever holds the whole model. The server is a reference engine
that starts for the occasion, and all of it runs on a CPU.
"""

from __future__ import annotations

import os
from contextlib import nullcontext

import torch
from torch import distributed
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import LlamaConfig, LlamaForCausalLM

from weight_update import SGLangWeightSyncScheme, WeightUpdateError
from weight_update.reference_engine import ReferenceEngine

MODULUS, LENGTH, STEPS, PUSH_EVERY = 11, 16, 40, 20
PROMPT = [1, 1, 2]


def tiny_llama(seed: int) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=MODULUS,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        bos_token_id=None,
        eos_token_id=None,
    )
    return LlamaForCausalLM(config)


def sharded(model: LlamaForCausalLM) -> LlamaForCausalLM:
    """Each rank keeps its part of every parameter."""
    mesh = init_device_mesh("cpu", (distributed.get_world_size(),))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def train_step(model: LlamaForCausalLM, optimizer: torch.optim.Optimizer) -> float:
    """Each number is the sum of the two before it, modulo 11: what the model shall learn."""
    columns = list(torch.randint(MODULUS, (2, 32)))
    while len(columns) < LENGTH:
        columns.append((columns[-1] + columns[-2]) % MODULUS)
    tokens = torch.stack(columns, dim=1)
    loss = model(input_ids=tokens, labels=tokens).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return float(loss.detach())


def url_for_all(engine: ReferenceEngine | None) -> str:
    """Rank 0 has started the server; every rank makes its sender with the same URL."""
    shared = [engine.url if engine else None]
    distributed.broadcast_object_list(shared)
    return str(shared[0])


def train(model: LlamaForCausalLM, rank: int, engine: ReferenceEngine | None) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    torch.manual_seed(rank)  # other data on each rank
    with SGLangWeightSyncScheme(url_for_all(engine)).create_sender() as sender:
        sender.register_model(model)
        for step in range(1, STEPS + 1):
            loss = train_step(model, optimizer)
            if step % PUSH_EVERY:
                continue
            try:
                report = sender.update_weights()  # on every rank
            except WeightUpdateError as error:
                # The same error on every rank: each can decide alike, without asking the others.
                print(f"rank {rank}: {error}", flush=True)
                raise
            print(f"rank {rank}: step {step} loss {loss:.3f}, {report.headline}", flush=True)
            if engine:
                answer = engine.generate(PROMPT, max_new_tokens=8)["output_ids"]
                print(f"the server goes on after {PROMPT}: {answer}", flush=True)


def main() -> None:
    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # all ranks are on this host
    distributed.init_process_group("gloo")
    rank = distributed.get_rank()
    # The server starts from other weights than the trainer's, so the first push shows.
    with ReferenceEngine(tiny_llama(seed=1)) if rank == 0 else nullcontext() as engine:
        train(sharded(tiny_llama(seed=0)), rank, engine)
    distributed.destroy_process_group()


if __name__ == "__main__":
    main()
