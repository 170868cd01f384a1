"""A model that FSDP2 shards over processes of this host, into a reference engine.

Two cores that carry ranks, engine and all copies leave no time to win, so what is shown is the
trace: bucket k + 1 is gathered while bucket k travels; and the memory that every rank takes.
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import timedelta
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import distributed
from torch.multiprocessing.spawn import start_processes

from weight_update.bench.loopback import engine_digests
from weight_update.bench.machine import PeakMemory
from weight_update.bench.models import ModelShape
from weight_update.bench.planning import timed
from weight_update.bench.rows import Pair, Row
from weight_update.ports import free_port
from weight_update.weights.buckets import DEFAULT_BUCKET_BYTES

_RANKS = 3
_BYTES = 280_000_000
_TENSORS = 200
_SECONDS = 600.0
_LIMIT = "one bare gather of all parameters"


@dataclass(frozen=True)
class Span:
    """A bucket on its way, in seconds since the update began.

    Attributes:
        bucket: Its number.
        gather: When it was gathered and packed: begin and end.
        send: When it travelled: its broadcast, until the engine confirmed it.
    """

    bucket: int
    gather: tuple[float, float]
    send: tuple[float, float]


def overlap(spans: Sequence[Span]) -> float:
    """Seconds in which a bucket was gathered while the one before it travelled.

    Example:
        >>> overlap([Span(0, (0.0, 1.0), (1.0, 3.0)), Span(1, (1.5, 2.5), (3.0, 4.0))])
        1.0
    """
    return sum(
        max(0.0, min(before.send[1], after.gather[1]) - max(before.send[0], after.gather[0]))
        for before, after in pairwise(spans)
    )


@dataclass(frozen=True)
class _Job:
    """What every rank is told.

    Attributes:
        url: The engine.
        home: Where each rank leaves what it measured.
        port: Of the trainer's own process group.
    """

    shape: ModelShape
    ranks: int
    rounds: int
    bucket_bytes: int | None
    url: str
    home: str
    port: int


def sharded_rows(
    rounds: int,
    identity: Mapping[str, Any],
    *,
    ranks: int = _RANKS,
    nbytes: int = _BYTES,
    tensors: int = _TENSORS,
    bucket_bytes: int | None = None,
) -> Iterator[Row]:
    """Measures updates of a sharded model, and compares the engine's tensors bit for bit."""
    from weight_update.reference_engine import ReferenceEngine

    shape = ModelShape(tensors, nbytes)
    with tempfile.TemporaryDirectory(prefix="weight-update-bench-") as home:
        with _saved(shape) as directory, ReferenceEngine(directory, startup_timeout=300) as engine:
            job = _Job(shape, ranks, rounds, bucket_bytes, engine.url, home, free_port())
            with _memory_given_back():
                start_processes(_rank, (job,), nprocs=ranks, start_method="spawn")  # type: ignore[no-untyped-call]
            held = engine_digests(engine.url)
        found = [json.loads((Path(home) / str(rank)).read_text()) for rank in range(ranks)]
    yield _row(job, found, held, identity)


def _row(
    job: _Job, found: Sequence[Any], held: Mapping[str, str], identity: Mapping[str, Any]
) -> Row:
    leader = found[0]
    spans = [Span(**span) for span in leader["spans"]]
    memory = [each["memory"] for each in found]
    bucket = job.bucket_bytes or DEFAULT_BUCKET_BYTES["cpu"]
    settings = asdict(job.shape) | {
        "ranks": job.ranks,
        "rounds": job.rounds,
        "bucket_bytes": bucket,
    }
    trace = {
        "extra_memory_by_rank": memory,
        "overlapped_seconds": overlap(spans),
        "gathering_seconds": sum(span.gather[1] - span.gather[0] for span in spans),
        "trace": leader["spans"],
    }
    return Row(
        f"FSDP2 on {job.ranks} ranks, {job.shape.nbytes / 1e9:.1f} GB",
        _LIMIT,
        [Pair(*pair) for pair in leader["seconds"]],
        extra_memory_bytes=None if None in memory else max(memory),
        allowed_memory_bytes=2 * bucket,
        correct=held == _expected(job.shape, job.rounds),
        identity={**identity, "settings": settings} | trace,
    )


# ---- the ranks


def _rank(rank: int, job: _Job) -> None:
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.set_num_threads(1)
    distributed.init_process_group(
        "gloo",
        init_method=f"tcp://127.0.0.1:{job.port}",
        rank=rank,
        world_size=job.ranks,
        timeout=timedelta(seconds=_SECONDS),
    )
    try:
        (Path(job.home) / str(rank)).write_text(json.dumps(_measure(rank, job)))
    finally:
        distributed.destroy_process_group()


def _measure(rank: int, job: _Job) -> dict[str, Any]:
    from weight_update import SGLangWeightSyncScheme

    model = _sharded(job)
    scheme = SGLangWeightSyncScheme(job.url, timeout=_SECONDS, bucket_bytes=job.bucket_bytes)
    seconds, memory, spans = [], [], []
    with scheme.create_sender() as sender:
        _fill(model, 0, rank, job.ranks)
        # Code is loaded and the group is made by a push of one small weight.
        sender.update_weights({"model.norm.weight": model.model.norm.weight})
        for number in range(1, job.rounds + 1):
            _fill(model, number, rank, job.ranks)
            bare = _together(lambda: _gather_all(model))
            peak = PeakMemory(torch.device("cpu"))
            with _traced() as trace:
                update = _together(lambda: sender.update_weights(model, progress=trace.progress))
            memory.append(peak.above())
            spans = trace.spans()
            seconds.append((update, bare))
    known = [each for each in memory if each is not None]
    told = {"seconds": seconds, "memory": max(known, default=None)}
    return told | {"spans": [asdict(span) for span in spans]}


def _together(call: Callable[[], object]) -> float:
    distributed.barrier()
    return timed(call)


def _gather_all(model: Any) -> None:
    for parameter in model.parameters():
        parameter.detach().full_tensor()


def _sharded(job: _Job) -> Any:
    """The model in parts, which was never whole anywhere."""
    from torch.distributed.fsdp import fully_shard
    from transformers import LlamaForCausalLM

    mesh = distributed.device_mesh.init_device_mesh("cpu", (job.ranks,))
    with torch.device("meta"):
        model: Any = LlamaForCausalLM(job.shape.config())
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    model.to_empty(device="cpu")
    return model.eval().requires_grad_(False)


@torch.no_grad()
def _fill(model: Any, number: int, rank: int, ranks: int) -> None:
    """Other values each round; every rank makes whole parameters, one at a time."""
    for index, (_, parameter) in enumerate(model.named_parameters()):
        parts = _value(index, number, parameter.shape).chunk(ranks)
        parameter.to_local().copy_(parts[rank] if rank < len(parts) else parts[0][:0])


def _value(index: int, number: int, shape: torch.Size) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * number + index)
    return torch.rand(shape, generator=generator)


def _expected(shape: ModelShape, number: int) -> dict[str, str]:
    """Digests of what the last round has sent."""
    from transformers import LlamaForCausalLM

    with torch.device("meta"):
        model: Any = LlamaForCausalLM(shape.config())
    return {
        name: hashlib.sha256(_value(index, number, value.shape).view(-1).numpy().data).hexdigest()
        for index, (name, value) in enumerate(model.named_parameters())
    }


class _Trace:
    """When each bucket was gathered, sent and confirmed."""

    def __init__(self) -> None:
        self._start = time.perf_counter()
        self._gathered: list[tuple[float, float]] = []
        self._sent: list[float] = []
        self._confirmed: list[float] = []

    def progress(self, progress: Any) -> None:
        """Told by the update, of each confirmed bucket among others."""
        while len(self._confirmed) < progress.bucket:
            self._confirmed.append(self._now())

    def pack(self, pack: Callable[..., Any], *arguments: Any) -> Any:
        """Notes when a bucket is packed."""
        begin = self._now()
        packed = pack(*arguments)
        self._gathered.append((begin, self._now()))
        return packed

    def broadcast(self, broadcast: Callable[..., Any], *arguments: Any) -> Any:
        """Notes when a bucket leaves."""
        self._sent.append(self._now())
        return broadcast(*arguments)

    def spans(self) -> list[Span]:
        """What was noted, by bucket; nothing on ranks that do not send."""
        sends = zip(self._sent, self._confirmed, strict=False)
        pairs = zip(self._gathered, sends, strict=False)
        return [Span(number, gather, send) for number, (gather, send) in enumerate(pairs)]

    def _now(self) -> float:
        return time.perf_counter() - self._start


@contextmanager
def _traced() -> Iterator[_Trace]:
    from weight_update.transports.broadcast import BucketPacker
    from weight_update.transports.process_group import UpdateGroup

    trace, packer, group = _Trace(), BucketPacker.pack, UpdateGroup.broadcast
    watched: list[tuple[Any, str, Any]] = [
        (BucketPacker, "pack", lambda *arguments: trace.pack(packer, *arguments)),
        (UpdateGroup, "broadcast", lambda *arguments: trace.broadcast(group, *arguments)),
    ]
    for owner, name, function in watched:
        setattr(owner, name, function)
    try:
        yield trace
    finally:
        BucketPacker.pack = packer  # type: ignore[method-assign]
        UpdateGroup.broadcast = group  # type: ignore[method-assign]


@contextmanager
def _memory_given_back() -> Iterator[None]:
    """Has glibc return what is freed: what it keeps for later is nothing that an update holds."""
    name = "MALLOC_MMAP_THRESHOLD_"
    before = os.environ.get(name)
    os.environ[name] = str(256 << 10)
    try:
        yield
    finally:
        os.environ.pop(name)
        if before is not None:
            os.environ[name] = before


# ---- the engine


@contextmanager
def _saved(shape: ModelShape) -> Iterator[str]:
    """A checkpoint of that shape, for an engine to start with."""
    from transformers.utils import logging

    logging.disable_progress_bar()
    with tempfile.TemporaryDirectory(prefix="weight-update-bench-") as directory:
        shape.build(torch.device("cpu")).save_pretrained(directory)
        yield directory
