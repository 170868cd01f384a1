"""A real vLLM server, run as a child process of the tests."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from .engine_server import LAUNCHERS, EngineServer
from .models import SEED_A, SIZES, tiny_tokenizer

ENGINE = "vllm-0.32.0"
MODEL = "m"  # the name under which the server serves its checkpoint


class VLLMServer(EngineServer):
    """One vLLM server on one checkpoint.

    ``with VLLMServer(model_dir, log_path) as server: server.generate([5, 6, 7], 8)``
    """

    def __init__(self, model_dir: Path, log_path: Path, extra_args: Sequence[str] = ()) -> None:
        """Choose a free port; nothing is started yet."""
        super().__init__(ENGINE, log_path)
        self.model_dir = model_dir
        self._extra_args = tuple(extra_args)

    def command(self) -> Sequence[str]:
        """The launcher and its arguments."""
        launcher = str(LAUNCHERS / "launch_vllm_cpu.py")
        model = ("--model", str(self.model_dir), "--served-model-name", MODEL)
        return [launcher, *model, "--port", str(self.port), *self._extra_args]

    def generate(
        self, input_ids: Sequence[int], max_new_tokens: int, temperature: float = 0
    ) -> list[int]:
        """Continue a prompt by exactly `max_new_tokens` tokens and return them."""
        body = {
            "model": MODEL,
            "prompt": list(input_ids),
            "max_tokens": max_new_tokens,
            "temperature": temperature,
            "ignore_eos": True,
            "return_token_ids": True,
        }
        (choice,) = self.post("v1/completions", body)["choices"]
        return [int(token) for token in choice["token_ids"]]


def vllm_llama() -> LlamaForCausalLM:
    """The tiny Llama with heads of 32, the narrowest that vLLM's attention takes on a CPU."""
    config = LlamaConfig(**{**SIZES, "hidden_size": 128}, head_dim=32, tie_word_embeddings=False)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(SEED_A)
        return LlamaForCausalLM(config).eval()  # type: ignore[no-untyped-call]


def save_vllm_model(directory: Path) -> Path:
    """Write that model and its tokenizer as a checkpoint directory."""
    vllm_llama().save_pretrained(directory)
    tiny_tokenizer().save_pretrained(directory)
    return directory
