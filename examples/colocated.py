"""Hands weights to a server that shares this trainer's GPU, or its host's memory: nothing is sent.

    python examples/colocated.py
    python examples/colocated.py --server http://127.0.0.1:30000 --model DIR --device cuda

With ``transport="ipc"`` a request names memory of the trainer, and the server opens it and copies
the weights into its own. Without ``--server`` a reference engine is started on the CPU, where that
is shared memory; it needs ``weight-update[demo]``. A real server must run on the GPU of
``--device`` and serve the checkpoint that ``--model`` names.
"""

from __future__ import annotations

import argparse
from contextlib import nullcontext

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, PreTrainedModel

from weight_update import SGLangWeightSyncScheme
from weight_update.reference_engine import ReferenceEngine

PROMPT = [5, 9, 17]


def tiny_llama(seed: int) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        initializer_range=0.2,
    )
    return LlamaForCausalLM(config)


@torch.no_grad()
def train_step(model: PreTrainedModel) -> None:
    """Stands for a step of training: other values in the same parameters."""
    for parameter in model.parameters():
        parameter.mul_(1.01)


def push(model: PreTrainedModel, server: str, steps: int) -> None:
    scheme = SGLangWeightSyncScheme(server, transport="ipc")
    with scheme.create_sender() as sender:  # leaving the block frees the shared buffers
        sender.register_model(model)
        for _ in range(steps):
            train_step(model)
            report = sender.update_weights()
            # The shared buffers are kept from one update to the next.
            print(f"version {report.version}: {1e3 * report.seconds['paused']:.0f} ms of pause")
        print(f"the last report:\n{report}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--server", help="URL of a server on the same GPU")
    parser.add_argument("--model", help="checkpoint that it serves; needed with --server")
    parser.add_argument("--device", default="cpu", help="where the trainer's model is")
    parser.add_argument("--steps", type=int, default=3)
    args = parser.parse_args()
    if args.server and not args.model:
        parser.error("--server needs --model, the checkpoint that the server serves")
    model = AutoModelForCausalLM.from_pretrained(args.model) if args.model else tiny_llama(seed=1)
    model = model.to(args.device)
    with nullcontext() if args.server else ReferenceEngine(tiny_llama(seed=0)) as engine:
        if engine is not None:
            print("the engine generates", engine.generate(PROMPT, 8)["output_ids"])
        push(model, args.server or engine.url, args.steps)
        if engine is not None:
            print("the engine generates", engine.generate(PROMPT, 8)["output_ids"])


if __name__ == "__main__":
    main()
