"""TorchRL's own SGLang scheme on the same job, for comparison, and its NCCL settings by themselves.

Both run in a process of its own, because TorchRL switches NCCL's P2P and shared memory off for the
whole process; the other end gets the same settings, since the two find each other only then.
The engine stands for SGLang 0.5.15, the last that takes updates outside a session, which is how
TorchRL 0.14 makes them.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from importlib import metadata
from typing import Any

import torch

from weight_update.bench.bare import BareBroadcasts
from weight_update.bench.models import ModelShape, change
from weight_update.bench.planning import timed
from weight_update.reference_engine import ReferenceEngine

_SETTINGS = {"NCCL_P2P_DISABLE": "1", "NCCL_SHM_DISABLE": "1"}
_RELEASE = "0.5.15"
_SECONDS = 900.0


def torchrl_objection() -> str | None:
    """Why TorchRL's scheme cannot be run here; None when it can."""
    if torch.cuda.device_count() < 2:
        return f"TorchRL's scheme needs NCCL and two GPUs; there are {torch.cuda.device_count()}"
    try:
        metadata.version("torchrl")
    except metadata.PackageNotFoundError:
        return "torchrl is not installed"
    return None


def time_torchrl(shape: ModelShape, rounds: int) -> list[float]:
    """Seconds of each whole update.

    Raises:
        RuntimeError: Its process failed; the text has the end of what it said.
    """
    return _measured("scheme", {"shape": asdict(shape), "rounds": rounds})


def time_settings(
    tensors: Sequence[torch.Tensor], devices: Sequence[str], rounds: int
) -> list[float]:
    """Seconds of broadcasting some tensors one by one under TorchRL's settings, without an engine.

    Args:
        tensors: Whose shapes and dtype are broadcast.
        devices: Device of the sending process and of the receiving one.
        rounds: How often.

    Raises:
        RuntimeError: A process failed; the text has the end of what it said.
    """
    job = {
        "shapes": [list(tensor.shape) for tensor in tensors],
        "dtype": str(tensors[0].dtype).removeprefix("torch."),
        "devices": list(devices),
        "rounds": rounds,
    }
    return _measured("settings", job)


def _measured(kind: str, job: dict[str, Any]) -> list[float]:
    try:
        done = _run(kind, json.dumps(job))
    except subprocess.TimeoutExpired as error:
        raise RuntimeError(f"TorchRL's {kind} did not end in {_SECONDS:.0f} s") from error
    if done.returncode:
        raise RuntimeError(f"TorchRL's {kind} failed: {done.stderr[-2000:]}")
    seconds: list[float] = json.loads(done.stdout.splitlines()[-1])
    return seconds


def _run(kind: str, job: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "weight_update.bench.torchrl_peer", kind],
        input=job,
        env=os.environ | _SETTINGS,
        capture_output=True,
        text=True,
        check=False,
        timeout=_SECONDS,
    )


def _time_scheme(shape: dict[str, int], rounds: int) -> list[float]:
    from torchrl.weight_update.llm import SGLangWeightSyncScheme, get_sglang_model_metadata

    model = ModelShape(**shape).build(torch.device("cuda:0"))
    with ReferenceEngine(model, release=_RELEASE, device="cuda:1") as engine:
        scheme = SGLangWeightSyncScheme(
            engine.url, master_address="127.0.0.1", num_gpus=1, strategy="state_dict"
        )
        sender = scheme.create_sender()
        sender.register_model(model)
        sender.init_all_workers_group(get_sglang_model_metadata(model))
        sender.update_weights()
        seconds = []
        for _ in range(rounds):
            change(model)
            torch.cuda.synchronize()
            seconds.append(timed(sender.update_weights))
        return seconds


def _time_settings(
    shapes: list[list[int]], dtype: str, devices: list[str], rounds: int
) -> list[float]:
    sending, *receiving = devices
    kind = getattr(torch, dtype)
    tensors = [torch.ones(shape, dtype=kind, device=sending) for shape in shapes]
    with BareBroadcasts(tensors, receiving) as bare:
        bare.each()
        return [bare.each() for _ in range(rounds)]


if __name__ == "__main__":
    measure: Callable[..., list[float]] = _time_scheme
    if sys.argv[1] == "settings":
        measure = _time_settings
    print(json.dumps(measure(**json.load(sys.stdin))), flush=True)
    os._exit(0)  # its group may wait for ever at exit
