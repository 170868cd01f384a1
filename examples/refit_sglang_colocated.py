"""A trainer and SGLang share a GPU, and each frees it while the other works.

    python examples/refit_sglang_colocated.py
    python examples/refit_sglang_colocated.py --server http://127.0.0.1:30000 --model DIR \
        --device cuda --offload

In every round the engine generates, frees its memory, and the trainer trains. Then one call, the
synchronizer's, moves the optimizer's state out of the way, has the engine open the trainer's
weights where they lie, and gives both their memory back. Without ``--server`` a reference engine
is started on the CPU, where that is shared memory; it needs ``weight-update[demo]``. A real server
must run on the GPU of ``--device`` and serve the checkpoint that ``--model`` names; for
``--offload`` it must have been started with ``--enable-memory-saver``.
"""

from __future__ import annotations

import argparse
import time

import requests
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, PreTrainedModel

from weight_update.reference_engine import ReferenceEngine
from weight_update.synchronizers import SGLangGeneration, TorchPolicy, create_weight_synchronizer

PROMPT, LESSON = [1, 1, 2], [3, 5, 8, 2, 10, 1, 0, 1]


def tiny_llama(seed: int) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        bos_token_id=None,
        eos_token_id=None,
    )
    return LlamaForCausalLM(config)


def train(model: PreTrainedModel, optimizer: torch.optim.Optimizer, steps: int) -> float:
    """Teaches the model what comes after the prompt, and returns the last loss."""
    tokens = torch.tensor([PROMPT + LESSON], device=model.device)
    for _ in range(steps):
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return float(loss.detach())


def ask(server: str) -> str:
    """What a server says after the prompt, greedily, and how much of it is right."""
    session = requests.Session()
    session.trust_env = False  # a server of this host: past any proxy
    sampling = {"max_new_tokens": len(LESSON), "temperature": 0.0, "ignore_eos": True}
    body = {"input_ids": PROMPT, "sampling_params": sampling}
    response = session.post(f"{server}/generate", json=body, timeout=60)
    response.raise_for_status()
    answer = response.json()["output_ids"]
    right = sum(said == wanted for said, wanted in zip(answer, LESSON, strict=True))
    return f"{answer} ({right} of {len(LESSON)} right)"


def run(model: PreTrainedModel, server: str, rounds: int, offload: bool) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    policy = TorchPolicy(model, optimizer)
    generation = SGLangGeneration(server, needs_offload=offload)
    synchronizer = create_weight_synchronizer(policy, generation, "sglang", colocated=True)
    synchronizer.init_communicator()
    print(f"the server, asked to go on after {PROMPT}: {ask(server)}")
    for number in range(1, rounds + 1):
        generation.finish_generation()  # the server frees weights and KV cache, if --offload
        loss = train(model, optimizer, steps=3)
        start = time.perf_counter()
        numbers = synchronizer.sync_weights()  # both have their memory back when this returns
        print(
            f"round {number}  loss {loss:.3f}  version {numbers['version']:.0f} in "
            f"{1e3 * (time.perf_counter() - start):.0f} ms, paused for "
            f"{1e3 * numbers['paused_seconds']:.0f} ms  server: {ask(server)}"
        )
    print(f"the last report:\n{synchronizer.report}")
    synchronizer.shutdown()
    generation.shutdown()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--server", help="URL of a server on the same GPU")
    parser.add_argument("--model", help="checkpoint that it serves; needed with --server")
    parser.add_argument("--device", default="cpu", help="where the trainer's model is")
    parser.add_argument("--offload", action="store_true", help="the server frees its memory, too")
    parser.add_argument("--rounds", type=int, default=4, help="rounds of training")
    args = parser.parse_args()
    if args.server and not args.model:
        parser.error("--server needs --model, the checkpoint that the server serves")
    model = AutoModelForCausalLM.from_pretrained(args.model) if args.model else tiny_llama(seed=1)
    model = model.to(args.device)
    if args.server:
        run(model, args.server, args.rounds, args.offload)
        return
    torch.set_num_threads(1)  # leave the other cores to the engine
    print("starting a small engine on other weights ...")
    with ReferenceEngine(tiny_llama(seed=0), memory_saver=True) as engine:
        run(model, engine.url, args.rounds, offload=True)


if __name__ == "__main__":
    main()
