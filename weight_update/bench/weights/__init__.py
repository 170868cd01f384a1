"""What reading and naming weights costs: merged LoRA, gathered shards, very many names."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Literal, get_args

if TYPE_CHECKING:
    from weight_update.bench.rows import Row

Job = Literal["lora", "sharded", "names"]
JOBS: tuple[Job, ...] = get_args(Job)

Tell = Callable[[str], None]


@dataclass(frozen=True)
class WeightsJobs:
    """What is run.

    Args:
        jobs: Which jobs, in order.
        rounds: How often each is measured.
        device: Where the LoRA model is: on ``cpu`` it has 0.5B parameters, on ``cuda`` 8B.
    """

    jobs: Sequence[Job] = JOBS
    rounds: int = 5
    device: str = "cpu"

    def objection(self) -> str | None:
        """Why they cannot be run, if they cannot."""
        import torch

        if self.device not in ("cpu", "cuda"):
            return f"--device {self.device!r} is neither cpu nor cuda"
        if self.device == "cuda" and not torch.cuda.is_available():
            return "there is no CUDA device"
        if "lora" in self.jobs and find_spec("peft") is None:
            return "peft is not installed, and the job lora needs it"
        return None


def run_weights(jobs: WeightsJobs, tell: Tell) -> Iterator[Row]:
    """Runs the jobs one after the other."""
    from weight_update.bench.machine import describe_machine

    identity = describe_machine()
    for job in jobs.jobs:
        tell(f"{job}: measuring ...")
        yield from _rows(job, jobs, identity)


def _rows(job: Job, jobs: WeightsJobs, identity: Mapping[str, Any]) -> Iterator[Row]:
    # Imported one by one: each needs packages that the others do not.
    if job == "lora":
        import torch

        from weight_update.bench.weights.lora import lora_rows

        return lora_rows(torch.device(jobs.device), jobs.rounds, identity)
    if job == "names":
        from weight_update.bench.weights.names import names_rows

        return names_rows(jobs.rounds, identity)
    return _sharded(jobs.rounds, identity)


def _sharded(rounds: int, identity: Mapping[str, Any]) -> Iterator[Row]:
    from torch.multiprocessing.spawn import ProcessException

    from weight_update.bench.weights.sharded import sharded_rows

    try:
        yield from sharded_rows(rounds, identity)
    except ProcessException as error:
        raise RuntimeError(f"a rank failed: {error}") from error
