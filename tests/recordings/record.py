"""Record updates of the real SGLang 0.5.23 made with the library.

    .venv/bin/python -m tests.recordings.record

needs the engine of `make engines`, takes a minute or two, and replaces `sglang-0.5.23/` beside
this file. The library talks to the server through a small proxy that notes every request and
answer; the bytes are noted where the library hands them to the group.
"""

from __future__ import annotations

import shutil
import tempfile
import threading
import time
from concurrent.futures import Future
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import requests
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from tests.engines.sglang_server import SGLangServer
from tests.recordings.recording import (
    HOME,
    LONG,
    MODEL,
    PROMPT,
    Scenario,
    Tensors,
    decoded,
    kept,
    save,
)
from weight_update import SGLangWeightSyncScheme
from weight_update.transports.process_group import UpdateGroup
from weight_update.waiting import spawn

SECONDS = 120.0
UPDATE = "/update_weights_from_distributed"

#: Name, options of the scheme, and the seed of the weights that are sent.
SCENARIOS: tuple[tuple[str, dict[str, Any], int], ...] = (
    ("abort, one flattened bucket", {"pause_mode": "abort"}, 2),
    ("retract, one broadcast a tensor", {"pause_mode": "retract", "load_format": "tensors"}, 1),
    ("in_place, several buckets", {"pause_mode": "in_place", "bucket_bytes": 20_000}, 2),
    ("retract, one flattened bucket", {"pause_mode": "retract"}, 1),
)


def model(seed: int) -> LlamaForCausalLM:
    """A tiny Llama whose numbers have 8 significant bits, so that they compress."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        max_position_embeddings=2048,
        initializer_range=0.3,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=None,
    )
    return LlamaForCausalLM(config).to(torch.bfloat16).float().eval()  # type: ignore[no-untyped-call]


class Recorder:
    """Notes what passes, in order."""

    def __init__(self, target: str) -> None:
        self.target = target
        self.tensors = Tensors()
        self.scenario = Scenario("")
        self._noting = threading.Lock()
        self._count = 0
        self._open: dict[str, Any] = {}

    def ask(self, method: str, path: str, body: bytes) -> int:
        """A request leaves; returns its number."""
        with self._noting:
            number, self._count = self._count, self._count + 1
            event = {"event": "ask", "number": number, "method": method, "path": path}
            event["body"] = decoded(body.decode()) if body else None
            if path == UPDATE:
                event["wire"] = []
                self._open = event
            self.scenario.events.append(event)
            return number

    def answer(self, number: int, path: str, status: int, text: str) -> None:
        """Its answer comes."""
        event = {"event": "answer", "number": number, "status": status}
        event["body"] = kept(path, decoded(text))
        with self._noting:
            self.scenario.events.append(event)

    def running(self) -> None:
        """The long request was seen to run."""
        with self._noting:
            self.scenario.events.append({"event": "running"})

    def bytes_leave(self, tensors: list[torch.Tensor]) -> None:
        """A bucket is broadcast; its request may still be on the way to the proxy."""
        names = [self.tensors.add(tensor) for tensor in tensors]
        deadline = time.monotonic() + SECONDS
        while self._open.get("wire") != [] and time.monotonic() < deadline:
            time.sleep(0.005)
        self._open["wire"] += names


def proxy(recorder: Recorder) -> ThreadingHTTPServer:
    """A server that passes requests on and notes them."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def serve(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            number = recorder.ask(self.command, self.path, body)
            answer = requests.request(
                self.command,
                recorder.target + self.path,
                data=body,
                headers={"Content-Type": "application/json"},
                timeout=SECONDS,
            )
            recorder.answer(number, self.path, answer.status_code, answer.text)
            self.send_response(answer.status_code)
            self.send_header("Content-Type", answer.headers.get("Content-Type", "text/plain"))
            self.send_header("Content-Length", str(len(answer.content)))
            self.end_headers()
            self.wfile.write(answer.content)

        do_GET = do_POST = do_OPTIONS = serve

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return server


class Director:
    """Plays the scenarios through the proxy."""

    def __init__(self, recorder: Recorder, url: str) -> None:
        self._recorder = recorder
        self._url = url

    def play(self, name: str, options: dict[str, Any], seed: int) -> Scenario:
        """One update with a request in flight, and requests before and after it."""
        self._recorder.scenario = Scenario(name)
        self._post("/flush_cache", {})
        self._generate(PROMPT, 12)
        scheme = SGLangWeightSyncScheme(self._url, timeout=SECONDS, **options)
        with scheme.create_sender() as sender:
            sender.init_all_workers_group()
            long = self._start_long()
            sender.update_weights(model(seed))
            time.sleep(0.5)
            self._post("/abort_request", {"rid": LONG})
            long.result(SECONDS)
            self._generate(PROMPT, 12)
            self._post("/flush_cache", {})
            self._generate(PROMPT, 12)
        return self._recorder.scenario

    def _start_long(self) -> Future[Any]:
        long = spawn(self._generate, [3, 1, 4], 1500, LONG)
        while not _running(self._recorder.target):
            time.sleep(0.01)
        self._recorder.running()
        return long

    def _generate(self, prompt: list[int], tokens: int, rid: str | None = None) -> None:
        sampling = {"max_new_tokens": tokens, "temperature": 0, "ignore_eos": True}
        body = {"input_ids": prompt, "sampling_params": sampling}
        self._post("/generate", body if rid is None else {**body, "rid": rid})

    def _post(self, path: str, body: dict[str, Any]) -> None:
        requests.post(self._url + path, json=body, timeout=SECONDS).raise_for_status()


def _running(url: str) -> bool:
    loads = requests.get(f"{url}/v1/loads", timeout=SECONDS).json()["loads"]
    return bool(loads[0]["num_running_reqs"])


def main() -> None:
    """Start a server, play the scenarios, write the recording."""
    shutil.rmtree(HOME, ignore_errors=True)
    model(1).save_pretrained(MODEL)
    with tempfile.TemporaryDirectory() as home:
        log = Path(home) / "server.log"
        arguments = ["--skip-tokenizer-init"]
        with SGLangServer(MODEL, log, extra_args=arguments) as server:
            recorder = Recorder(server.url)
            broadcast = UpdateGroup.broadcast

            def noted(group: UpdateGroup, tensors: list[torch.Tensor]) -> None:
                recorder.bytes_leave(tensors)
                broadcast(group, tensors)

            UpdateGroup.broadcast = noted  # type: ignore[method-assign]
            listener = proxy(recorder)
            director = Director(recorder, f"http://127.0.0.1:{listener.server_address[1]}")
            scenarios = [director.play(*scenario) for scenario in SCENARIOS]
    save(scenarios, recorder.tensors)
    print(f"{HOME}: {sum(f.stat().st_size for f in HOME.rglob('*') if f.is_file()):,} bytes")


if __name__ == "__main__":
    main()
