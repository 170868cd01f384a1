"""A Dynamo worker's system port before a vLLM server, as far as weights and pauses go.

Written from Dynamo's own sources, for both families of its routes; what it passes on, a vLLM
answers. Like Dynamo it runs a route whatever the method, and reports errors of the Python worker
with status 200.
"""

from __future__ import annotations

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Literal

import requests

Answer = tuple[int, dict[str, Any]]

_SIDECAR = {
    "control/pause_generation": ("POST", "/pause"),
    "control/resume_generation": ("POST", "/resume"),
    "control/is_paused": ("GET", "/is_paused"),
    "control/get_weight_version": ("GET", "/weight_info"),
    "update/init_weight_transfer_engine": ("POST", "/init_weight_transfer_engine"),
    "update/start_weight_update": ("POST", "/start_weight_update"),
    "update/update_weights": ("POST", "/update_weights"),
    "update/finish_weight_update": ("POST", "/finish_weight_update"),
    "update/update_weight_version": ("POST", "/update_weight_version"),
}
_RPCS = {
    "init_weight_transfer_engine": {"init_info"},
    "shutdown_weight_transfer_engine": set(),
    "start_weight_update": set(),
    "update_weights": {"update_info"},
    "finish_weight_update": set(),
    "check_health": set(),
}
_GROUP = ("init_weights_update_group", "destroy_weights_update_group")


class DynamoWorker:
    """One worker; ``with DynamoWorker(vllm.url, "sidecar") as worker: worker.url``.

    Args:
        vllm_url: The server that does the work.
        family: Which routes it has.
    """

    def __init__(self, vllm_url: str, family: Literal["sidecar", "worker"]) -> None:
        self._vllm, self._family = vllm_url, family
        self._paused, self._version = False, "initial"
        self.log: list[tuple[str, dict[str, Any]]] = []
        handler = type("Handler", (_Handler,), {"worker": self})
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"

    def __enter__(self) -> DynamoWorker:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()

    def answer(self, path: str, body: dict[str, Any]) -> Answer:
        """What a request gets."""
        route = path.removeprefix("/engine/")
        self.log.append((route, dict(body)))
        if self._family == "sidecar":
            return self._sidecar(route, body)
        return self._python(route, body)

    def _sidecar(self, route: str, body: dict[str, Any]) -> Answer:
        if route not in _SIDECAR:
            return 404, {"error": "Route not found"}
        method, path = _SIDECAR[route]
        query = body if path == "/pause" else {}
        return self._pass_on(method, path, {} if query else body, query)

    def _python(self, route: str, body: dict[str, Any]) -> Answer:
        if route == "get_weight_version":
            return 200, {"status": "ok", "version": self._version}
        if route in ("pause_generation", "resume_generation"):
            path = "/pause" if route.startswith("pause") else "/resume"
            self._paused = route.startswith("pause")
            return _said(self._pass_on("POST", path, {}, body if self._paused else {}))
        if route == "flush_cache":
            return _said(self._pass_on("POST", "/reset_prefix_cache", {}, {}))
        if route in _GROUP:
            return _said(self._call_workers(body))
        if route == "update_weights_from_distributed":
            return self._update(body)
        return 404, {"error": "Route not found"}

    def _update(self, body: dict[str, Any]) -> Answer:
        if not self._paused:
            return 200, {"status": "error", "message": "Worker must be paused"}
        version = body.pop("weight_version", "unknown")
        status, answer = _said(self._call_workers(body))
        if answer["status"] == "ok":
            self._version = version
        return status, answer

    def _call_workers(self, body: dict[str, Any]) -> Answer:
        rpc = body.pop("engine_rpc")
        if body.keys() != _RPCS[rpc]:
            return 500, {"message": f"{rpc}() got an unexpected keyword argument"}
        if rpc == "check_health":
            return 200, {}
        return self._pass_on("POST", f"/{rpc}", body, {})

    def _pass_on(
        self, method: str, path: str, body: dict[str, Any], query: dict[str, Any]
    ) -> Answer:
        told = {key: json.dumps(v) if isinstance(v, bool) else v for key, v in query.items()}
        answer = requests.request(method, self._vllm + path, json=body, params=told, timeout=120)
        return answer.status_code, answer.json()


def _said(answer: Answer) -> Answer:
    """As the Python worker says it."""
    status, body = answer
    if status == 200:
        return 200, {"status": "ok"}
    return 200, {"status": "error", "message": str(body)}


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    wbufsize = 1 << 16
    worker: DynamoWorker

    def _serve(self) -> None:
        raw = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        status, body = self.worker.answer(self.path, json.loads(raw or b"{}"))
        content = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    do_GET = do_POST = do_OPTIONS = _serve

    def log_message(self, *_: Any) -> None:
        """Nothing."""
