"""A real SGLang server that serves adapters, and adapters to serve."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model

from .engine_server import LAUNCHERS
from .models import SEED_A, tiny_llama
from .sglang_server import RELEASE, SGLangServer

ALL_LINEAR = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
RANK = 8


class LoRAServer(SGLangServer):
    """One SGLang server on one checkpoint, started with LoRA."""

    def __init__(self, model_dir: Path, log_path: Path, release: str = RELEASE) -> None:
        """Choose a free port; nothing is started yet."""
        lora = ("--max-lora-rank", str(RANK), "--lora-target-modules", *ALL_LINEAR)
        super().__init__(model_dir, log_path, lora, release)

    def command(self) -> Sequence[str]:
        """The launcher and its arguments."""
        _, *arguments = super().command()
        return [str(LAUNCHERS / "launch_sglang_lora_cpu.py"), *arguments]

    def asked(self, prompt: list[int], count: int, adapter: str | None) -> Any:
        """The answer to a request, for an adapter if one is named."""
        sampling = {"max_new_tokens": count, "temperature": 0, "ignore_eos": True}
        body = {"input_ids": prompt, "sampling_params": sampling}
        return self.post("generate", body if adapter is None else {**body, "lora_path": adapter})


def policy(seed: int, **more: Any) -> Any:
    """Model A with an adapter that changes what it says, by a seed."""
    return adapted(tiny_llama(SEED_A), seed, **more)


def adapted(base: Any, seed: int, **more: Any) -> Any:
    """A model with an adapter that changes what it says, by a seed."""
    settings: dict[str, Any] = {"r": 4, "lora_alpha": 8, "target_modules": ALL_LINEAR}
    config = LoraConfig(**(settings | {"task_type": "CAUSAL_LM"} | more))
    model = get_peft_model(base, config)
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(seed)
        for name, parameter in model.named_parameters():
            if ".lora_" in name:
                parameter.normal_(std=0.1)
    return model.eval()
