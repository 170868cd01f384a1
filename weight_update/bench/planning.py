"""What an update costs before anything moves: the plan, and finding out that it still holds."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from weight_update.bench.rows import Pair, Row
from weight_update.transports.broadcast import BucketPacker
from weight_update.weights.buckets import DEFAULT_BUCKET_BYTES, plan_buckets
from weight_update.weights.cargo import Terms
from weight_update.weights.extraction_cache import ExtractionCache

_PLAN_SECONDS = 0.1
_UNCHANGED_AIM = 1.3


def planning_rows(model: Any, rounds: int, identity: Mapping[str, Any]) -> Iterator[Row]:
    """Times both on a model that was extracted before."""
    cache = ExtractionCache()
    cache.extract(model)
    weights = cache.extract(model)  # what comes again is remembered
    tensors = f"{len(weights):,} tensors"
    size = DEFAULT_BUCKET_BYTES["cpu"]
    packs = BucketPacker(torch.device("cpu")).format(None, Terms()).packs
    identity = {**identity, "settings": {"tensors": len(weights), "rounds": rounds}}

    def plan() -> object:
        return plan_buckets(weights, size, packs, even=True)

    def unchanged() -> object:
        return cache.extract(model)

    yield Row(
        f"planning {tensors}",
        f"{_PLAN_SECONDS * 1e3:.0f} ms",
        [Pair(timed(plan), _PLAN_SECONDS) for _ in range(rounds)],
        aim=1.0,
        identity=identity,
    )
    yield Row(
        f"{tensors} unchanged",
        "one state_dict()",
        [Pair(timed(unchanged), timed(model.state_dict)) for _ in range(rounds)],
        aim=_UNCHANGED_AIM,
        identity=identity,
    )


def timed(call: Callable[[], object]) -> float:
    """Seconds of one call."""
    start = time.perf_counter()
    call()
    return time.perf_counter() - start
