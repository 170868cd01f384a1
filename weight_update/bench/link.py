"""A user's own link: what each size of a bucket costs on it, beside one broadcast of all bytes.

Live servers are measured, and keep their weights: what is sent has names that no loader keeps.
What a loader does with weights of its own is left out therefore.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import ceil
from typing import Any

import torch

from weight_update import SGLangCollectiveTransport
from weight_update.bench.machine import describe_machine
from weight_update.bench.rows import Pair, Row
from weight_update.options import LoadFormat, UpdateOptions, parse_device
from weight_update.weights.buckets import Bucket, Plan, plan_buckets
from weight_update.weights.specs import TensorSpec, Weight

Tell = Callable[[str], None]

_SIZES = {
    "cpu": tuple(mebibytes << 20 for mebibytes in (16, 64, 256)),
    "cuda": tuple(mebibytes << 20 for mebibytes in (128, 512, 2048)),
}
_REQUESTS = 9
# A setting is worth a line in somebody's code where it saves more than this.
_WORTH = 0.05


@dataclass(frozen=True)
class LinkJobs:
    """What is measured.

    Args:
        urls: The servers.
        options: How an update would be done; ``transport`` is ``broadcast``.
        nbytes: How much is sent.
        tensors: In how many tensors.
        rounds: How often each setting is measured.
    """

    urls: Sequence[str]
    options: UpdateOptions
    nbytes: int = 1_000_000_000
    tensors: int = 300
    rounds: int = 3

    def objection(self) -> str | None:
        """Why it cannot be measured; None when it can.

        Example:
            >>> LinkJobs(["http://a:1"], UpdateOptions(), nbytes=100).objection()
            '300 tensors need at least 1200 bytes'
        """
        least = 4 * self.tensors
        return (
            f"{self.tensors} tensors need at least {least} bytes" if self.nbytes < least else None
        )

    @property
    def device(self) -> torch.device:
        """Where the bytes are."""
        return parse_device(self.options.device) or torch.device("cpu")


@dataclass(frozen=True)
class Setting:
    """One way to divide the bytes.

    Attributes:
        bucket_bytes: As the scheme's; None for its default.
        load_format: As the scheme's.
    """

    bucket_bytes: int | None = None
    load_format: LoadFormat = "auto"

    def __str__(self) -> str:
        if self.bucket_bytes is None:
            return "as update_weights() divides it"
        what = "flat buckets" if self.load_format == "flattened_bucket" else "a broadcast a tensor"
        return f"{what}, requests of {self.bucket_bytes / (1 << 20):,.0f} MiB"

    @property
    def line(self) -> str:
        """To be copied into the call of the scheme."""
        return f'bucket_bytes={self.bucket_bytes}, load_format="{self.load_format}"'


def run_link(jobs: LinkJobs, tell: Tell) -> Iterator[Row]:
    """Measures; gives a row a setting, the default first.

    Every measurement pauses the servers, as an update does, and resumes them.

    Args:
        jobs: What to measure.
        tell: Told what is being done.

    Raises:
        WeightUpdateError: A server refused, did not come, or failed.
    """
    tell(f"connecting to {len(jobs.urls)} server{'s' if len(jobs.urls) > 1 else ''}")
    with _connected(jobs) as transport:
        bench = _Bench(jobs, transport, _Bytes(transport.harmless_name, jobs))
        yield from bench.rows(tell)


@contextmanager
def _connected(jobs: LinkJobs) -> Iterator[SGLangCollectiveTransport]:
    transport = SGLangCollectiveTransport(list(jobs.urls), options=jobs.options)
    try:
        transport.init_all_workers_group(None, device=jobs.device)
        yield transport
    finally:
        transport.shutdown()


class _Bytes:
    """Zeros under names that no loader keeps.

    Args:
        name: Such a name; the number in it may be any.
        jobs: How many, and where.
    """

    def __init__(self, name: str, jobs: LinkJobs) -> None:
        self._name = name
        self._zeros = torch.zeros(jobs.nbytes // 4, device=jobs.device)
        self.many = self._divided(jobs.tensors)
        self.one = Plan((Bucket((self._weight(0, self._zeros),), flat=False),))
        tiny = self._weight(0, self._zeros[:1])
        self.requests = Plan((Bucket((tiny,)),) * _REQUESTS)

    def _divided(self, count: int) -> list[Weight]:
        parts = torch.split(self._zeros, ceil(self._zeros.numel() / count))
        return [self._weight(index, part) for index, part in enumerate(parts)]

    def _weight(self, index: int, values: torch.Tensor) -> Weight:
        name = re.sub(r"\d+", str(index), self._name, count=1)
        spec = TensorSpec(name, values.dtype, tuple(values.shape))
        return Weight(spec, values.device, values.detach)


class _Bench:
    def __init__(self, jobs: LinkJobs, transport: SGLangCollectiveTransport, sent: _Bytes) -> None:
        self._jobs = jobs
        self._transport = transport
        self._bytes = sent

    def rows(self, tell: Tell) -> Iterator[Row]:
        tell("measuring what a request costs")
        first = self._transport.rehearse(self._bytes.requests)
        identity = describe_machine() | {
            "request_seconds": first.request_seconds,
            "backend": first.backend,
            "reasons": list(first.reasons),
        }
        self._transport.rehearse(self._bytes.one)  # buffers are made once
        for setting in self._settings(first.backend):
            tell(f"measuring {setting}")
            plan = self._plan(setting)
            self._transport.rehearse(plan)
            pairs = [self._pair(plan) for _ in range(self._jobs.rounds)]
            yield self._row(setting, plan, pairs, identity)

    def _settings(self, backend: str) -> Iterator[Setting]:
        yield Setting()
        sizes = _SIZES["cuda" if backend == "nccl" else "cpu"]
        for size in (*(size for size in sizes if size < self._jobs.nbytes), self._jobs.nbytes):
            yield Setting(size, "flattened_bucket")
            yield Setting(size, "tensors")

    def _plan(self, setting: Setting) -> Plan:
        weights = self._bytes.many
        if setting.bucket_bytes is None:
            return self._transport.plan({w.spec.name: w.read() for w in weights})
        packed = setting.load_format == "flattened_bucket"
        return plan_buckets(weights, setting.bucket_bytes, lambda _: packed, even=True)

    def _pair(self, plan: Plan) -> Pair:
        """A setting and the limit, one after the other: a busy machine slows both."""
        limit = self._transport.rehearse(self._bytes.one).seconds["transfer"]
        return Pair(self._transport.rehearse(plan).seconds["transfer"], limit)

    def _row(
        self, setting: Setting, plan: Plan, pairs: Sequence[Pair], identity: dict[str, Any]
    ) -> Row:
        row = Row(str(setting), "one huge broadcast", pairs)
        shown = {
            "bytes": plan.nbytes,
            "tensors": plan.tensors,
            "requests": plan.requests,
            "gigabytes_per_second": plan.nbytes / row.median.seconds / 1e9,
            "bucket_bytes": setting.bucket_bytes,
            "load_format": setting.load_format,
            "setting": "" if setting.bucket_bytes is None else setting.line,
        }
        return Row(row.job, row.limit, pairs, identity=identity | shown)


def advice(rows: Sequence[Row]) -> str:
    """Which setting to use: a line to copy, or that none is needed.

    Args:
        rows: Of all settings, the default first.

    Example:
        >>> slow = Row("default", "limit", [Pair(2.0, 1.0)], identity={"setting": ""})
        >>> fast = Row("other", "limit", [Pair(1.2, 1.0)], identity={"setting": "bucket_bytes=1"})
        >>> advice([slow, fast])
        'use bucket_bytes=1 (1.20x of one huge broadcast; the default 2.00x)'
        >>> advice([slow])
        'leave bucket_bytes and load_format alone: the default takes 2.00x of one huge broadcast'
    """
    default, best = rows[0].median.ratio, min(rows, key=lambda row: row.median.ratio)
    ratio = best.median.ratio
    if default <= ratio * (1 + _WORTH):
        return (
            "leave bucket_bytes and load_format alone: the default takes "
            f"{default:.2f}x of one huge broadcast"
        )
    return (
        f"use {best.identity['setting']} ({ratio:.2f}x of one huge broadcast; the default "
        f"{default:.2f}x)"
    )
