"""Bare broadcasts of a model's bytes: what the link allows, and what one a tensor costs."""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import TracebackType
from typing import Self

import torch
import torch.distributed as dist

from weight_update.bench.receiver import EACH, FLAT, BareJob, Order, barrier, broadcast

_END_SECONDS = 20.0


class BareBroadcasts:
    """A torch process group of this process and one receiving process an engine.

    Nothing of this library is in it: ``torch.distributed`` and blocking broadcasts, as the
    systems that broadcast one tensor at a time use them. Between two of them no receiver has
    anything on its GPU: a broadcast that waits there would take half of it from an engine.

    Args:
        tensors: What is broadcast; for the flat one, as many elements in one tensor.
        devices: Device of each receiver.
    """

    def __init__(self, tensors: list[torch.Tensor], devices: list[str]) -> None:
        first = tensors[0]
        count = sum(tensor.numel() for tensor in tensors)
        self._tensors = tensors
        self._flat = torch.ones(count, dtype=first.dtype, device=first.device)
        self._home = tempfile.TemporaryDirectory(prefix="weight-update-bench-")
        self._job = BareJob(
            rendezvous=str(Path(self._home.name) / "rendezvous"),
            world_size=1 + len(devices),
            shapes=[list(tensor.shape) for tensor in tensors],
            dtype=str(first.dtype).removeprefix("torch."),
            devices=[str(first.device), *devices],
        )
        self._receivers: list[subprocess.Popen[str]] = []

    def __enter__(self) -> Self:
        """Starts the receivers and joins them.

        Raises:
            RuntimeError: One did not come; the text has what it said.
        """
        path = Path(self._home.name) / "job.json"
        self._job.save(path)
        try:
            for rank in range(1, self._job.world_size):
                self._receivers.append(self._start(path, rank))
            self._job.join(0)
        except BaseException as error:
            said = self._log.read_text(errors="replace")[-2000:] if self._log.exists() else ""
            self._end(patience=0.0)
            if isinstance(error, RuntimeError):
                raise RuntimeError(f"the bare broadcasts did not start: {error}\n{said}") from error
            raise
        return self

    def flat(self) -> float:
        """Seconds of one broadcast of all bytes."""
        return self._timed(FLAT, [self._flat])

    def each(self) -> float:
        """Seconds of one broadcast a tensor."""
        return self._timed(EACH, self._tensors)

    @property
    def _log(self) -> Path:
        return Path(self._home.name) / "receivers.log"

    def _start(self, path: Path, rank: int) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "weight_update.bench.receiver", str(path), str(rank)]
        with self._log.open("ab") as log:
            # Ctrl-C is for this process, whose end closes the group under the receivers.
            return subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                start_new_session=True,
                text=True,
            )

    def _timed(self, order: Order, tensors: list[torch.Tensor]) -> float:
        self._tell(order)
        barrier(tensors[0].device)  # all are there, and have read the order
        start = time.perf_counter()
        broadcast(tensors)
        return time.perf_counter() - start

    def _tell(self, order: Order) -> None:
        for receiver in self._receivers:
            if receiver.stdin is not None:
                receiver.stdin.write(order)
                receiver.stdin.flush()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Ends the receivers, to whom nothing more is said."""
        for receiver in self._receivers:
            if receiver.stdin is not None:
                receiver.stdin.close()
        self._end(patience=_END_SECONDS if kind is None else 0.0)

    def _end(self, patience: float) -> None:
        for receiver in self._receivers:
            try:
                receiver.wait(patience)
            except subprocess.TimeoutExpired:
                receiver.kill()
                receiver.wait()
        if dist.is_initialized():
            dist.destroy_process_group()
        self._home.cleanup()
