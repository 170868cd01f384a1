"""The control routes of an SGLang server with LoRA: it keeps adapters and generates nothing.

The real engine's tests show what requests get; this one shows what a fleet is left with.
"""

from __future__ import annotations

import base64
import json
import pickle
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Self

import torch
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM

from .kit import SIZES

LOAD = "/load_lora_adapter_from_tensors"
UNLOAD = "/unload_lora_adapter"
FIELDS = ("config_dict", "serialized_named_tensors", "expected_checksums")
SCHEMAS = {"LoadLoRAAdapterFromTensorsReqInput": {"properties": {key: {} for key in FIELDS}}}


class AdapterServer:
    """One server; what it was asked, what it holds, and which loads it refuses.

    Attributes:
        adapters: Tensors by name, by adapter.
        asked: Paths of the control calls, in order.
        refuses: Names of adapters whose load is refused.
    """

    def __init__(self) -> None:
        self.adapters: dict[str, dict[str, torch.Tensor]] = {}
        self.asked: list[str] = []
        self.refuses: set[str] = set()
        self.label = "default"
        self.paused = False
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True).start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()

    def get(self, path: str) -> tuple[int, Any]:
        info = {"version": "0.5.23", "tp_size": 1, "random_seed": 7, "enable_lora": True}
        answers: dict[str, Any] = {
            "/server_info": info,
            "/model_info": {"weight_version": self.label},
            "/openapi.json": {"components": {"schemas": SCHEMAS}},
            "/v1/loads": {"loads": [{"num_running_reqs": 0}]},
            "/ready": {},
        }
        if path not in answers or (path == "/ready" and self.paused):
            return (503 if path == "/ready" else 404), {"detail": "Not Found"}
        return 200, answers[path]

    def post(self, path: str, body: Any) -> tuple[int, Any]:
        self.asked.append(path)
        if path == "/pause_generation":
            self.paused = True
        elif path == "/continue_generation":
            self.paused = False
        elif path == "/update_weight_version":
            self.label = body["new_version"]
        elif path == LOAD:
            return self._load(body)
        elif path == UNLOAD and self.adapters.pop(body["lora_name"], None) is None:
            return 400, {"success": False, "error_message": "LoRA with name x does not exist"}
        return 200, {"success": True, "status": "ok"}

    def _load(self, body: Any) -> tuple[int, Any]:
        name = body["lora_name"]
        if name in self.refuses or name in self.adapters:
            return 400, {"success": False, "error_message": f"Failed to load {name}"}
        blob = base64.b64decode(body["serialized_named_tensors"][0])
        self.adapters[name] = pickle.loads(blob)
        return 200, {"success": True, "error_message": ""}

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        server = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, *_: Any) -> None: ...

            def do_GET(self) -> None:
                self._answer(*server.get(self.path))

            def do_OPTIONS(self) -> None:
                self._answer(404 if self.path == "/get_load" else 405, {})

            def do_POST(self) -> None:
                raw = self.rfile.read(int(self.headers.get("Content-Length") or 0))
                self._answer(*server.post(self.path, json.loads(raw) if raw else None))

            def _answer(self, status: int, body: Any) -> None:
                raw = json.dumps(body).encode()
                self.send_response(status)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(raw)))
                self.end_headers()
                self.wfile.write(raw)

        return Handler


def policy(seed: int, **more: Any) -> Any:
    """A model of its own with an adapter of its own."""
    settings: dict[str, Any] = {"r": 4, "target_modules": ["q_proj", "v_proj"]}
    config = LoraConfig(task_type="CAUSAL_LM", **(settings | more))
    model = get_peft_model(LlamaForCausalLM(LlamaConfig(**SIZES)), config)
    torch.manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".lora_" in name:
                parameter.normal_(std=0.1)
    return model
