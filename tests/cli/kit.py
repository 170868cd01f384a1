"""Tiny checkpoints, what they generate, and the command line run in this process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from typer.testing import CliRunner

from tests.integration.kit import (  # noqa: F401 - of use to all tests of the folder
    is_paused,
    label,
    llama,
    served,
    tokens_of,
    wait_for,
)
from weight_update.cli.main import app
from weight_update.reference_engine import ReferenceEngine

UPDATE = "/update_weights_from_distributed"
FROM_DISK = "/update_weights_from_disk"
PAUSE = "/pause_generation"
ERROR = sorted(["kind", "message", "engine", "engines", "phase", "remedy"])
"""What every error in JSON has."""
JOIN, LEAVE = "/init_weights_update_group", "/destroy_weights_update_group"


@dataclass(frozen=True)
class Ended:
    """How a command ended."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        """Standard output, which must be JSON and nothing else."""
        return json.loads(self.out)


def run(*arguments: object, **environment: str) -> Ended:
    """Runs a command in this process, with these variables."""
    ended = CliRunner().invoke(app, [str(each) for each in arguments], env=environment)
    if ended.exception is not None and not isinstance(ended.exception, SystemExit):
        raise ended.exception
    return Ended(ended.exit_code, ended.stdout, ended.stderr)


def servers(*engines: ReferenceEngine) -> list[str]:
    """The options that name engines."""
    return [word for engine in engines for word in ("--server", engine.url)]


def start(*arguments: object) -> subprocess.Popen[str]:
    """Starts a command in a process of its own."""
    command = [sys.executable, "-m", "weight_update.cli", *map(str, arguments)]
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=dict(os.environ)
    )


class Log:
    """What an engine was asked since this object was made.

    A command does not wait until the engine has left its group, so that the request of an
    earlier command may arrive late: leaves of groups that were not joined since are left out.
    """

    def __init__(self, engine: ReferenceEngine) -> None:
        self._engine = engine
        self.start = len(engine.requests())

    def asked(self) -> list[tuple[str, str]]:
        """Method and path of each request."""
        asked = self._engine.requests()[self.start :]
        joined = {r["json"]["group_name"] for r in asked if r["path"] == JOIN}
        return [
            (r["method"], r["path"])
            for r in asked
            if r["path"] != LEAVE or r["json"]["group_name"] in joined
        ]

    def count(self, path: str) -> int:
        """How often a route was posted to."""
        return self.asked().count(("POST", path))


@contextmanager
def impostor(
    answers: Mapping[str, tuple[int, Any]], headers: Sequence[tuple[str, str]] = ()
) -> Iterator[str]:
    """A server that is something else; yields its URL. Unlisted routes are 404."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            status, body = answers.get(self.path, answers.get("*", (404, {"detail": "Not Found"})))
            data = body if isinstance(body, str) else json.dumps(body)
            self.send_response(status)
            for name, value in (*headers, ("Content-Length", str(len(data)))):
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(data.encode())

        do_OPTIONS = do_POST = do_GET

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


@dataclass(frozen=True)
class Checkpoints:
    """Folders of checkpoints: A is served at first; B, in several shards, is another model."""

    a: Path
    b: Path
    wide: Path
