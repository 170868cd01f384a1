"""A plain PyTorch training loop that pushes its weights into a live inference server.

    python examples/plain_pytorch.py
    python examples/plain_pytorch.py --server http://a:30000 --server http://b:30000 --model DIR

Without ``--server`` a reference engine is started; it needs ``weight-update[demo]``. A real
server must serve the checkpoint that ``--model`` names, with its usual Hugging Face layout.
"""

from __future__ import annotations

import argparse
from contextlib import nullcontext

import requests
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, PreTrainedModel

from weight_update import SGLangWeightSyncScheme
from weight_update.reference_engine import ReferenceEngine

MODULUS, LENGTH = 11, 16
PROMPT, TARGET = [1, 1, 2], [3, 5, 8, 2, 10, 1, 0, 1]


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


def batch_of_sequences(size: int = 64) -> torch.Tensor:
    """Each number is the sum of the two before it, modulo 11: what the model shall learn."""
    columns = list(torch.randint(MODULUS, (2, size)))
    while len(columns) < LENGTH:
        columns.append((columns[-1] + columns[-2]) % MODULUS)
    return torch.stack(columns, dim=1)


def train_step(model: PreTrainedModel, optimizer: torch.optim.Optimizer) -> float:
    tokens = batch_of_sequences()
    loss = model(input_ids=tokens, labels=tokens).loss  # transformers shifts the labels
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return float(loss.detach())


def ask(server: str) -> str:
    """What a server says after PROMPT, greedily, and how much of it is right."""
    session = requests.Session()
    session.trust_env = False  # a server of this cluster: past any proxy
    sampling = {"max_new_tokens": len(TARGET), "temperature": 0.0, "ignore_eos": True}
    body = {"input_ids": PROMPT, "sampling_params": sampling}
    response = session.post(f"{server}/generate", json=body, timeout=60)
    response.raise_for_status()
    answer = response.json()["output_ids"]
    right = sum(said == wanted for said, wanted in zip(answer, TARGET, strict=True))
    return f"{answer} ({right} of {len(TARGET)} right)"


def train(model: PreTrainedModel, servers: list[str], steps: int, push_every: int) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    scheme = SGLangWeightSyncScheme(servers)
    print(f"the server, asked to go on after {PROMPT}: {ask(servers[0])}")
    with scheme.create_sender() as sender:  # leaving the block gives up the group
        sender.register_model(model)
        for step in range(1, steps + 1):
            loss = train_step(model, optimizer)
            if step % push_every == 0:
                # The one call: when it returns, every server generates with these weights.
                report = sender.update_weights()
                pause = 1e3 * report.seconds["paused"]
                print(
                    f"step {step:3}  loss {loss:.3f}  version {report.version} in {pause:3.0f} ms"
                    f"  server: {ask(servers[0])}"
                )
        print(f"the last report:\n{report}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--server", action="append", help="URL of a server; repeatable")
    parser.add_argument("--model", help="checkpoint that the servers serve; needed with --server")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--push-every", type=int, default=10)
    args = parser.parse_args()
    if args.server and not args.model:
        parser.error("--server needs --model, the checkpoint that the servers serve")
    model = AutoModelForCausalLM.from_pretrained(args.model) if args.model else tiny_llama(seed=0)
    if not args.server:
        torch.set_num_threads(1)  # leave the other cores to the engine
    # The engine starts from other weights than the trainer's, so the first push shows.
    with nullcontext() if args.server else ReferenceEngine(tiny_llama(seed=1)) as engine:
        train(model, args.server or [engine.url], args.steps, args.push_every)


if __name__ == "__main__":
    main()
