"""A trainer that dies by SIGKILL in the middle of an update, in a process of its own.

``python -m tests.engines.dead_trainer in_transfer http://127.0.0.1:30000``
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from weight_update import SGLangWeightSyncScheme
from weight_update.engines.sglang.engine import SGLangEngine
from weight_update.options import HttpOptions, UpdateOptions
from weight_update.report import Progress
from weight_update.transports.process_group import UpdateGroup, open_group
from weight_update.waiting import Deadline, spawn
from weight_update.weights.buckets import Bucket
from weight_update.weights.cargo import Cargo
from weight_update.weights.extract import extract_weights

from .engine_server import REPOSITORY
from .models import SEED_B, tiny_llama

SECONDS = 120.0
SENT = "one of two tensors sent"


# ---- what it does, in its own process


def after_pause(url: str) -> None:
    """The server is paused, and no session is open."""
    _die_when(url, lambda now: now.phase == "begin")


def in_transfer(url: str) -> None:
    """The server is paused, its session is open, and two buckets of model B are loaded."""
    _die_when(url, lambda now: now.bucket == 2)


def short_of_a_tensor(url: str) -> None:
    """Two tensors are announced and one is sent: the server waits until this process is gone."""
    deadline = Deadline(SECONDS)
    engine = SGLangEngine(url, HttpOptions())
    group = _joined(engine, deadline)
    engine.pause("retract", deadline, again=False)
    session = engine.session("broadcast")
    session.open(deadline)
    first, second = extract_weights(tiny_llama(SEED_B))[:2]
    bucket = Bucket((first, second), flat=False)
    announce = {"group_name": group.name, "flush": False, "deadline": deadline}
    spawn(lambda: session.apply(bucket, Cargo(), **announce))  # type: ignore[arg-type]
    group.broadcast([first.read()])
    print(SENT, flush=True)
    time.sleep(SECONDS)


def _die_when(url: str, strikes: Callable[[Progress], bool]) -> None:
    def die(now: Progress) -> None:
        if strikes(now):
            os.kill(os.getpid(), signal.SIGKILL)

    scheme = SGLangWeightSyncScheme(url, bucket_bytes=20_000, timeout=SECONDS)
    scheme.create_sender().update_weights(tiny_llama(SEED_B), progress=die)


def _joined(engine: SGLangEngine, deadline: Deadline) -> UpdateGroup:
    engine.inspect(deadline)
    world_size = 1 + (engine.ranks or 1)
    group = open_group([engine.url], UpdateOptions(), world_size, torch.device("cpu"))
    place: dict[str, Any] = {"address": group.address, "port": group.port, "rank_offset": 1}
    kind = {"world_size": world_size, "group_name": group.name, "backend": group.backend}
    joining = spawn(lambda: engine.join(**place, **kind, deadline=deadline))
    group.join()
    joining.result(deadline.remaining())
    return group


# ---- the test's side


def run(action: Callable[[str], None], url: str) -> int:
    """Run a trainer to its end and return its exit code, negative for a signal."""
    command = _command(action, url)
    return subprocess.run(command, cwd=REPOSITORY, timeout=SECONDS, check=False).returncode


@contextmanager
def running(action: Callable[[str], None], url: str, until: str) -> Iterator[None]:
    """Run a trainer until it has printed something, and kill it at the end of the block."""
    with subprocess.Popen(
        _command(action, url), cwd=REPOSITORY, stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            assert process.stdout is not None
            printed = spawn(process.stdout.readline).result(SECONDS)
            assert until in printed, printed
            yield
        finally:
            process.kill()


def _command(action: Callable[[str], None], url: str) -> list[str]:
    return [sys.executable, "-m", "tests.engines.dead_trainer", action.__name__, url]


if __name__ == "__main__":
    globals()[sys.argv[1]](sys.argv[2])
