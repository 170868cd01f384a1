"""A real SGLang server, run as a child process of the tests."""

import os
import signal
import socket
import subprocess
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import requests

REPOSITORY = Path(__file__).resolve().parents[2]
ENGINE_HOME = REPOSITORY / ".engines" / "sglang-0.5.23"
ENGINE_PYTHON = ENGINE_HOME / "bin" / "python"
LAUNCHER = REPOSITORY / "scripts" / "engines" / "cpu" / "launch_sglang_cpu.py"

START_TIMEOUT = 300.0  # nearly all of it is imports, which crawl on busy cores
STOP_TIMEOUT = 10.0  # an idle server stops in under 4 s; one stuck in a collective does not
REQUEST_TIMEOUT = 120.0


class SGLangServer:
    """One server on one checkpoint.

    A context manager: entering starts the server and waits until it is healthy, leaving kills
    its whole process group. The server also holds a pipe to this process and dies when that
    closes, so not even a killed test run leaves it behind.

    ``with SGLangServer(model_dir, log_path) as server: server.generate([5, 6, 7], 8)``
    """

    def __init__(self, model_dir: Path, log_path: Path, extra_args: Sequence[str] = ()) -> None:
        """Choose a free port; nothing is started yet."""
        self.model_dir = model_dir
        self.log_path = log_path
        self.port = _free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self._extra_args = tuple(extra_args)
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        """Start the server."""
        self.start()
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Stop the server."""
        self.stop()

    @property
    def pid(self) -> int:
        """The launcher's process id, which is also that of its process group."""
        if self._process is None:
            raise RuntimeError("the SGLang server is not running")
        return self._process.pid

    def start(self, timeout: float = START_TIMEOUT) -> None:
        """Launch the server and wait until it answers, or raise with the end of its log."""
        if self._process is not None:
            raise RuntimeError("the SGLang server is already running")
        self._process = self._launch()
        try:
            self._wait_until_healthy(self._process, timeout)
        except BaseException:
            self.stop()
            raise

    def stop(self) -> None:
        """Ask the server to stop, then kill whatever is left of its process group."""
        process, self._process = self._process, None
        if process is None:
            return
        process.terminate()
        with suppress(subprocess.TimeoutExpired):
            process.wait(STOP_TIMEOUT)
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        if process.stdin is not None:
            process.stdin.close()

    def generate(
        self, input_ids: Sequence[int], max_new_tokens: int, temperature: float = 0
    ) -> list[int]:
        """Continue a prompt by exactly `max_new_tokens` tokens and return them."""
        sampling = {
            "max_new_tokens": max_new_tokens,
            "temperature": temperature,
            "ignore_eos": True,
        }
        answer = self.post("generate", {"input_ids": list(input_ids), "sampling_params": sampling})
        return [int(token) for token in answer["output_ids"]]

    def load(self, model_dir: Path) -> None:
        """Make the server serve another checkpoint of the same architecture, read from disk."""
        self.post("update_weights_from_disk", {"model_path": str(model_dir)})

    def post(self, route: str, body: dict[str, Any], timeout: float = REQUEST_TIMEOUT) -> Any:
        """Post JSON and return the decoded answer, or raise with the server's own words."""
        answer = requests.post(f"{self.url}/{route}", json=body, timeout=timeout)
        if not answer.ok:
            raise RuntimeError(f"/{route} answered {answer.status_code}: {answer.text}")
        return answer.json()

    def label(self) -> str:
        """The version label that the server shows."""
        answer = requests.get(f"{self.url}/model_info", timeout=REQUEST_TIMEOUT)
        return str(answer.json()["weight_version"])

    def log_tail(self, lines: int = 40) -> str:
        """Return the last lines that the server wrote."""
        text = self.log_path.read_text(errors="replace")
        return "\n".join(text.splitlines()[-lines:])

    def _launch(self) -> subprocess.Popen[bytes]:
        command = [str(ENGINE_PYTHON), str(LAUNCHER)]
        command += ["--model-path", str(self.model_dir), "--port", str(self.port)]
        with self.log_path.open("wb") as log:
            return subprocess.Popen(
                [*command, *self._extra_args],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=_engine_environment(),
                start_new_session=True,
            )

    def _wait_until_healthy(self, process: subprocess.Popen[bytes], timeout: float) -> None:
        deadline = time.monotonic() + timeout
        while time.monotonic() < deadline:
            if process.poll() is not None:
                raise self._start_error(f"exited with status {process.returncode}")
            if _is_healthy(self.url):
                return
            time.sleep(0.25)
        raise self._start_error(f"was not healthy after {timeout:.0f} s")

    def _start_error(self, reason: str) -> RuntimeError:
        return RuntimeError(f"the SGLang server {reason}; {self.log_path} ends:\n{self.log_tail()}")


def is_installed() -> bool:
    """Tell whether the installer has finished here."""
    return (ENGINE_HOME / ".installed").is_file() and ENGINE_PYTHON.exists()


def _is_healthy(url: str) -> bool:
    try:
        return requests.get(f"{url}/health", timeout=5).status_code == 200
    except requests.RequestException:
        return False


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _engine_environment() -> dict[str, str]:
    """Pass on the environment, less what would lead the engine to other packages."""
    dropped = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV")
    kept = {key: value for key, value in os.environ.items() if key not in dropped}
    return {**kept, "EXIT_ON_STDIN_EOF": "1", "HF_HUB_OFFLINE": "1"}
