"""One broadcast of all bytes of a model, from a process of its own.

A trainer with a process group of torch asks its other ranks before it updates; the trainer that is
measured has none. ``python -m weight_update.bench.gpu.limit`` is started by :class:`HugeBroadcast`.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from types import TracebackType
from typing import Self

import torch

from weight_update.bench.bare import BareBroadcasts
from weight_update.bench.gpu.line_process import LineProcess

_START_SECONDS = 180.0
_BROADCAST_SECONDS = 120.0
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
        self._process = LineProcess("weight_update.bench.gpu.limit", "the bare broadcasts")
        self._job = {"nbytes": nbytes, "devices": list(devices)}

    def __enter__(self) -> Self:
        """Waits until both are there.

        Raises:
            RuntimeError: They did not come; the text has what they said.
        """
        try:
            self._process.ask(self._job, _START_SECONDS)
        except BaseException:
            self._process.kill()
            raise
        return self

    def seconds(self) -> float:
        """Seconds of one broadcast.

        Raises:
            RuntimeError: A process ended or hangs; the text has what it said.
        """
        return float(self._process.ask({}, _BROADCAST_SECONDS)["seconds"])

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Ends both."""
        self._process.end(_END_SECONDS if kind is None else 0.0)
        self._process.kill()


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
