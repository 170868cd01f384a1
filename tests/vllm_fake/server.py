"""HTTP of a fake: the routes of vLLM's server in dev mode, and two of its own for tests."""

from __future__ import annotations

import json
import sys
import uuid
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit

from .engine import EngineDead, FakeEngine
from .faults import Closed, Fault, Faults, Refused
from .releases import RELEASES
from .weights import checkpoint
from .wire import GlooWire

_START = uuid.uuid4().hex

Answer = tuple[int, dict[str, Any]]
Query = dict[str, list[str]]
Body = dict[str, Any]


class FakeServer:
    """One server: an engine, what will go wrong, and what it was asked."""

    def __init__(self, release: str, seed: int) -> None:
        self.engine = FakeEngine(checkpoint(seed), RELEASES[release], GlooWire)
        self.faults = Faults()
        self.log: list[dict[str, Any]] = []

    def answer(self, method: str, target: str, body: Body) -> Answer:
        """What a request gets.

        Raises:
            Closed: Nothing.
        """
        parts = urlsplit(target)
        path, query = parts.path, parse_qs(parts.query)
        if path.startswith("/__"):
            return self._test_route(path, body)
        handler = self._handler(method, path)
        if handler is None:
            return 404, {"detail": "Not Found"}
        if method == "OPTIONS":
            return 405, {"detail": "Method Not Allowed"}
        self.log.append({"method": method, "path": path, "query": query, "json": body})
        return self._called(path, handler, query, body)

    def _called(
        self, path: str, handler: Callable[[Query, Body], Answer], query: Query, body: Body
    ) -> Answer:
        try:
            with self.faults.around(path) as fault:
                if fault is not None and fault.kind == "torn":
                    self.engine.torn_after = fault.tensors
                if fault is not None and fault.when == "inside":
                    with self.engine.core():
                        self.faults.hang()
                return handler(query, body)
        except (Closed, ConnectionError):
            raise
        except EngineDead as error:
            return _error(str(error))
        except Exception as error:  # noqa: BLE001 - every worker-side error is a 500
            words = f"Call to collective_rpc method failed: Worker failed with error '{error}'"
            return _error(words if not isinstance(error, Refused) else str(error))

    def _handler(self, method: str, path: str) -> Callable[[Query, Body], Answer] | None:
        if path in self.engine.release.missing:
            return None
        known = {**_POST, **_GET} if method == "OPTIONS" else _POST if method == "POST" else _GET
        route = known.get(path)
        return None if route is None else lambda query, body: route(self.engine, query, body)

    def _test_route(self, path: str, body: Body) -> Answer:
        if path == "/__fault__":
            self.faults.inject(Fault(**body))
        elif path == "/__clear__":
            self.faults.clear()
        elif path == "/__relabel__":
            self.engine.label = body["label"]
        return 200, {"log": self.log, "dead": self.engine.dead, "running": self.engine.running}


def _error(words: str) -> Answer:
    return 500, {"error": {"message": words, "type": "InternalServerError", "code": 500}}


def _core(call: Callable[[FakeEngine, Query, Body], dict[str, Any]]) -> Any:
    """A route that needs the engine core, which may be busy or gone."""

    def route(engine: FakeEngine, query: Query, body: Body) -> Answer:
        with engine.core():
            return 200, call(engine, query, body)

    return route


def _pause(engine: FakeEngine, query: Query, _: Body) -> Answer:
    mode = query.get("mode", ["abort"])[0]
    if mode not in ("abort", "wait", "keep"):
        return 400, {"error": f"Invalid pause mode: {mode}"}
    with engine.core():
        engine.pause(mode, clear_cache=query.get("clear_cache", ["true"])[0] == "true")
    return 200, {"status": "paused"}


def _sleep(engine: FakeEngine, query: Query, _: Body) -> dict[str, Any]:
    level = int(query.get("level", ["1"])[0])
    engine.sleep(level, query.get("mode", ["abort"])[0])
    return {"status": "sleeping", "level": level}


def _wake_up(engine: FakeEngine, query: Query, _: Body) -> dict[str, Any]:
    tags = query.get("tags", [])
    awake = engine.wake_up(tags)
    return {"status": "awake" if awake else "sleeping", "tags": tags or None}


def _done(call: Any, message: str) -> Any:
    return _core(lambda engine, _, body: {"message": message} | (call(engine, body) or {}))


def _finish(engine: FakeEngine, body: Body) -> None:
    engine.finish()
    if body.get("weight_version") is not None:
        engine.label = body["weight_version"]


def _stamp(engine: FakeEngine, _: Query, body: Body) -> dict[str, Any]:
    engine.label = body["new_version"]
    return {"success": True, "new_version": engine.label}


def _reset(engine: FakeEngine, query: Query, _: Body) -> dict[str, Any]:
    running = query.get("reset_running_requests", ["false"])[0] == "true"
    return {"success": engine.reset_prefix_cache(running=running)}


def _health(engine: FakeEngine, *_: Any) -> Answer:
    return (503 if engine.dead else 200), {}


def _server_info(*_: Any) -> Answer:
    config = {
        "instance_id": _START,
        "weight_transfer_config": {"backend": "weight_update_gloo"},
        "parallel_config": {"worker_extension_cls": "weight_update.vllm_worker.WorkerExtension"},
    }
    return 200, {"vllm_config": config}


def _resume(engine: FakeEngine, *_: Any) -> dict[str, Any]:
    engine.resume()
    return {"status": "resumed"}


def _complete(engine: FakeEngine, _: Query, body: Body) -> Answer:
    text, reason = engine.generate(until_frozen=body.get("until_frozen", False))
    return 200, {"choices": [{"text": text, "finish_reason": reason}]}


_GET: dict[str, Any] = {
    "/health": _health,
    "/version": lambda engine, *_: (200, {"version": engine.release.version}),
    "/get_world_size": lambda *_: (200, {"world_size": 1}),
    "/is_paused": _core(lambda engine, *_: {"is_paused": engine.paused}),
    "/is_sleeping": _core(lambda engine, *_: {"is_sleeping": engine.sleeping or engine.paused}),
    "/weight_info": _core(lambda engine, *_: {"weight_version": engine.label}),
    "/server_info": _server_info,
    "/v1/models": lambda *_: (200, {"data": [{"id": "m", "root": "/nowhere"}]}),
}
_POST: dict[str, Any] = {
    "/pause": _pause,
    "/resume": _core(_resume),
    "/sleep": _core(_sleep),
    "/wake_up": _core(_wake_up),
    "/init_weight_transfer_engine": _done(
        lambda engine, body: engine.init_transfer(body["init_info"]), "Weight transfer initialized"
    ),
    "/shutdown_weight_transfer_engine": _done(
        lambda engine, _: engine.shutdown_transfer(), "Weight transfer shut down"
    ),
    "/start_weight_update": _done(lambda engine, _: engine.start(), "Weight update started"),
    "/update_weights": _done(
        lambda engine, body: engine.update(body["update_info"]), "Weights updated"
    ),
    "/finish_weight_update": _done(_finish, "Weight update finished"),
    "/update_weight_version": _core(_stamp),
    "/reset_prefix_cache": _core(_reset),
    "/v1/completions": _complete,
}


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    wbufsize = 1 << 16  # headers and body leave together, and no acknowledgement is waited for
    fake: FakeServer

    def _serve(self) -> None:
        length = int(self.headers.get("Content-Length") or 0)
        raw = self.rfile.read(length)
        try:
            status, body = self.fake.answer(self.command, self.path, json.loads(raw or b"{}"))
        except Closed:
            self.close_connection = True
            return
        self._send(status, json.dumps(body).encode())

    def _send(self, status: int, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    do_GET = do_POST = do_OPTIONS = _serve

    def log_message(self, *_: Any) -> None:
        """Nothing."""


def main(port: int, release: str, seed: int) -> None:
    """Serves until the process is ended; says on standard output when it listens."""
    handler = type("Handler", (_Handler,), {"fake": FakeServer(release, seed)})
    server = ThreadingHTTPServer(("127.0.0.1", port), handler)
    print(server.server_address[1], flush=True)
    server.serve_forever()


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], int(sys.argv[3]))
