"""The receiving end of the bare broadcasts: a process that only takes what rank 0 sends.

``python -m weight_update.bench.receiver JOB.json RANK`` is started by :mod:`.bare`.
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Literal

import torch
import torch.distributed as dist

Order = Literal["flat\n", "each\n"]
FLAT: Order = "flat\n"
EACH: Order = "each\n"

# A receiver that died while it imported torch must not be waited for half an hour; one that is
# told nothing while an update runs is waited for as long.
_PATIENCE = timedelta(minutes=5)


@dataclass(frozen=True)
class BareJob:
    """What both ends of the bare broadcasts agree on.

    Args:
        rendezvous: A path that all ranks see and nobody else uses.
        world_size: 1 + the number of receivers.
        shapes: Shapes of the tensors, in order.
        dtype: Name of their torch dtype.
        devices: Device of each rank.
    """

    rendezvous: str
    world_size: int
    shapes: list[list[int]]
    dtype: str
    devices: list[str]

    def join(self, rank: int) -> torch.device:
        """Joins the group; returns the device of this rank."""
        device = torch.device(self.devices[rank])
        if device.type == "cuda":
            torch.cuda.set_device(device)
        dist.init_process_group(
            "nccl" if device.type == "cuda" else "gloo",
            init_method=f"file://{self.rendezvous}",
            rank=rank,
            world_size=self.world_size,
            timeout=_PATIENCE,
        )
        return device

    def empty_tensors(self, device: torch.device) -> list[torch.Tensor]:
        """Tensors of the shapes, their memory touched: no page is first used in a timed run."""
        dtype = getattr(torch, self.dtype)
        return [torch.zeros(shape, dtype=dtype, device=device) for shape in self.shapes]

    def save(self, path: Path) -> None:
        """Writes the job for the receivers."""
        path.write_text(json.dumps(asdict(self)))


def broadcast(tensors: list[torch.Tensor]) -> None:
    """One blocking broadcast after the other, then a barrier: every receiver has everything."""
    for tensor in tensors:
        dist.broadcast(tensor, src=0)
    barrier(tensors[0].device)


def barrier(device: torch.device) -> None:
    """Waits for all ranks, and for what this one's GPU has to do."""
    dist.barrier()
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def main(path: str, rank: int) -> None:
    """Takes broadcasts as it is told to, a line each, until nothing more is said."""
    job = BareJob(**json.loads(Path(path).read_text()))
    device = job.join(rank)
    tensors = job.empty_tensors(device)
    flat = torch.zeros(sum(t.numel() for t in tensors), dtype=tensors[0].dtype, device=device)
    for order in sys.stdin:
        barrier(device)
        broadcast([flat] if order == FLAT else tensors)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
