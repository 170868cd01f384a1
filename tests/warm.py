"""Processes of tests that start in milliseconds: forked from one that has imported torch already.

Importing it again for each of hundreds of engines would take a third of all tests' time. The
parent of all is this file run as a module; tests hold a :class:`WarmProcess` as they would hold a
``Popen``. A child has the environment and the folder that it is given, and finds modules where its
parent does.
"""

from __future__ import annotations

import atexit
import ctypes
import fcntl
import gc
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import IO, Any

ROOT = Path(__file__).parents[1]
HIGH = 500  # no descriptor of a child's own is beyond
MOST_BYTES, MOST_DESCRIPTORS = 1 << 20, 16
_PARENT_DEATH_SIGNAL = 1


class WarmProcess:
    """What tests use of ``subprocess.Popen``: ``python -m module arguments``.

    Args:
        command: As of ``Popen``; the interpreter is this one.
        stdin: Nothing can be read, as of ``subprocess.DEVNULL``, whatever is given.
        stdout: A file, or ``subprocess.PIPE``; and so on, as of ``Popen``.
        start_new_session: Always so.
    """

    def __init__(
        self,
        command: Sequence[str],
        *,
        stdin: int | None = None,
        stdout: IO[Any] | int | None = None,
        stderr: IO[Any] | int | None = None,
        cwd: Path | None = None,
        env: Mapping[str, str] | None = None,
        pass_fds: Sequence[int] = (),
        start_new_session: bool = True,
        text: bool = False,
    ) -> None:
        self.args, self.returncode = command, None
        self._noting = threading.Lock()
        _, _, module, *arguments = command
        reading, writing = os.pipe() if stdout == subprocess.PIPE else (None, None)
        streams = {1: writing if writing is not None else stdout, 2: stderr}
        given = {number: _number(file) for number, file in streams.items() if file is not None}
        given |= {number: number for number in pass_fds}
        order = {"module": module, "arguments": arguments, "env": dict(env or os.environ)}
        order |= {"cwd": str(cwd or Path.cwd()), "descriptors": list(given)}
        self.pid, self._ended = _fork_server().start(order, list(given.values()))
        if writing is not None:
            os.close(writing)
        self.stdout = None if reading is None else os.fdopen(reading, "r" if text else "rb")

    def poll(self) -> int | None:
        """How it ended; None while it runs."""
        with suppress(subprocess.TimeoutExpired):
            return self.wait(0)
        return None

    def wait(self, timeout: float | None = None) -> int:
        """Wait for its end."""
        if self.returncode is None:
            watch = select.poll()
            watch.register(self._ended, select.POLLIN)
            if not watch.poll(None if timeout is None else timeout * 1000):
                raise subprocess.TimeoutExpired(self.args, timeout or 0.0)
            self._note(_fork_server().code_of(self.pid))
        return self.returncode

    def _note(self, code: int) -> None:
        with self._noting:
            if self.returncode is None:
                self.returncode = code
                os.close(self._ended)

    def communicate(self, timeout: float) -> tuple[Any, None]:
        """What it prints until its end, which must come in time."""
        late = threading.Timer(timeout, self.kill)
        late.start()
        with self.stdout:
            printed = self.stdout.read()
        late.cancel()
        self.wait(timeout)
        return printed, None

    def send_signal(self, number: int) -> None:
        """Send it a signal, unless it has ended."""
        with self._noting, suppress(ProcessLookupError):
            if self.returncode is None:
                signal.pidfd_send_signal(self._ended, number)

    def terminate(self) -> None:
        """Ask it to end."""
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """End it."""
        self.send_signal(signal.SIGKILL)


def _number(file: IO[Any] | int) -> int:
    return file if isinstance(file, int) else file.fileno()


def start(command: Sequence[str], **options: Any) -> Any:
    """Start ``python -m module arguments``; as of ``Popen`` where processes cannot start warm."""
    kind: Any = WarmProcess if hasattr(os, "pidfd_open") else subprocess.Popen  # on Linux
    return kind(command, **options)


class EnginesSubprocess:
    """``subprocess`` as the launcher of reference engines sees it, while they start warm."""

    ENGINE = ("-m", "weight_update.reference_engine")
    # Others start processes themselves, or want a GPU.
    ALONE = frozenset({"--tp=1", "--device=cpu"})

    def __init__(self) -> None:
        self.warm = True

    def Popen(self, command: Sequence[str], **options: Any) -> Any:
        """Start a process."""
        can_be = tuple(command[1:3]) == self.ENGINE and set(command) >= self.ALONE
        begin: Any = start if self.warm and can_be else subprocess.Popen
        return begin(command, **options)

    def __getattr__(self, name: str) -> Any:
        return getattr(subprocess, name)


class ForkServer:
    """The tests' side of the process that all are forked from; it ends with this process."""

    def __init__(self) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.warm", str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                cwd=ROOT,
                env={**os.environ, "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"},
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )
        self._owner = os.getpid()
        self._control = ours
        self._one_at_a_time = threading.Lock()
        self._changed = threading.Condition()
        self._started: list[tuple[int, int]] = []
        self._codes: dict[int, int] = {}
        threading.Thread(target=self._listen, daemon=True).start()

    def start(self, order: dict[str, Any], descriptors: Sequence[int]) -> tuple[int, int]:
        """Its process id, and a descriptor that can be read once it has ended."""
        with self._one_at_a_time:
            socket.send_fds(self._control, [json.dumps(order).encode()], descriptors)
            with self._changed:
                assert self._changed.wait_for(lambda: self._started, 120), "nothing was forked"
                return self._started.pop()

    def code_of(self, pid: int) -> int:
        """The exit code of a process that has ended."""
        with self._changed:
            assert self._changed.wait_for(lambda: pid in self._codes, 60), f"{pid} is not reaped"
            return self._codes[pid]

    def stop(self) -> None:
        """End the parent, and it its children; a fork of this process has no part in it."""
        if os.getpid() == self._owner:
            self._process.kill()
            self._process.wait()

    def _listen(self) -> None:
        while True:
            data, descriptors, _, _ = socket.recv_fds(self._control, MOST_BYTES, 1)
            if not data:
                return
            told = json.loads(data)
            with self._changed:
                if descriptors:
                    self._codes.pop(told["pid"], None)  # of an earlier process of that number
                    self._started.append((told["pid"], descriptors[0]))
                else:
                    self._codes[told["pid"]] = told["code"]
                self._changed.notify_all()


@cache
def _fork_server() -> ForkServer:
    server = ForkServer()
    atexit.register(server.stop)
    return server


# ---- the parent of all


def main(control: socket.socket) -> None:
    """Fork a process for each order, and tell how each ends."""
    import torch.distributed  # noqa: F401
    import transformers.models.llama.modeling_llama
    import transformers.models.qwen2.modeling_qwen2  # noqa: F401
    import uvicorn  # noqa: F401

    import weight_update.reference_engine.scheduler
    import weight_update.reference_engine.server
    import weight_update.schemes.scheme  # noqa: F401

    gc.freeze()  # so that a child's collections leave the pages alone that it shares
    wake, woken = os.pipe()
    os.set_blocking(woken, False)
    signal.set_wakeup_fd(woken)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    while True:
        ready, _, _ = select.select([control, wake], [], [])
        if wake in ready:
            os.read(wake, 4096)
            _reap(control)
        if control in ready:
            data, descriptors, _, _ = socket.recv_fds(control, MOST_BYTES, MOST_DESCRIPTORS)
            if not data:
                return
            _fork(control, json.loads(data), descriptors)


def _reap(control: socket.socket) -> None:
    with suppress(ChildProcessError):
        while True:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if not pid:
                return
            code = os.waitstatus_to_exitcode(status)
            control.send(json.dumps({"pid": pid, "code": code}).encode())


def _fork(control: socket.socket, order: dict[str, Any], descriptors: Sequence[int]) -> None:
    """The child leads a group of its own before anybody hears of it."""
    leads, led = os.pipe()
    pid = os.fork()
    if pid == 0:
        ctypes.CDLL(None).prctl(_PARENT_DEATH_SIGNAL, signal.SIGKILL)
        os.setsid()
        os.write(led, b"!")
        os.close(control.detach())
        _become(order, descriptors)
    os.read(leads, 1)
    ended = os.pidfd_open(pid)
    socket.send_fds(control, [json.dumps({"pid": pid}).encode()], [ended])
    for descriptor in (leads, led, ended, *descriptors):
        os.close(descriptor)


def _become(order: dict[str, Any], descriptors: Sequence[int]) -> None:
    """Be the process that was ordered, to its end."""
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    high = [fcntl.fcntl(descriptor, fcntl.F_DUPFD, HIGH) for descriptor in descriptors]
    os.closerange(3, HIGH)
    for descriptor, number in zip(high, order["descriptors"], strict=True):
        os.dup2(descriptor, number)
        os.close(descriptor)
    os.environ.clear()
    os.environ.update(order["env"])
    os.chdir(order["cwd"])
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    # An engine ends when its parent is gone: that is this process's own.
    parent = f"--parent-pid={os.getppid()}"
    sys.argv[1:] = [parent if a.startswith("--parent-pid=") else a for a in order["arguments"]]
    runpy.run_module(order["module"], run_name="__main__", alter_sys=True)
    sys.exit()


if __name__ == "__main__":
    main(socket.socket(fileno=int(sys.argv[1])))
