"""The parent's side: starts the server in a process of its own and talks to it."""

from __future__ import annotations

import http.client
import importlib.util
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any

from weight_update.reference_engine.faults import Fault
from weight_update.reference_engine.releases import release_named

KEY_VARIABLE = "REFERENCE_ENGINE_API_KEY"
ADMIN_KEY_VARIABLE = "REFERENCE_ENGINE_ADMIN_API_KEY"
MISSING_EXTRA = 'The reference engine needs an extra: pip install ".[demo]" (from a clone)'

_NEEDED = ("torch", "transformers", "starlette", "uvicorn")
_STOP_SECONDS = 4.0
# Arguments that the process is started with as they are.
_PASSED_ON = (
    *("host", "dtype", "device", "load_format", "tp", "threads", "answer_delay"),
    *("group_timeout", "health_timeout", "max_running_requests", "prefix_cache_entries"),
)
# Routes that take the ordinary key even where there is one for control.
_ORDINARY = ("/generate", "/ping", "/model_info", "/server_info", "/v1/loads", "/get_load")


class ReferenceEngine:
    """A reference engine in a process of its own.

    It starts with construction and ends with the ``with`` block, :meth:`stop`, :meth:`kill`,
    or the process that made it.

    Args:
        model: A transformers model, or the directory of one.
        release: The SGLang release to stand for, such as ``0.5.17`` or ``0.5.15.post1``.
        port: Port to listen on; 0 picks a free one.
        host: Address to listen on.
        api_key: Bearer token of all routes.
        admin_api_key: Bearer token of the control routes.
        faults: Faults that are armed from the start.
        dtype: Name of the torch dtype of the weights.
        device: ``cpu``, or ``cuda:N`` (weights then arrive over nccl); of the first rank.
        load_format: ``dummy`` starts with arbitrary weights: a directory with a ``config.json``
            is enough then.
        shapes: A JSON file of shapes by name: the engine holds arbitrary parameters of these
            shapes, and generates nothing.
        tp: Tensor parallel ranks, each a process with its shards of the model.
        startup_timeout: Seconds until the engine must be ready.
        group_timeout: Seconds that a rendezvous or broadcast waits; 30 minutes in SGLang.
        health_timeout: Seconds until ``/health`` says 503; 20 in SGLang.
        max_running_requests: Size of the running batch.
        prefix_cache_entries: How many token sequences the prefix cache keeps; 0 for none.
        threads: Torch threads of the engine.
        answer_delay: Seconds by which every answer leaves later, as over a long line.
        fuses: Whether it loses weights of a fused module that do not come in one request.
        memory_saver: Whether released memory is really gone: weights must be sent again, and an
            engine that uses it ends.
        shows: What ``/server_info`` shows besides, such as a quantisation; nothing else changes.
        wait: Whether construction waits until the engine is ready; otherwise call
            :meth:`wait_until_ready`, so that several engines can start at once.

    Raises:
        ImportError: A package of the extra ``weight-update[demo]`` is missing.
        RuntimeError: The engine ended, or was not ready in time.

    Example:
        >>> with ReferenceEngine(model) as engine:  # doctest: +SKIP
        ...     engine.generate([1, 2, 3], max_new_tokens=4)["output_ids"]
        [17, 5, 5, 40]
    """

    def __init__(
        self,
        model: Any,
        *,
        release: str = "0.5.23",
        port: int = 0,
        host: str = "127.0.0.1",
        api_key: str | None = None,
        admin_api_key: str | None = None,
        faults: Sequence[Fault] = (),
        dtype: str = "float32",
        device: str = "cpu",
        load_format: str = "auto",
        shapes: str | Path | None = None,
        tp: int = 1,
        startup_timeout: float = 120.0,
        group_timeout: float = 1800.0,
        health_timeout: float = 2.0,
        max_running_requests: int = 64,
        prefix_cache_entries: int = 128,
        threads: int = 1,
        answer_delay: float = 0.0,
        fuses: bool = False,
        memory_saver: bool = False,
        shows: Mapping[str, Any] | None = None,
        wait: bool = True,
    ) -> None:
        given = dict(locals())
        check_extra()
        self._home = tempfile.TemporaryDirectory(prefix="reference-engine-")
        self._keys = {KEY_VARIABLE: api_key, ADMIN_KEY_VARIABLE: admin_api_key}
        self._host = host
        self._port = port
        self._startup_timeout = startup_timeout
        # Held while a process starts: calls of other threads wait for it, or find it there.
        self._starting = threading.RLock()
        self._records: list[dict[str, Any]] | None = None
        self._logs: dict[Path, _LogReader] = {}
        self._options: dict[str, object] = {
            **{name.replace("_", "-"): given[name] for name in _PASSED_ON},
            **({} if shapes is None else {"shapes": shapes}),
            "model": self._model_directory(model),
            "release": release_named(release).name,
            "fuses": int(fuses),
            "memory-saver": int(memory_saver),
            "shows": json.dumps(dict(shows or {})),
        }
        self._spawn(faults)
        if wait:
            self.wait_until_ready()

    def _model_directory(self, model: Any) -> str:
        if isinstance(model, (str, Path)):
            return str(model)
        if not hasattr(model, "save_pretrained"):
            raise TypeError(f"a transformers model or a directory is needed, not {model!r:.80}")
        directory = str(Path(self._home.name) / "model")
        _save_quietly(model, directory)
        return directory

    # ---- the process

    def _spawn(self, faults: Sequence[Fault] = ()) -> None:
        home = Path(self._home.name)
        reading, ready = os.pipe()
        self._ready: int | None = reading
        options = self._options | {
            "port": self._port,
            "request-log": home / f"requests-{time.time_ns()}.jsonl",
            "ready-fd": ready,
            "parent-pid": os.getpid(),
        }
        command = [sys.executable, "-m", "weight_update.reference_engine"]
        command += [f"--{name}={value}" for name, value in options.items()]
        command += [f"--fault={json.dumps(fault.to_dict())}" for fault in faults]
        with (home / "engine.log").open("ab") as log:
            self.process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=_environment(self._keys),
                pass_fds=[ready],
                # Ctrl-C is for the parent, whose exit stops the engine.
                start_new_session=True,
            )
        os.close(ready)
        self._rank_group: int | None = self.process.pid
        self._is_ready = False

    def _take_port(self) -> int | None:
        """Wait for the child to report its port; None if it ended or time is out."""
        if self._ready is None:
            return None
        arrived = select.select([self._ready], [], [], self._startup_timeout)[0]
        text = os.read(self._ready, 16).decode().strip() if arrived else ""
        self._forget_ready()
        return int(text) if text else None

    def _forget_ready(self) -> None:
        if self._ready is not None:
            os.close(self._ready)
            self._ready = None

    def wait_until_ready(self) -> None:
        """Wait until the engine answers; returns at once if it was ready before.

        Raises:
            RuntimeError: It ended or was too slow; the text has the end of its log.
        """
        with self._starting:
            if self._is_ready:
                return
            port = self._take_port()
            if port is None:
                log = self.log()[-2000:]
                self.kill()
                raise RuntimeError(f"the reference engine did not start; its log ends:\n{log}")
            self._port, self._is_ready = port, True

    @property
    def url(self) -> str:
        """Where the engine listens, such as ``http://127.0.0.1:41234``."""
        self.wait_until_ready()
        host = f"[{self._host}]" if ":" in self._host else self._host
        return f"http://{host}:{self._port}"

    @property
    def pid(self) -> int:
        """The engine's process id."""
        return self.process.pid

    def log(self) -> str:
        """Return what the engine has logged, since the first start."""
        path = Path(self._home.name) / "engine.log"
        return path.read_text(errors="replace") if path.exists() else ""

    def restart(self) -> None:
        """End the engine hard and start it again on its port.

        It comes back as at first: base weights, no group, no session, not paused, version
        ``default``; without faults, and with an empty prefix cache. Calls of other threads
        that the old process had not answered fail; later ones wait for the new process.
        """
        with self._starting:
            self._end_process(0)
            self._forget_ready()
            self._spawn()
            self.wait_until_ready()

    def stop(self) -> None:
        """End the engine, by force if it doesn't go within four seconds."""
        self._end_process(_STOP_SECONDS)
        self._clean_up()

    def kill(self) -> None:
        """End the engine at once."""
        self._end_process(0)
        self._clean_up()

    def _end_process(self, patience: float) -> None:
        if patience and self.process.poll() is None:
            self.process.terminate()
            with suppress(subprocess.TimeoutExpired):
                self.process.wait(patience)
        if self._rank_group is not None:
            with suppress(ProcessLookupError):
                os.killpg(self._rank_group, signal.SIGKILL)  # all its ranks, frozen ones too
            self._rank_group = None
        self.process.wait()

    def _clean_up(self) -> None:
        with self._starting:
            self._end_process(0)  # another thread may have restarted it meanwhile
            self._forget_ready()
            if self._records is None:
                self._records = self.requests()
                self._home.cleanup()

    def __enter__(self) -> ReferenceEngine:
        self.wait_until_ready()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()

    # ---- talking to it

    def generate(
        self,
        input_ids: Sequence[int] | Sequence[Sequence[int]],
        max_new_tokens: int = 16,
        temperature: float = 0.0,
        *,
        timeout: float | None = 60.0,
        rid: str | None = None,
        extra_key: str | None = None,
        return_logprob: bool = False,
        **sampling: Any,
    ) -> Any:
        """Generate for one prompt (a dict) or a list of prompts (a list of dicts).

        Args:
            input_ids: Token ids of one prompt, or of each of several.
            max_new_tokens: Length of the output, unless a stop token comes first.
            temperature: 0 is greedy.
            timeout: Seconds until the client gives up; None waits for ever.
            rid: Request id, to abort it by.
            extra_key: Prefixes are shared with requests of the same key only.
            return_logprob: Whether ``meta_info`` gets ``output_token_logprobs``.
            sampling: Further sampling parameters, such as ``ignore_eos=True``.

        Raises:
            RuntimeError: The engine did not answer 200.
        """
        params = {"max_new_tokens": max_new_tokens, "temperature": temperature} | sampling
        body: dict[str, Any] = {"input_ids": input_ids, "sampling_params": params}
        body["return_logprob"] = return_logprob
        named = {"rid": rid, "extra_key": extra_key}
        body |= {name: value for name, value in named.items() if value is not None}
        return self.call("POST", "/generate", body, timeout=timeout)

    def inject(self, fault: Fault) -> None:
        """Arm a fault."""
        self.call("POST", "/_reference/faults", fault.to_dict())

    def clear_faults(self) -> None:
        """Disarm all faults; calls that hang already stay so."""
        self.call("DELETE", "/_reference/faults")

    def requests(self) -> list[dict[str, Any]]:
        """Return the requests that the engine saw since its first start, in order.

        Each is a dict of ``method``, ``path``, ``json``, ``status``, ``t0``, ``t1`` (seconds
        of ``time.time()``). ``status`` and ``t1`` are None for what was not answered, and
        ``status`` alone for a dropped connection. The log outlives the engine.
        """
        if self._records is not None:
            return self._records
        files = sorted(Path(self._home.name).glob("requests-*.jsonl"))
        logs = [self._logs.setdefault(file, _LogReader(file)) for file in files]
        records = [record for log in logs for record in log.read()]
        return [record for record in records if not record["path"].startswith("/_reference")]

    def call(
        self, method: str, path: str, body: object = None, *, timeout: float | None = 60.0
    ) -> Any:
        """Make one call with the engine's own keys, past any proxy, and return its JSON.

        Raises:
            RuntimeError: The engine did not answer 200; the text has what it said.
        """
        self.wait_until_ready()
        status, text = self._exchange(method, path, body, timeout)
        if status != 200:
            raise RuntimeError(f"{method} {path} answered {status}: {text}")
        try:
            return json.loads(text)
        except ValueError:
            return text

    def _exchange(
        self, method: str, path: str, body: object, timeout: float | None
    ) -> tuple[int, str]:
        connection = http.client.HTTPConnection(self._host, self._port, timeout=timeout)
        admin = path not in _ORDINARY and self._keys[ADMIN_KEY_VARIABLE]
        key = admin or self._keys[KEY_VARIABLE]
        headers = {"Content-Type": "application/json"}
        if key:
            headers["Authorization"] = f"Bearer {key}"
        try:
            data = None if body is None else json.dumps(body)
            connection.request(method, path, data, headers)
            response = connection.getresponse()
            return response.status, response.read().decode()
        finally:
            connection.close()


def check_extra() -> None:
    """Raise if a package of the extra ``weight-update[demo]`` is missing."""
    for name in _NEEDED:
        if importlib.util.find_spec(name) is None:
            raise ImportError(f"{name} is not installed. {MISSING_EXTRA}")


def _save_quietly(model: Any, directory: str) -> None:
    """Save a model without the progress bar, and leave the bar's setting as it was."""
    from transformers.utils import logging as transformers_logging

    logging: Any = transformers_logging
    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        model.save_pretrained(directory)
    finally:
        if shown:
            logging.enable_progress_bar()


def _environment(keys: Mapping[str, str | None]) -> dict[str, str]:
    """The child's environment: this package importable, offline, and no rank of a job."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith("TORCHELASTIC_")}
    root = str(Path(__file__).resolve().parents[2])
    kept["PYTHONPATH"] = os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))
    kept["HF_HUB_OFFLINE"] = "1"
    kept["TOKENIZERS_PARALLELISM"] = "false"
    return kept | {name: key for name, key in keys.items() if key is not None}


class _LogReader:
    """Reads a request log that grows; each line is parsed once, and only when it is whole."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0
        self._records: dict[int, dict[str, Any]] = {}

    def read(self) -> list[dict[str, Any]]:
        """Return the present state of each request, in order of arrival."""
        with self._path.open("rb") as file:
            file.seek(self._offset)
            whole, newline, _ = file.read().rpartition(b"\n")
        self._offset += len(whole) + len(newline)
        for line in whole.splitlines():
            change = json.loads(line)
            self._records.setdefault(change.pop("id"), {}).update(change)
        return list(self._records.values())
