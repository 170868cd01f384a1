"""One broadcast of all bytes of a model, from a process of its own.

A trainer with a process group of torch asks its other ranks before it updates; the trainer that is
measured has none. ``python -m weight_update.bench.gpu.limit`` is started by :class:`HugeBroadcast`.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch

from weight_update.bench.bare import BareBroadcasts

_END_SECONDS = 30.0


class HugeBroadcast:
    """Two processes that broadcast as many bytes as some tensors have, when they are told to.

    Args:
        nbytes: How many.
        devices: Of the sending process, and of the receiving one.

    Example:
        >>> with HugeBroadcast(1 << 20, ["cpu", "cpu"]) as limit:  # doctest: +SKIP
        ...     limit.seconds()
        0.0004
    """

    def __init__(self, nbytes: int, devices: Sequence[str]) -> None:
        self._home = tempfile.TemporaryDirectory(prefix="weight-update-bench-")
        self._log = Path(self._home.name) / "broadcasts.log"
        with self._log.open("w") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "weight_update.bench.gpu.limit"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                start_new_session=True,
                text=True,
            )
        self._job = {"nbytes": nbytes, "devices": list(devices)}

    def __enter__(self) -> Self:
        """Waits until both are there.

        Raises:
            RuntimeError: They did not come; the text has what they said.
        """
        try:
            self._ask(self._job)
        except BaseException:
            self._end(patience=0.0)
            raise
        return self

    def seconds(self) -> float:
        """Seconds of one broadcast.

        Raises:
            RuntimeError: A process ended; the text has what it said.
        """
        return float(self._ask("again"))

    def _ask(self, what: Any) -> Any:
        sending, answers = self._process.stdin, self._process.stdout
        if sending is None or answers is None:
            raise RuntimeError("the bare broadcasts were not started")
        with suppress(BrokenPipeError):  # what it said is read below
            sending.write(json.dumps(what) + "\n")
            sending.flush()
        for line in answers:
            if line.startswith("{"):  # native libraries print there too
                return json.loads(line)["seconds"]
        said = self._log.read_text(errors="replace")[-2000:]
        raise RuntimeError(f"the bare broadcasts ended: {said}")

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Ends both."""
        self._end(patience=_END_SECONDS if kind is None else 0.0)

    def _end(self, patience: float) -> None:
        with suppress(BrokenPipeError):
            if self._process.stdin is not None:
                self._process.stdin.close()
        try:
            self._process.wait(patience)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._home.cleanup()


def main() -> None:
    """Serves the lines of standard input."""
    job = json.loads(sys.stdin.readline())
    sender, *receivers = job["devices"]
    model = torch.ones(job["nbytes"] // 2, dtype=torch.bfloat16, device=sender)
    with BareBroadcasts([model], receivers) as bare:
        bare.flat()
        _answer(0.0)
        for _ in sys.stdin:
            _answer(bare.flat())


def _answer(seconds: float) -> None:
    print(json.dumps({"seconds": seconds}), flush=True)


if __name__ == "__main__":
    main()
