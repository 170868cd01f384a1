"""A real engine, run as a child process of the tests."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import requests

from weight_update.ports import free_port

REPOSITORY = Path(__file__).resolve().parents[2]
ENGINES = REPOSITORY / ".engines"
LAUNCHERS = REPOSITORY / "scripts" / "engines" / "cpu"

START_TIMEOUT = 300.0  # nearly all of it is imports, which crawl on busy cores
REQUEST_TIMEOUT = 120.0


class EngineServer(ABC):
    """One server on one checkpoint.

    A context manager: entering starts the server and waits until it is healthy, leaving kills
    its whole process group. The server also holds a pipe to this process and dies when that
    closes, so not even a killed test run leaves it behind.

    Args:
        engine: Name of its environment, such as ``sglang-0.5.23``.
        log_path: Where its output goes.
    """

    def __init__(self, engine: str, log_path: Path) -> None:
        """Choose a free port; nothing is started yet."""
        self.engine = engine
        self.log_path = log_path
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self._process: subprocess.Popen[bytes] | None = None

    @abstractmethod
    def command(self) -> Sequence[str]:
        """The launcher and its arguments, without the interpreter."""

    def environment(self) -> Mapping[str, str]:
        """Variables of its own."""
        return {}

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
            raise RuntimeError(f"{self.engine} is not running")
        return self._process.pid

    def start(self, timeout: float = START_TIMEOUT) -> None:
        """Launch the server and wait until it answers, or raise with the end of its log."""
        if self._process is not None:
            raise RuntimeError(f"{self.engine} is already running")
        self._process = self._launch()
        try:
            self._wait_until_healthy(self._process, timeout)
        except BaseException:
            self.stop()
            raise

    def stop(self) -> None:
        """Kill the server: asked to stop, it takes its time for what no test looks at."""
        process, self._process = self._process, None
        if process is None:
            return
        _kill_group(process.pid)
        process.wait()
        if process.stdin is not None:
            process.stdin.close()

    def get(self, route: str, timeout: float = REQUEST_TIMEOUT) -> Any:
        """Get JSON, or raise with the server's own words."""
        return self._json("GET", route, None, timeout)

    def post(self, route: str, body: Mapping[str, Any], timeout: float = REQUEST_TIMEOUT) -> Any:
        """Post JSON and return the decoded answer, or raise with the server's own words."""
        return self._json("POST", route, body, timeout)

    def status(
        self,
        method: str,
        route: str,
        body: Mapping[str, Any] | None = None,
        timeout: float = REQUEST_TIMEOUT,
    ) -> int:
        """Send a request and return only the status of its answer."""
        return self._request(method, route, body, timeout).status_code

    def log_tail(self, lines: int = 40) -> str:
        """Return the last lines that the server wrote."""
        text = self.log_path.read_text(errors="replace")
        return "\n".join(text.splitlines()[-lines:])

    def _json(self, method: str, route: str, body: Mapping[str, Any] | None, timeout: float) -> Any:
        answer = self._request(method, route, body, timeout)
        if not answer.ok:
            raise RuntimeError(f"/{route} answered {answer.status_code}: {answer.text}")
        return answer.json()

    def _request(
        self, method: str, route: str, body: Mapping[str, Any] | None, timeout: float
    ) -> requests.Response:
        return requests.request(method, f"{self.url}/{route}", json=body, timeout=timeout)

    def _launch(self) -> subprocess.Popen[bytes]:
        with self.log_path.open("wb") as log:
            return subprocess.Popen(
                [str(engine_python(self.engine)), *self.command()],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**_engine_environment(), **self.environment()},
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
        return RuntimeError(f"{self.engine} {reason}; {self.log_path} ends:\n{self.log_tail()}")


def engine_python(engine: str) -> Path:
    """The interpreter of an engine's own environment."""
    return ENGINES / engine / "bin" / "python"


def is_installed(engine: str) -> bool:
    """Tell whether the installer has finished here."""
    return (ENGINES / engine / ".installed").is_file() and engine_python(engine).exists()


def _kill_group(group: int) -> None:
    """Kill all processes of a group, but those that then remove what they shared, and end."""
    while members := [pid for pid in map(int, _pids()) if _is_member(pid, group)]:
        for pid in members:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.02)


def _pids() -> list[str]:
    return [name for name in os.listdir("/proc") if name.isdecimal()]


def _is_member(pid: int, group: int) -> bool:
    """Tell whether it is of that group, runs, and is no resource tracker."""
    with suppress(OSError):  # it has ended meanwhile
        command = Path(f"/proc/{pid}/cmdline").read_bytes()  # empty once it is dead
        return os.getpgid(pid) == group and bool(command) and b"resource_tracker" not in command
    return False


def _is_healthy(url: str) -> bool:
    try:
        return requests.get(f"{url}/health", timeout=5).status_code == 200
    except requests.RequestException:
        return False


def _engine_environment() -> dict[str, str]:
    """Pass on the environment, less what would lead the engine to other packages."""
    dropped = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV")
    kept = {key: value for key, value in os.environ.items() if key not in dropped}
    return {**kept, "EXIT_ON_STDIN_EOF": "1", "HF_HUB_OFFLINE": "1"}
