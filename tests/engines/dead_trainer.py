"""What trainers do that die by SIGKILL in the middle of an update, each in a process of its own.

Those that stand still say so, and wait to be killed.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from typing import Any

import torch

from weight_update import SGLangWeightSyncScheme
from weight_update.delivery.delivery import Delivery
from weight_update.delivery.vllm import VLLMDeployment
from weight_update.engines.sglang.engine import SGLangEngine
from weight_update.options import HttpOptions, UpdateOptions
from weight_update.report import Progress
from weight_update.transports.process_group import UpdateGroup, open_group
from weight_update.waiting import Deadline, spawn
from weight_update.weights.buckets import Bucket
from weight_update.weights.cargo import Cargo
from weight_update.weights.extract import extract_weights

from .models import SEED_B, tiny_llama
from .vllm_server import vllm_llama

SECONDS = 120.0
STANDS_STILL = "stands still"


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
    _stand_still()


def of_vllm_between_buckets(url: str) -> None:
    """Two of a vLLM's buckets are loaded."""
    _update_vllm(url, lambda now: now.bucket == 2 and _stand_still(), bucket_bytes=200_000)


def of_vllm_in_a_broadcast(url: str) -> None:
    """A bucket is announced to a vLLM and nothing is sent."""
    UpdateGroup.broadcast = lambda *_: _stand_still()  # type: ignore[method-assign]
    _update_vllm(url, bucket_bytes=200_000)


def of_vllm_in_shared_memory(url: str) -> None:
    """A vLLM has taken two buckets out of this process's memory."""
    _update_vllm(url, lambda now: now.bucket == 2 and _die(), transport="ipc", bucket_bytes=20_000)


def _die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _stand_still() -> None:
    print(STANDS_STILL, flush=True)
    time.sleep(SECONDS)


def _die_when(url: str, strikes: Callable[[Progress], bool]) -> None:
    scheme = SGLangWeightSyncScheme(url, bucket_bytes=20_000, timeout=SECONDS)
    model = tiny_llama(SEED_B)
    scheme.create_sender().update_weights(model, progress=lambda now: strikes(now) and _die())


def _update_vllm(
    url: str, progress: Callable[[Progress], object] | None = None, **options: Any
) -> None:
    delivery = Delivery([url], UpdateOptions(timeout=SECONDS, **options), VLLMDeployment)
    delivery.update(lambda: vllm_llama(SEED_B), progress=progress)


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
