"""An HTTP server that answers as a test tells it, for what no engine would say."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

HEALTHY = {"version": "0.5.23", "tp_size": 1, "pp_size": 1, "dp_size": 1}


@dataclass(frozen=True)
class Asked:
    """One request."""

    method: str
    path: str
    headers: dict[str, str]
    body: Any


@dataclass(frozen=True)
class Answer:
    """A status, a body (JSON data, text or bytes) and headers."""

    status: int = 200
    body: Any = field(default_factory=lambda: {"success": True})
    headers: dict[str, str] = field(default_factory=dict)

    @property
    def raw(self) -> bytes:
        if isinstance(self.body, bytes):
            return self.body
        return (self.body if isinstance(self.body, str) else json.dumps(self.body)).encode()


class FakeServer:
    """Answers each request by ``reply``; by default as a healthy engine that joins no group.

    Args:
        info: The JSON of ``/server_info``.
        reply: Decides an answer; None leaves it to the healthy engine.
    """

    def __init__(
        self,
        info: dict[str, Any] | None = None,
        reply: Callable[[Asked], Answer | None] | None = None,
    ) -> None:
        self.asked: list[Asked] = []
        self._info = HEALTHY if info is None else info
        self._reply = reply or (lambda asked: None)
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        self._server.daemon_threads = True
        threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_port}"

    def posted(self) -> list[str]:
        """Routes that were called and not only looked at."""
        return [asked.path for asked in self.asked if asked.method == "POST"]

    def _healthy(self, asked: Asked) -> Answer:
        bodies = {"/server_info": self._info, "/model_info": {"weight_version": "default"}}
        if asked.path in ("/workers", "/get_load") and asked.method == "GET":
            return Answer(404, {"detail": "Not Found"})
        return Answer(200, bodies.get(asked.path, {"success": True}))

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        fake = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, *args: Any) -> None: ...

            def answer(self) -> None:
                raw = self.rfile.read(int(self.headers.get("Content-Length") or 0))
                body = json.loads(raw) if raw else None
                asked = Asked(self.command, self.path, dict(self.headers), body)
                fake.asked.append(asked)
                answer = fake._reply(asked) or fake._healthy(asked)
                self.send_response(answer.status)
                for name, value in answer.headers.items():
                    self.send_header(name, value)
                self.send_header("Content-Length", str(len(answer.raw)))
                self.end_headers()
                self.wfile.write(answer.raw)

            do_GET = do_POST = do_OPTIONS = answer

        return Handler

    def __enter__(self) -> FakeServer:
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()
