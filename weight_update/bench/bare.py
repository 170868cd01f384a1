"""Bare broadcasts of a model's bytes: what the link allows, and what one a tensor costs."""

from __future__ import annotations

import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import TracebackType
from typing import Self

import torch
import torch.distributed as dist

from weight_update.bench.receiver import EACH, FLAT, QUIT, BareJob, broadcast

_END_SECONDS = 20.0


class BareBroadcasts:
    """A torch process group of this process and one receiving process an engine.

    Nothing of this library is in it: ``torch.distributed`` and blocking broadcasts, as the
    systems that broadcast one tensor at a time use them.

    Args:
        tensors: What is broadcast; for the flat one, as many elements in one tensor.
        devices: Device of each receiver.
    """

    def __init__(self, tensors: list[torch.Tensor], devices: list[str]) -> None:
        self._tensors = tensors
        self._flat: torch.Tensor | None = None
        first = tensors[0]
        self._job = BareJob(
            address=f"127.0.0.1:{_free_port()}",
            world_size=1 + len(devices),
            shapes=[list(tensor.shape) for tensor in tensors],
            dtype=str(first.dtype).removeprefix("torch."),
            devices=[str(first.device), *devices],
        )
        self._home = tempfile.TemporaryDirectory(prefix="weight-update-bench-")
        self._receivers: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> Self:
        """Starts the receivers and joins them."""
        path = Path(self._home.name) / "job.json"
        self._job.save(path)
        command = [sys.executable, "-m", "weight_update.bench.receiver", str(path)]
        for rank in range(1, self._job.world_size):
            self._receivers.append(subprocess.Popen([*command, str(rank)]))
        device = self._job.join(0)
        count = sum(tensor.numel() for tensor in self._tensors)
        self._flat = torch.ones(count, dtype=self._tensors[0].dtype, device=device)
        return self

    def flat(self) -> float:
        """Seconds of one broadcast of all bytes."""
        return self._timed(FLAT, [self._flat] if self._flat is not None else [])

    def each(self) -> float:
        """Seconds of one broadcast a tensor."""
        return self._timed(EACH, self._tensors)

    def _timed(self, order: int, tensors: list[torch.Tensor]) -> float:
        self._tell(order)
        start = time.perf_counter()
        broadcast(tensors)
        if tensors[0].device.type == "cuda":
            torch.cuda.synchronize(tensors[0].device)
        return time.perf_counter() - start

    def _tell(self, order: int) -> None:
        dist.broadcast(torch.tensor([order], device=self._tensors[0].device), src=0)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Ends the receivers."""
        if kind is None:
            self._tell(QUIT)
        for receiver in self._receivers:
            self._end(receiver, patience=_END_SECONDS if kind is None else 0.0)
        if dist.is_initialized():
            dist.destroy_process_group()
        self._flat = None
        self._home.cleanup()

    @staticmethod
    def _end(receiver: subprocess.Popen[bytes], patience: float) -> None:
        try:
            receiver.wait(patience)
        except subprocess.TimeoutExpired:
            receiver.kill()
            receiver.wait()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
