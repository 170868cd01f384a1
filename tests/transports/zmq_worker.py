"""A worker without vLLM: takes updates over a ZMQ channel, and says what it holds.

As a script it gets the arguments of one update in every line of standard input, and answers in
one line. :class:`Worker` is the end that tests hold.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterable, Mapping
from concurrent.futures import Future
from typing import Any, Self

import torch

from weight_update.vllm_worker.shared_update import receive_shared_weights
from weight_update.waiting import spawn

SECONDS = 60.0


class Shelf:
    """Keeps what it is given; some names make it misbehave."""

    def __init__(self) -> None:
        self.weights: dict[str, torch.Tensor] = {}
        self.fresh: dict[str, torch.Tensor] = {}
        self.unfinished = False
        self.slow = False
        self.stalled = threading.Event()
        self.go_on = threading.Event()

    def begin(self) -> bool:
        self.fresh = {}
        return self.unfinished

    def load(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        for name, weight in weights:
            if name == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            if name == "stall":
                self.stalled.set()
                self.go_on.wait(SECONDS)
            if name == "unknown":
                raise KeyError(f"there is no parameter named {name}")
            self.fresh[name] = weight.clone()
            self.unfinished = True

    def complete(self) -> None:
        if self.slow:
            self.stalled.set()
            self.go_on.wait(SECONDS)
        self.weights.update(self.fresh)
        self.unfinished = False

    def undo(self) -> bool:
        return bool(self.fresh)


def described(weights: Mapping[str, torch.Tensor]) -> dict[str, Any]:
    """What can be compared: dtype, shape and a digest of the bytes."""
    return {name: _described(weight) for name, weight in weights.items()}


def _described(weight: torch.Tensor) -> list[Any]:
    raw = weight.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    digest = hashlib.sha256(raw.numpy().tobytes()).hexdigest()
    return [str(weight.dtype), list(weight.shape), digest]


def mapped() -> int:
    """How many memories of others this process has open."""
    with open("/proc/self/maps") as maps:
        return sum("/torch_" in line for line in maps)


def main(device: torch.device) -> None:
    shelf = Shelf()
    for line in sys.stdin:
        told = json.loads(line)
        result = receive_shared_weights(told["address"], shelf, device, told["seconds"])
        held = torch.cuda.memory_allocated() if device.type == "cuda" else 0
        said = {"weights": described(shelf.weights), "mapped": mapped(), "allocated": held}
        print(json.dumps({"result": result, **said}), flush=True)


class Worker:
    """The script as a process of its own.

    Args:
        device: Where it keeps what it is given.
    """

    def __init__(self, device: str = "cpu") -> None:
        self._process = subprocess.Popen(
            [sys.executable, __file__, device],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    @property
    def pid(self) -> int:
        return self._process.pid

    def update(self, address: str, seconds: float = SECONDS) -> Future[dict[str, Any]]:
        """Has it take an update; the answer comes when that is over."""
        self._write({"address": address, "seconds": seconds})
        return spawn(self._read)

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()

    def _write(self, told: Mapping[str, Any]) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(told) + "\n")
        self._process.stdin.flush()

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError("the worker is dead")
        answer: dict[str, Any] = json.loads(line)
        return answer


if __name__ == "__main__":
    main(torch.device(sys.argv[1]))
