"""Pushes a checkpoint into a live server with the command line, and shows that it arrived.

    python examples/push_from_the_command_line.py

Starts a reference engine on one checkpoint and runs, for another, the commands that it prints; it
needs ``weight-update[demo]``.
"""

from __future__ import annotations

import shlex
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from weight_update.reference_engine import ReferenceEngine

PROMPT = [5, 9, 17]


def save_checkpoint(directory: Path, seed: int) -> Path:
    """A tiny random model, saved in several shards as a large one would be."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        initializer_range=0.2,
    )
    LlamaForCausalLM(config).save_pretrained(directory, max_shard_size="40KB")
    return directory


def run(command: str) -> None:
    """Runs a command line; the command stands beside this Python."""
    print(f"\n$ {command}", flush=True)
    program, *arguments = shlex.split(command)
    subprocess.run([Path(sys.executable).with_name(program), *arguments], check=True)


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        served = save_checkpoint(Path(folder) / "served", seed=0)
        trained = save_checkpoint(Path(folder) / "trained", seed=1)
        with ReferenceEngine(served) as engine:
            print("the server generates", engine.generate(PROMPT, 8)["output_ids"])
            run(f"weight-update doctor --server {engine.url} --checkpoint {trained}")
            run(f"weight-update push --server {engine.url} {trained}")
            print("\nthe server generates", engine.generate(PROMPT, 8)["output_ids"])


if __name__ == "__main__":
    main()
