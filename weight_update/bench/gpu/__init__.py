"""Whole updates of models of 16 GB on GPUs, beside what the memory or the link allows."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

if TYPE_CHECKING:
    from weight_update.bench.gpu.models import BigModel, Family
    from weight_update.bench.rows import Row
    from weight_update.reference_engine import ReferenceEngine

Job = Literal["ipc", "lora", "llama", "moe", "failures", "renumbered"]
JOBS: tuple[Job, ...] = get_args(Job)
ON_ONE: tuple[Job, ...] = ("ipc", "lora")
ON_TWO: tuple[Job, ...] = ("llama", "moe", "failures", "renumbered")

Tell = Callable[[str], None]

_START_SECONDS = 300.0
# Enough for several buckets; engines that fail are started anew.
_FEW_LAYERS = 4


@dataclass(frozen=True)
class GpuJobs:
    """What is run.

    Args:
        gpus: How many GPUs there are: with one, trainer and engine share it; with two, each has
            one of them.
        jobs: Which jobs; empty for all that so many GPUs can run.
        rounds: How often each is measured.
        layers: Layers of the models; None for all of them.
        device: ``cuda``, or ``cpu``, which says nothing of a GPU and shows that the jobs run.
        shrink: All widths are divided by it.
    """

    gpus: int = 1
    jobs: Sequence[Job] = ()
    rounds: int = 5
    layers: int | None = None
    device: str = "cuda"
    shrink: int = 1

    @property
    def chosen(self) -> tuple[Job, ...]:
        """The jobs, in order."""
        return tuple(job for job in self._possible if job in self.jobs or not self.jobs)

    @property
    def _possible(self) -> tuple[Job, ...]:
        return ON_ONE if self.gpus == 1 else ON_TWO

    def objection(self) -> str | None:
        """Why they cannot be run, if they cannot."""
        import torch

        foreign = [job for job in self.jobs if job not in self._possible]
        if foreign:
            return f"the job {foreign[0]} is not one of --gpus {self.gpus}"
        if self.device not in ("cpu", "cuda"):
            return f"--device {self.device!r} is neither cpu nor cuda"
        if self.device == "cuda" and torch.cuda.device_count() < self.gpus:
            return f"--gpus {self.gpus} needs as many; torch sees {torch.cuda.device_count()}"
        if "lora" in self.chosen and find_spec("peft") is None:
            return "peft is not installed, and the job lora needs it"
        return None

    def device_of(self, index: int) -> str:
        """A GPU by its number."""
        return f"cuda:{index}" if self.device == "cuda" else "cpu"

    def model(self, family: Family, layers: int | None = None) -> BigModel:
        """A model, with all layers unless the caller or the user wants fewer."""
        from weight_update.bench.gpu.models import BigModel

        return BigModel(family, self.layers or layers, self.shrink)


def run_gpu(jobs: GpuJobs, tell: Tell) -> Iterator[Row]:
    """Runs the jobs one after the other.

    Args:
        jobs: What to run.
        tell: Told what is being done.
    """
    identity = _identity(jobs)
    for job in jobs.chosen:
        tell(f"{job}: starting an engine, measuring ...")
        yield from _rows(job, jobs, identity)


def _identity(jobs: GpuJobs) -> dict[str, Any]:
    import torch

    from weight_update.bench.machine import describe_machine

    identity = describe_machine()
    if jobs.device == "cuda":
        nccl: Any = torch.cuda.nccl
        identity["versions"]["nccl"] = ".".join(map(str, nccl.version()))
    return identity


def _rows(job: Job, jobs: GpuJobs, identity: Mapping[str, Any]) -> Iterator[Row]:
    if job in ON_ONE:
        return _colocated(job, jobs, identity)
    if job in ("llama", "moe"):
        return _apart("llama" if job == "llama" else "moe", jobs, identity)
    return _others(job, jobs, identity)


def _colocated(job: Job, jobs: GpuJobs, identity: Mapping[str, Any]) -> Iterator[Row]:
    import torch

    from weight_update.bench.gpu.colocated import colocated_rows, lora_rows

    model, device = jobs.model("llama"), jobs.device_of(0)
    measure = colocated_rows if job == "ipc" else lora_rows
    with _engine(model, device) as engine:
        yield from measure(model, engine.url, torch.device(device), jobs.rounds, identity)


def _apart(family: Family, jobs: GpuJobs, identity: Mapping[str, Any]) -> Iterator[Row]:
    from weight_update.bench.gpu.apart import apart_rows

    model, devices = jobs.model(family), [jobs.device_of(0), jobs.device_of(1)]
    with _engine(model, devices[1]) as engine:
        yield from apart_rows(model, engine.url, devices, jobs.rounds, identity)


def _others(job: Job, jobs: GpuJobs, identity: Mapping[str, Any]) -> Iterator[Row]:
    from weight_update.bench.gpu.failures import failure_rows, renumbered_rows

    model = jobs.model("llama", _FEW_LAYERS)
    first, second = jobs.device_of(0), jobs.device_of(1)
    if job == "failures":
        with _engine(model, second) as engine:
            yield from failure_rows(model, engine, first, identity)
    else:
        with _engine(model, first) as engine:
            yield from renumbered_rows(model, engine.url, (second, first), jobs.rounds, identity)


@contextmanager
def _engine(model: BigModel, device: str) -> Iterator[ReferenceEngine]:
    from weight_update.reference_engine import ReferenceEngine

    with tempfile.TemporaryDirectory(prefix="weight-update-bench-") as folder:
        model.save(Path(folder))
        options = model.engine_options(Path(folder))
        with ReferenceEngine(**options, device=device, startup_timeout=_START_SECONDS) as engine:
            yield engine
