"""What the tests ask of a server of one model family in one dtype."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from weight_update import SGLangWeightSender, SGLangWeightSyncScheme

from .models import SEED_A, SEED_B, Family, TinyModels, greedy, shortfall, tiny_model
from .sglang_server import SGLangServer

PROMPT = [3, 14, 15, 92, 65]
COMBINATIONS: list[tuple[Family, str]] = [
    ("llama", "float32"),
    ("llama", "bfloat16"),
    ("qwen2", "float32"),
    ("qwen2", "bfloat16"),
]
# Logits are of the order of 1 to 10; bf16 keeps 8 bits of a number.
ROUNDING = {torch.float32: 1e-3, torch.bfloat16: 0.25}


_FOLLOWED = 64


@dataclass(frozen=True)
class Served:
    """A server, and what transformers makes of the checkpoints that it is given."""

    server: SGLangServer
    family: Family
    dtype: torch.dtype
    checkpoints: TinyModels

    def model(self, seed: int) -> Any:
        """The trainer's model, in the server's dtype."""
        return tiny_model(self.family, seed).to(self.dtype).eval()

    def made_by(self, seed: int, prompt: list[int], output: list[int]) -> bool:
        """Whether the output is a model's greedy choice, token by token, and not the other's.

        In fp32 all of it is followed; in bf16, where the rounding of a long prefix adds up, only
        its start.
        """
        if self.dtype is torch.bfloat16:
            output = output[:_FOLLOWED]
        model, other = self.model(seed), self.model(SEED_A + SEED_B - seed)
        near = shortfall(model, prompt, output) <= ROUNDING[self.dtype]
        return near and shortfall(other, prompt, output) > 1.0

    def serves(self, seed: int) -> bool:
        """Whether the output of the server is a model's."""
        output = self.server.generate(PROMPT, 24)
        exact = self.dtype is not torch.float32 or output == greedy(self.model(seed), PROMPT, 24)
        return exact and self.made_by(seed, PROMPT, output)

    def checksum(self) -> str:
        """The server's digest of all its weights."""
        answer = self.server.post("weights_checker", {"action": "checksum"})
        return str(answer["per_engine_checksum"])


def sender_of(served: Served, **options: Any) -> SGLangWeightSender:
    """Make a sender to the server."""
    return SGLangWeightSyncScheme(served.server.url, timeout=60, **options).create_sender()


def arguments_of(family: Family, dtype: str) -> list[str]:
    """The server's arguments for a family and a dtype."""
    arguments = ["--dtype", dtype]
    if family == "qwen2":
        # It would build a byte-level tokenizer around the word-level one and find no tokens
        # in its own warm-up prompt.
        arguments.append("--skip-tokenizer-init")
    return arguments
