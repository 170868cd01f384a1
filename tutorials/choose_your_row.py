"""
Choose your row
===============

A training loop calls ``sync_weights()`` and does not care what happens. What happens depends on
two questions only: which engine generates, and whether it shares its GPUs with the trainer. Each
answer is a row of a table, and a factory picks the row.

What you will learn:

- which row is yours, and how the bytes travel there;
- how to put a trainer and servers behind the factory;
- what a synchronizer promises: when weights are stale, and what a failed sync leaves behind;
- how trainer and engine lend each other memory on a shared GPU;
- what is refused, and when.

The two SGLang rows run here, on a CPU in less than a minute, against small stand-ins for SGLang.
Every statement about the servers' output is checked by an ``assert``. The two vLLM rows need a real
vLLM; ``examples/refit_vllm.py --start`` runs them on a CPU too. You need
``pip install ".[demo]"`` from a clone.
"""

######################################################################
# The table
# ---------
#
# =========  ===============  ================================================================
# engine     shares the GPUs  how the bytes travel
# =========  ===============  ================================================================
# SGLang     no               one broadcast to all servers, over SGLang's weight-update group
# SGLang     yes              the server opens the trainer's memory
# vLLM       no               one broadcast to all servers, through vLLM's weight transfer
# vLLM       yes              the workers open two buffers in turn, and say when one is free
# Dynamo     no               as vLLM, on each worker's own address
# =========  ===============  ================================================================

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from weight_update import EngineState, WeightUpdateError
from weight_update.reference_engine import Fault, ReferenceEngine
from weight_update.synchronizers import (
    DynamoGeneration,
    SGLangGeneration,
    StaticCluster,
    TorchPolicy,
    VLLMGeneration,
    WeightSynchronizer,
    create_weight_synchronizer,
)

as_written = argparse.RawDescriptionHelpFormatter
argparse.ArgumentParser(description=__doc__, formatter_class=as_written).parse_args()

torch.set_num_threads(1)  # leave the other cores to the servers

PROMPT = [5, 9, 17, 33]


def tiny_llama(seed: int) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        initializer_range=0.2,
        bos_token_id=None,
        eos_token_id=None,
    )
    return LlamaForCausalLM(config).eval()


######################################################################
# The trainer's side
# ------------------
#
# A :class:`~weight_update.synchronizers.TorchPolicy` is a model and, if you like, its optimizer.
# The model may be plain, behind FSDP2 or have LoRA adapters. ``train`` stands for your training.

model = tiny_llama(seed=1)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
policy = TorchPolicy(model, optimizer)


def train(steps: int = 1) -> None:
    tokens = torch.randint(64, (4, 16))
    for _ in range(steps):
        model(input_ids=tokens, labels=tokens).loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def trainer_says() -> list[int]:
    ids = torch.tensor([PROMPT])
    mask = torch.ones_like(ids)
    out = model.generate(ids, attention_mask=mask, max_new_tokens=12, do_sample=False)
    return out[0, len(PROMPT) :].tolist()


def says(server: ReferenceEngine) -> list[int]:
    return server.generate(PROMPT, max_new_tokens=12)["output_ids"]


######################################################################
# SGLang on GPUs of its own
# -------------------------
#
# .. image:: ../docs/topologies/sglang-broadcast.svg
#    :alt: Rank 0 of the trainer broadcasts buckets to the GPUs of all servers, in one group.
#
# Trainer and servers are ranks of one group, and each bucket is one broadcast to all of them. Take
# this row when the trainer needs its GPUs to itself, or servers are on other machines. The servers
# here are two small stand-ins for SGLang, each in a process of its own.

left, right = (ReferenceEngine(tiny_llama(seed=0), wait=False) for _ in range(2))
for server in (left, right):
    server.wait_until_ready()

generation = SGLangGeneration([left.url, right.url])
synchronizer = create_weight_synchronizer(policy, generation, "sglang", colocated=False)

assert synchronizer.is_stale  # the servers have other weights than the trainer
assert says(left) == says(right) != trainer_says()

######################################################################
# ``init_communicator()`` once, then ``sync_weights()`` after each step. It returns numbers for a
# logger; the whole report is in ``report``.

synchronizer.init_communicator()
for _ in range(3):
    train()
    numbers = synchronizer.sync_weights()
    assert not synchronizer.is_stale
    assert says(left) == says(right) == trainer_says()

assert numbers is not None
print({name: round(value, 3) for name, value in numbers.items() if "paused" in name})
print(synchronizer.report)

######################################################################
# When a sync fails
# -----------------
#
# One of the servers is told to refuse after it has written five tensors, once. Weights are stale
# from the start of a sync until one has succeeded, so a loop that looks at ``is_stale`` before it
# samples never uses what a failed sync left behind. The error says what each server holds.

refusal = Fault("/update_weights_from_distributed", "refuse", when="after_load", tensors=5, times=1)
right.inject(refusal)
train()
failure = None
try:
    synchronizer.sync_weights()
except WeightUpdateError as error:
    failure = error
    print(error)

assert synchronizer.is_stale
assert failure is not None
assert failure.report is not None
assert "Weight transfer failed" in str(failure)
assert failure.report.engines[right.url].state is EngineState.MIXED  # it is held, paused

######################################################################
# The next sync sends everything, so it heals every server, whatever it holds.

synchronizer.sync_weights()
assert not synchronizer.is_stale
assert says(left) == says(right) == trainer_says()

synchronizer.shutdown()
generation.shutdown()
left.stop()
right.stop()

######################################################################
# SGLang on the trainer's GPUs
# ----------------------------
#
# .. image:: ../docs/topologies/sglang-colocated.svg
#    :alt: On each GPU, a rank of SGLang opens the memory of the trainer's rank beside it.
#
# Nothing is sent: a request names memory, and the server opens it and copies inside the GPU.
# Trainer and server take turns, and each frees memory while the other works.
# ``finish_generation()`` has the server free weights and KV cache. ``sync_weights()`` moves the
# optimizer's state to the host, has the server take memory for weights back, updates it, brings
# the optimizer's state home, and has the server take the KV cache back. On a CPU the memory is
# shared memory. A real server has to be started with ``--enable-memory-saver``, as the stand-in is
# here.

engine = ReferenceEngine(tiny_llama(seed=0), memory_saver=True)
generation = SGLangGeneration(engine.url, needs_offload=True)
synchronizer = create_weight_synchronizer(policy, generation, "sglang", colocated=True)
synchronizer.init_communicator()

for _ in range(2):
    generation.finish_generation()  # from here on the server holds nothing, and serves nobody
    train()
    synchronizer.sync_weights()
    assert says(engine) == trainer_says()

print(synchronizer.report)
synchronizer.shutdown()
generation.shutdown()
engine.stop()

######################################################################
# vLLM on GPUs of its own
# -----------------------
#
# .. image:: ../docs/topologies/vllm-broadcast.svg
#    :alt: Rank 0 of the trainer broadcasts packed chunks to the workers of all servers.
#
# The same broadcast, through vLLM's own weight transfer. Its group spans both sides, so the
# factory wants to know how many ranks each has. A server is started with a transfer backend, which
# is ``docs/vllm.md``'s subject. Nothing is asked of a server before ``init_communicator()``, so
# the synchronizer can be made without one.

vllm = VLLMGeneration("http://vllm.test:8000")
clusters = {"train_cluster": StaticCluster(1), "inference_cluster": StaticCluster(2)}
apart = create_weight_synchronizer(policy, vllm, "vllm", colocated=False, **clusters)
print(type(apart).__name__)

######################################################################
# vLLM on the trainer's GPUs
# --------------------------
#
# .. image:: ../docs/topologies/vllm-colocated.svg
#    :alt: On each GPU, a vLLM worker opens two half-buffers of the trainer's rank beside it.
#
# The trainer fills one half-buffer while the worker loads from the other. A socket of ZMQ says
# which one is full, and the worker answers when it may be written again, so two buffers are enough
# for a model of any size. Offloading is as for SGLang; vLLM calls it sleep and needs
# ``--enable-sleep-mode``.

together = create_weight_synchronizer(policy, vllm, "vllm", colocated=True)
print(type(together).__name__)

######################################################################
# Dynamo
# ------
#
# .. image:: ../docs/topologies/dynamo.svg
#    :alt: As for vLLM; requests go to each worker's own address, past Dynamo's frontend.
#
# A Dynamo worker offers vLLM's weight transfer on a system port of its own. Its frontend, which
# takes the requests, knows nothing of an update. A worker does not say how many ranks it has.

dynamo = DynamoGeneration("http://worker.test:8081", engine_world_size=2)
workers = create_weight_synchronizer(policy, dynamo, "dynamo", colocated=False, **clusters)
print(type(workers).__name__)

######################################################################
# What is refused, and when
# -------------------------
#
# What cannot work fails in the factory, before anything runs. What is not there yet says what
# works instead.


def refusal_of(ask: Callable[[], Any], kind: type[Exception]) -> str:
    try:
        ask()
    except kind as error:
        return str(error)
    raise AssertionError("it was not refused")


def made(backend: str, generation: Any = vllm, **more: Any) -> WeightSynchronizer:
    return create_weight_synchronizer(policy, generation, backend, **{"colocated": False, **more})


print(refusal_of(lambda: made("vllm"), ValueError))
print(refusal_of(lambda: made("sglang"), ValueError))
print(refusal_of(lambda: made("vllm", **clusters, refit_buffer_size_gb=0), ValueError))
print(refusal_of(lambda: made("megatron", generation=None), NotImplementedError))

######################################################################
# Conclusion
# ----------
#
# Two answers choose a row, and the loop is the same for all of them: ``init_communicator()``,
# ``sync_weights()``, ``shutdown()``. ``docs/synchronizers.md`` has buffers, time-outs, Ray actors
# and NeMo-RL's own objects. ``examples/refit_sglang_colocated.py`` and ``examples/refit_vllm.py``
# are whole programs.
