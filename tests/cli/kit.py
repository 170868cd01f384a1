"""Tiny checkpoints, what they generate, and the command line run in this process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM
from typer.testing import CliRunner

from weight_update.cli.main import app
from weight_update.reference_engine import ReferenceEngine

PROMPT = [5, 9, 17, 33, 2, 40, 41, 8]
TOKENS = 8
UPDATE = "/update_weights_from_distributed"
FROM_DISK = "/update_weights_from_disk"
PAUSE = "/pause_generation"
JOIN, LEAVE = "/init_weights_update_group", "/destroy_weights_update_group"


@cache
def llama(seed: int, hidden: int = 32) -> LlamaForCausalLM:
    """A random Llama; shared, so tests must not change it."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=hidden,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=4096,
        initializer_range=0.2,
        tie_word_embeddings=False,
        eos_token_id=None,
        bos_token_id=None,
    )
    return LlamaForCausalLM(config).eval()


@cache
def tokens_of(seed: int) -> list[int]:
    """What the model of a seed generates greedily, by transformers."""
    ids = torch.tensor([PROMPT])
    with torch.no_grad():
        out = llama(seed).generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=TOKENS,
            do_sample=False,
        )
    return list(out[0, len(PROMPT) :].tolist())


def served(engine: ReferenceEngine) -> list[int]:
    """What an engine generates."""
    return list(engine.generate(PROMPT, TOKENS, timeout=20)["output_ids"])


def label(engine: ReferenceEngine) -> str:
    """The version that an engine shows."""
    return str(engine.call("GET", "/model_info", timeout=20)["weight_version"])


def is_paused(engine: ReferenceEngine) -> bool:
    """Whether an engine holds new requests."""
    try:
        engine.call("GET", "/ready", timeout=20)
    except RuntimeError:
        return True
    return False


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


def wait_for(condition: Callable[[], Any], seconds: float = 90.0) -> None:
    """Polls until ``condition`` is true."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "condition never came true"
        time.sleep(0.02)


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
