"""TorchRL's own SGLang scheme on the same job, for comparison; NCCL only.

It runs in a process of its own, because it switches NCCL's P2P and shared memory off for the
whole process; its engine gets the same settings, since the two ends find each other only then.
The engine stands for SGLang 0.5.15, the last that takes updates outside a session, which is how
TorchRL 0.14 makes them.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import asdict
from importlib import metadata

import torch

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
    command = [sys.executable, "-m", "weight_update.bench.torchrl_peer"]
    try:
        done = _run(command, shape, rounds)
    except subprocess.TimeoutExpired as error:
        raise RuntimeError(f"TorchRL's scheme did not end in {_SECONDS:.0f} s") from error
    if done.returncode:
        raise RuntimeError(f"TorchRL's scheme failed: {done.stderr[-2000:]}")
    seconds: list[float] = json.loads(done.stdout.splitlines()[-1])
    return seconds


def _run(command: list[str], shape: ModelShape, rounds: int) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*command, json.dumps(asdict(shape)), str(rounds)],
        env=os.environ | _SETTINGS,
        capture_output=True,
        text=True,
        check=False,
        timeout=_SECONDS,
    )


def _measure(shape: ModelShape, rounds: int) -> list[float]:
    from torchrl.weight_update.llm import SGLangWeightSyncScheme, get_sglang_model_metadata

    model = shape.build(torch.device("cuda:0"))
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


if __name__ == "__main__":
    print(json.dumps(_measure(ModelShape(**json.loads(sys.argv[1])), int(sys.argv[2]))), flush=True)
    os._exit(0)  # its group may wait for ever at exit
