"""A real vLLM server, run as a child process of the tests."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import requests
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from .engine_server import LAUNCHERS, REPOSITORY, EngineServer
from .long_request import SECONDS, LongRequest
from .models import SEED_A, SIZES, tiny_tokenizer

ENGINE = "vllm-0.32.0"
OLDER = "vllm-0.27.1"
MODEL = "m"  # the name under which the server serves its checkpoint
EXTENSION = "weight_update.vllm_worker.WorkerExtension"
LORA_RANK = 8


class VLLMServer(EngineServer):
    """One vLLM server on one checkpoint, which takes whole models and adapters.

    ``with VLLMServer(model_dir, log_path) as server: server.generate([5, 6, 7], 8)``
    """

    def __init__(
        self,
        model_dir: Path,
        log_path: Path,
        extra_args: Sequence[str] = (),
        *,
        engine: str = ENGINE,
        lora: bool = True,
        backend: str = "weight_update_gloo",
        variables: Mapping[str, str] | None = None,
    ) -> None:
        """Choose a free port; nothing is started yet."""
        super().__init__(engine, log_path)
        self.model_dir = model_dir
        self._extra_args = tuple(extra_args)
        self._backend = backend
        self._lora = lora
        self._variables = variables or {}

    def command(self) -> Sequence[str]:
        """The launcher and its arguments."""
        launcher = str(LAUNCHERS / "launch_vllm_cpu.py")
        model = ("--model", str(self.model_dir), "--served-model-name", MODEL)
        weights = ("--weight-transfer-config", json.dumps({"backend": self._backend}))
        extension = ("--worker-extension-cls", EXTENSION)
        lora = ("--enable-lora", "--max-lora-rank", str(LORA_RANK)) if self._lora else ()
        port = ("--port", str(self.port))
        return [launcher, *model, *port, *weights, *extension, *lora, *self._extra_args]

    def environment(self) -> Mapping[str, str]:
        """Its workers import the library; adapters are loaded while it runs."""
        lora = {"VLLM_ALLOW_RUNTIME_LORA_UPDATING": "True"}
        return {"PYTHONPATH": str(REPOSITORY), **lora, **self._variables}

    def load_start(self) -> None:
        """Put everything back as it was at the start, whatever an earlier test left behind."""
        self.call_workers("weight_update_put_back")
        self.call_workers("reload_weights")
        self.post("update_weight_version", {"new_version": "default"})
        self.post("reset_prefix_cache?reset_running_requests=true", {})
        self.post("resume", {})

    def call_workers(self, method: str) -> Any:
        """Call a method of every worker."""
        return self.post("collective_rpc", {"method": method})

    def is_paused(self) -> bool:
        """Tell whether it generates nothing."""
        return bool(self.get("is_paused")["is_paused"])

    def label(self) -> str:
        """The version label."""
        return str(self.get("weight_info")["weight_version"])

    def generate(
        self, input_ids: Sequence[int], max_new_tokens: int, temperature: float = 0
    ) -> list[int]:
        """Continue a prompt by exactly `max_new_tokens` tokens and return them."""
        body = completion(input_ids, max_new_tokens, temperature=temperature)
        (choice,) = self.post("v1/completions", body)["choices"]
        return [int(token) for token in choice["token_ids"]]


def completion(input_ids: Sequence[int], max_new_tokens: int, **more: Any) -> dict[str, Any]:
    """A request for exactly so many tokens, as they are."""
    return {
        "model": MODEL,
        "prompt": list(input_ids),
        "max_tokens": max_new_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
        **more,
    }


class LongVLLMRequest(LongRequest):
    """A long request to a vLLM server."""

    def cut(self) -> dict[str, Any]:
        """Abort all requests, and return the answer of this one."""
        requests.post(f"{self._url}/abort_requests", json={}, timeout=SECONDS).raise_for_status()
        return self.end()

    def _read(self) -> None:
        body = completion(self.prompt, self._wanted, stream=True)
        url = f"{self._url}/v1/completions"
        with requests.post(url, json=body, stream=True, timeout=SECONDS) as answer:
            answer.raise_for_status()
            for line in answer.iter_lines():
                if line.startswith(b"data: {"):
                    (choice,) = json.loads(line.removeprefix(b"data: "))["choices"]
                    tokens = [*self.tokens, *(choice["token_ids"] or ())]
                    self._take({"output_ids": tokens, "finish_reason": choice["finish_reason"]})
        with self._grown:
            self._grown.notify_all()


def vllm_llama(seed: int = SEED_A) -> LlamaForCausalLM:
    """The tiny Llama with heads of 32, the narrowest that vLLM's attention takes on a CPU.

    Its attention has biases: layers of several weights.
    """
    sizes = {**SIZES, "hidden_size": 128, "attention_bias": True, "tie_word_embeddings": False}
    config = LlamaConfig(**sizes, head_dim=32)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = LlamaForCausalLM(config).eval()  # type: ignore[no-untyped-call]
        for name, parameter in model.named_parameters():
            if name.endswith(".bias"):
                nn.init.normal_(parameter, std=SIZES["initializer_range"])
        return model


def save_vllm_model(directory: Path) -> Path:
    """Write that model and its tokenizer as a checkpoint directory."""
    vllm_llama().save_pretrained(directory)
    tiny_tokenizer().save_pretrained(directory)
    return directory
