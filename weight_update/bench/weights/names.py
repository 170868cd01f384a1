"""What the names of a large mixture of experts cost: the plan, and finding that nothing changed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

from weight_update.bench.planning import timed
from weight_update.bench.rows import Pair, Row
from weight_update.transports.broadcast import BucketPacker
from weight_update.weights.buckets import DEFAULT_BUCKET_BYTES, plan_buckets
from weight_update.weights.cargo import Terms
from weight_update.weights.extraction_cache import ExtractionCache
from weight_update.weights.specs import Weight

_PLAN_SECONDS = 0.3
_UNCHANGED_AIM = 1.3


def names_rows(rounds: int, identity: Mapping[str, Any]) -> Iterator[Row]:
    """Times both for a DeepSeek-V3 in its own size, without memory.

    Once as transformers 5 holds it, experts stacked, and once with a parameter for each name of
    its checkpoint.
    """
    stacked = deepseek_v3()
    cache = ExtractionCache()
    cache.extract(stacked)
    weights = cache.extract(stacked)  # what comes again is remembered
    settings = {"tensors": len(weights), "rounds": rounds, "device": "meta"}
    identity = {**identity, "settings": settings}
    names = f"{len(weights):,} names of DeepSeek-V3"
    yield Row(
        f"planning {names}",
        f"{_PLAN_SECONDS * 1e3:.0f} ms",
        [Pair(_planning(weights), _PLAN_SECONDS) for _ in range(rounds)],
        aim=1.0,
        identity=identity,
    )
    yield _unchanged(f"{names} unchanged, experts stacked", stacked, cache, rounds, identity)
    apart = _one_by_one(weights)
    yield _unchanged(f"{names} unchanged", apart, ExtractionCache(), rounds, identity)


def deepseek_v3() -> Any:
    """DeepSeek-V3 with the published configuration, on the meta device."""
    from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

    with torch.device("meta"):
        return DeepseekV3ForCausalLM(DeepseekV3Config()).to(torch.bfloat16)


def _planning(weights: tuple[Weight, ...]) -> float:
    packs = BucketPacker(torch.device("cpu")).format(None, Terms()).packs
    return timed(lambda: plan_buckets(weights, DEFAULT_BUCKET_BYTES["cuda"], packs, even=True))


def _unchanged(
    job: str, model: nn.Module, cache: ExtractionCache, rounds: int, identity: Mapping[str, Any]
) -> Row:
    cache.extract(model)
    cache.extract(model)  # what comes again is remembered
    pairs = [
        Pair(timed(lambda: cache.extract(model)), timed(model.state_dict)) for _ in range(rounds)
    ]
    return Row(job, "one state_dict()", pairs, aim=_UNCHANGED_AIM, identity=identity)


def _one_by_one(weights: tuple[Weight, ...]) -> nn.Module:
    """A module with a parameter of each name."""
    root = nn.Module()
    for weight in weights:
        *path, key = weight.spec.name.split(".")
        owner = root
        for name in path:
            if name not in dict(owner.named_children()):
                owner.add_module(name, nn.Module())
            owner = owner.get_submodule(name)
        tensor = torch.empty(weight.spec.shape, dtype=weight.spec.dtype, device="meta")
        owner.register_parameter(key, nn.Parameter(tensor, requires_grad=False))
    return root
