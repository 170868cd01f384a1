"""``weight-update bench gpu``: models of 16 GB on GPUs."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

import typer

from weight_update.cli.output import needs_extra, say, usage
from weight_update.cli.rows import measure

HELP = """Update an engine with models of 16 GB, on one GPU or between two.

The models have the shapes of Llama-3.1-8B (291 tensors, 16.06 GB in bf16) and of Qwen3-30B-A3B
with 12 of its 48 layers (4,719 tensors, 16.2 GB); their values are random, and others in each
round. The engine is the reference engine, a process of its own.

\b
With one GPU, which trainer and engine share:
  ipc         whole updates over CUDA IPC, beside one pack and one unpack of all bytes (plain
              copies into one buffer and back, one a tensor, in one process): by default, in one
              bucket, in buckets of 512 MiB, and with one handle a tensor
  lora        the same model with LoRA r=16 on all linear layers, merged on the way, beside the
              plain push

\b
With two, one each:
  llama, moe  whole updates over NCCL, beside one broadcast of all bytes in one tensor, and
              beside one broadcast a tensor with NCCL's P2P and shared memory off, as TorchRL's
              SGLang transport sets them (in processes of their own)
  failures    the engine refuses, dies (-9) or stops (-STOP) while a bucket travels: how long
              until the trainer has a typed error, whether its next update works, and whether
              its process exits
  renumbered  a trainer that was started with CUDA_VISIBLE_DEVICES=1,0

Timed calls run with verify="off", since reference engines digest on the CPU. After each of them,
outside of its time, every parameter of the engine is compared: by an exact sum over the bits of
all its elements, weighted by their places, made on the GPU on both sides; and the engine's
parameters must lie where they lay.

\b
Example: the whole, and a quick look
  weight-update bench gpu
  weight-update bench gpu --gpus 2
  weight-update bench gpu --job ipc --layers 4 --rounds 3

\b
Exit codes:
  0    measured; a promise that this run did not keep is marked in the table
  1    an engine held other values than the trainer, or a job failed
  2    wrong arguments
  130  interrupted
"""


class GpuJob(StrEnum):
    """What ``bench gpu`` measures."""

    IPC = "ipc"
    LORA = "lora"
    LLAMA = "llama"
    MOE = "moe"
    FAILURES = "failures"
    RENUMBERED = "renumbered"


def gpu(
    gpus: Annotated[int, typer.Option(min=1, max=2, help="GPUs: shared, or one each.")] = 1,
    job: Annotated[
        list[GpuJob] | None,
        typer.Option(help="Run only this; give it again for more.  [all of so many GPUs]"),
    ] = None,
    rounds: Annotated[int, typer.Option(min=1, help="How often each job is measured.")] = 5,
    layers: Annotated[
        int | None, typer.Option(min=1, help="Layers of the models, for a quick look.  [all]")
    ] = None,
    device: Annotated[str, typer.Option(hidden=True)] = "cuda",
    shrink: Annotated[int, typer.Option(min=1, max=64, hidden=True)] = 1,
    as_json: Annotated[
        bool, typer.Option("--json", help="Write a list of rows and nothing else.")
    ] = False,
) -> None:
    """Updates an engine with models of 16 GB."""
    needs_extra("weight-update bench")
    from weight_update.bench.gpu import JOBS, GpuJobs, run_gpu

    chosen = [each.value for each in job or ()]
    jobs = GpuJobs(gpus, [each for each in JOBS if each in chosen], rounds, layers, device, shrink)
    objection = jobs.objection()
    if objection:
        usage(objection)
    measure(run_gpu(jobs, say), as_json=as_json)
