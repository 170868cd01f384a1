"""vLLM's side of a weight transfer over NCCL, without vLLM: its routes, and its rules for buffers.

Usage: vllm_peer.py DEVICE, in a process of its own; it prints the port that it listens on.
``GET /__bits__`` shows a sum over the bits of each weight that came, by name.
"""

from __future__ import annotations

import base64
import json
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from math import prod
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parent))
from nccl_peer import Communicator, checked

_UINT8 = 1  # ncclDataType_t


class Group(Communicator):
    """A communicator that takes bytes."""

    def receive_bytes(self, nbytes: int) -> torch.Tensor:
        buffer = torch.zeros(nbytes, dtype=torch.uint8, device="cuda")
        place = self._buffers(buffer)
        checked(self._nccl.ncclBroadcast(*place, _UINT8, 0, *self._where()))
        torch.cuda.synchronize()
        return buffer


class Peer:
    """One server with one worker."""

    def __init__(self, device: int) -> None:
        self.device = device
        self.group: Group | None = None
        self.packed, self.buffer_bytes = False, 1 << 30
        self.open = self.paused = False
        self.label = "default"
        self.broadcasts = 0
        self.weights: dict[str, torch.Tensor] = {}

    def init(self, body: dict[str, Any]) -> None:
        info = dict(body["init_info"])
        self.packed = info.pop("packed")
        self.buffer_bytes = info.pop("packed_buffer_size_bytes")
        unique_id = base64.b64decode(info.pop("nccl_unique_id_b64"), validate=True)
        rank, world_size = info.pop("rank_offset"), info.pop("world_size")
        assert not info, f"unexpected keys: {info}"
        self.group = Group(unique_id, world_size, rank)
        self.group.all_reduce(torch.zeros(1, device="cuda"))
        torch.cuda.synchronize()

    def start(self, _: Any) -> None:
        assert not self.open, "already active"
        self.open = True

    def update(self, body: dict[str, Any]) -> None:
        assert self.open, "start_weight_update must be called before update_weights."
        info = body["update_info"]
        assert info.keys() == {"names", "dtype_names", "shapes"}, info.keys()
        rows = list(zip(info["names"], info["dtype_names"], info["shapes"], strict=True))
        chunk: list[tuple[str, torch.dtype, list[int]]] = []
        for name, dtype, shape in rows:
            chunk.append((name, getattr(torch, dtype), shape))
            if not self.packed or size_of(chunk) > self.buffer_bytes:
                self.take(chunk)
                chunk = []
        if chunk:
            self.take(chunk)

    def take(self, chunk: list[tuple[str, torch.dtype, list[int]]]) -> None:
        assert self.group is not None
        buffer = self.group.receive_bytes(size_of(chunk))
        self.broadcasts += 1
        start = 0
        for name, dtype, shape in chunk:
            end = start + prod(shape) * dtype.itemsize
            self.weights[name] = buffer[start:end].view(dtype).view(shape)
            start = end

    def finish(self, _: Any) -> None:
        assert self.open, "finish_weight_update called without a matching start_weight_update."
        self.open = False

    def pause(self, _: Any) -> None:
        self.paused = True

    def resume(self, _: Any) -> None:
        assert not self.open, "the engine would die"
        self.paused = False

    def stamp(self, body: dict[str, Any]) -> None:
        self.label = body["new_version"]

    def shown(self) -> dict[str, Any]:
        sums = {name: bits_of(value) for name, value in self.weights.items()}
        return {"bits": sums, "broadcasts": self.broadcasts, "paused": self.paused}


def size_of(chunk: list[tuple[str, torch.dtype, list[int]]]) -> int:
    return sum(prod(shape) * dtype.itemsize for _, dtype, shape in chunk)


def bits_of(value: torch.Tensor) -> int:
    """A sum over the bytes of a tensor, weighted by their places."""
    raw = value.contiguous().reshape(-1).view(torch.uint8).long()
    return int((raw * torch.arange(1, raw.numel() + 1, device=raw.device)).sum())


def main(device: int) -> None:
    peer = Peer(device)
    posts = {
        "/init_weight_transfer_engine": peer.init,
        "/shutdown_weight_transfer_engine": lambda _: None,
        "/start_weight_update": peer.start,
        "/update_weights": peer.update,
        "/finish_weight_update": peer.finish,
        "/pause": peer.pause,
        "/resume": peer.resume,
        "/update_weight_version": peer.stamp,
        "/reset_prefix_cache": lambda _: {"success": True},
    }
    gets: dict[str, Any] = {
        "/version": lambda: {"version": "0.32.0"},
        "/get_world_size": lambda: {"world_size": 1},
        "/server_info": lambda: {
            "vllm_config": {"instance_id": "1", "weight_transfer_config": {"backend": "nccl"}}
        },
        "/v1/models": lambda: {"data": []},
        "/weight_info": lambda: {"weight_version": peer.label},
        "/is_paused": lambda: {"is_paused": peer.paused},
        "/health": dict,
        "/__bits__": peer.shown,
    }

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *args: Any) -> None: ...

        def answer(self) -> None:
            raw = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            path = self.path.partition("?")[0]
            status, body = self.called(path, json.loads(raw) if raw else {})
            text = json.dumps(body).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text)

        def called(self, path: str, body: dict[str, Any]) -> tuple[int, Any]:
            torch.cuda.set_device(peer.device)
            known = gets if self.command == "GET" else posts
            if path not in known:
                return 404, {"detail": "Not Found"}
            if self.command == "OPTIONS":
                return 405, {"detail": "Method Not Allowed"}
            try:
                answer = known[path](*([body] if self.command == "POST" else []))
            except Exception as error:  # noqa: BLE001 - what a worker raises is a 500
                return 500, {"error": {"message": f"Worker failed with error '{error!r}'"}}
            return 200, answer or {}

        do_GET = do_POST = do_OPTIONS = answer

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    print(server.server_port, flush=True)
    server.serve_forever()


if __name__ == "__main__":
    main(int(sys.argv[1]))
