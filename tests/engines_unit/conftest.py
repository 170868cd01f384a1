"""A small HTTP server that answers as each test tells it, and remembers what it was asked."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest


@dataclass
class Answer:
    """What the server says: a status and a body, after a delay; or nothing at all."""

    status: int = 200
    body: Any = field(default_factory=lambda: {"success": True})
    delay: float = 0.0
    hang_up: bool = False
    headers: dict[str, str] = field(default_factory=dict)

    @property
    def raw(self) -> bytes:
        if isinstance(self.body, bytes):
            return self.body
        text = self.body if isinstance(self.body, str) else json.dumps(self.body)
        return text.encode()


@dataclass
class Asked:
    method: str
    path: str
    headers: dict[str, str]
    body: Any


class StubServer:
    """One server; ``answers`` maps a path to an :class:`Answer`, any other path is a plain yes.

    ``by_body`` maps a path to what makes an answer of what was sent.
    """

    def __init__(self) -> None:
        self.answers: dict[str, Answer] = {}
        self.by_body: dict[str, Callable[[Any], Answer]] = {}
        self.asked: list[Asked] = []
        self.connections = 0
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        self._server.daemon_threads = True
        threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_port}"

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        stub = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def setup(self) -> None:
                super().setup()
                stub.connections += 1

            def log_message(self, *args: Any) -> None: ...

            def answer(self) -> None:
                size = int(self.headers.get("Content-Length") or 0)
                raw = self.rfile.read(size)
                body = json.loads(raw) if raw else None
                stub.asked.append(Asked(self.command, self.path, dict(self.headers), body))
                make = stub.by_body.get(self.path)
                answer = make(body) if make else stub.answers.get(self.path, Answer())
                time.sleep(answer.delay)
                if answer.hang_up:
                    self.connection.shutdown(socket.SHUT_RDWR)
                    self.close_connection = True
                    return
                self.send_response(answer.status)
                for name, value in answer.headers.items():
                    self.send_header(name, value)
                self.send_header("Content-Length", str(len(answer.raw)))
                self.end_headers()
                self.wfile.write(answer.raw)

            do_GET = do_POST = do_OPTIONS = answer

        return Handler


@pytest.fixture
def server() -> Iterator[StubServer]:
    stub = StubServer()
    yield stub
    stub.close()


@pytest.fixture
def make_server() -> Iterator[Callable[[], StubServer]]:
    made: list[StubServer] = []

    def make() -> StubServer:
        made.append(StubServer())
        return made[-1]

    yield make
    for stub in made:
        stub.close()


@pytest.fixture
def answer() -> type[Answer]:
    return Answer
