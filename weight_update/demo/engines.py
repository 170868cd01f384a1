"""The engine that the demo trains against: the reference engine, or a real SGLang on the CPU."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

import requests

from weight_update.demo.sampler import REQUESTS_IN_FLIGHT, DemoError
from weight_update.ports import free_port
from weight_update.reference_engine import ReferenceEngine

EngineKind = Literal["reference", "sglang"]
ENGINES_VARIABLE = "WEIGHT_UPDATE_ENGINES"
LAUNCHER = Path("scripts") / "engines" / "cpu" / "launch_sglang_cpu.py"

_START_SECONDS = 240.0  # nearly all of it is imports, which crawl on busy cores
_STOP_SECONDS = 8.0


class Engine(Protocol):
    """An inference engine in a process of its own."""

    @property
    def url(self) -> str:
        """Where it listens."""

    @property
    def pid(self) -> int:
        """Its process id."""

    def wait_until_ready(self) -> None:
        """Wait until it answers."""

    def stop(self) -> None:
        """End it."""


def start_engine(kind: EngineKind, checkpoint: Path, home: Path) -> Engine:
    """Start an engine, without waiting for it.

    Args:
        kind: Which engine.
        checkpoint: The model that it starts with.
        home: A directory for its log.

    Raises:
        DemoError: The engine is not installed.
    """
    if kind == "sglang":
        return SGLangOnCPU(find_installation(), checkpoint, home)
    return ReferenceEngine(checkpoint, max_running_requests=REQUESTS_IN_FLIGHT, wait=False)


def wait_until_ready(engine: Engine) -> None:
    """Wait until an engine answers.

    Raises:
        DemoError: It ended or was too slow; the text has the end of its log.
    """
    try:
        engine.wait_until_ready()
    except RuntimeError as error:
        raise DemoError(str(error)) from error


@dataclass(frozen=True)
class Installation:
    """Where SGLang is.

    Attributes:
        python: The interpreter of the engine's own environment.
        launcher: The script that starts SGLang on a CPU.
    """

    python: Path
    launcher: Path


def find_installation(start: Path | None = None) -> Installation:
    """Find the repository above ``start`` (the working directory) and the engine in it.

    Raises:
        DemoError: Either is missing; says how to get it.
    """
    here = (start or Path.cwd()).resolve()
    roots = [root for root in (here, *here.parents) if (root / LAUNCHER).is_file()]
    if not roots:
        raise DemoError(f"no {LAUNCHER} here or above: run the demo inside the repository")
    engines = Path(os.environ.get(ENGINES_VARIABLE) or roots[0] / ".engines")
    found = sorted(engines.glob("sglang-*/.installed"), key=_release)
    if not found:
        raise DemoError(
            f"SGLang is not installed in {engines}: run `make engines` first, "
            f"or let {ENGINES_VARIABLE} name the directory that holds it"
        )
    return Installation(found[-1].parent / "bin" / "python", roots[0] / LAUNCHER)


def _release(stamp: Path) -> list[int]:
    """The numbers of a release, by which 0.5.23 is newer than 0.5.9."""
    return [int(number) for number in re.findall(r"\d+", stamp.parent.name)]


class SGLangOnCPU:
    """A real SGLang server.

    Args:
        installation: How to start it.
        checkpoint: The model that it starts with.
        home: A directory for its log.
    """

    def __init__(self, installation: Installation, checkpoint: Path, home: Path) -> None:
        self._port = free_port()
        self._log = home / f"sglang-{self._port}.log"
        command = [str(installation.python), str(installation.launcher)]
        command += self._arguments(checkpoint)
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                command,
                # The launcher dies when this pipe closes, and so never outlives the demo.
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=_environment(),
                start_new_session=True,
            )

    @property
    def url(self) -> str:
        """Where it listens."""
        return f"http://127.0.0.1:{self._port}"

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._process.pid

    def wait_until_ready(self) -> None:
        """Wait until it is healthy.

        Raises:
            DemoError: It ended or was too slow; the text has the end of its log.
        """
        deadline = time.monotonic() + _START_SECONDS
        while not self._healthy():
            if self._process.poll() is not None or time.monotonic() > deadline:
                end = self._log.read_text(errors="replace")[-2000:]
                raise DemoError(f"SGLang did not start; its log ends:\n{end}")
            time.sleep(0.25)

    def stop(self) -> None:
        """Ask it to end, and kill what is left of it and its workers."""
        self._process.terminate()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(_STOP_SECONDS)
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        if self._process.stdin is not None:
            self._process.stdin.close()

    def _arguments(self, checkpoint: Path) -> list[str]:
        return [
            *("--model-path", str(checkpoint)),
            *("--port", str(self._port)),
            *("--max-running-requests", str(REQUESTS_IN_FLIGHT)),
            "--sleep-on-idle",  # an idle server polls otherwise, and takes a core from the trainer
        ]

    def _healthy(self) -> bool:
        session = requests.Session()
        session.trust_env = False
        try:
            return session.get(f"{self.url}/health", timeout=5).status_code == 200
        except requests.RequestException:
            return False


def _environment() -> dict[str, str]:
    """Pass on the environment, less what would lead the engine to this one's packages."""
    dropped = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV")
    kept = {key: value for key, value in os.environ.items() if key not in dropped}
    return {**kept, "EXIT_ON_STDIN_EOF": "1", "HF_HUB_OFFLINE": "1"}
