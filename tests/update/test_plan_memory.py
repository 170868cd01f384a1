"""A plan is made once for a model that is as it was, and keeps no tensor alive."""

from __future__ import annotations

import gc
import weakref

import torch

from weight_update.options import UpdateOptions
from weight_update.update.planning import Payload, PlanMemory, fitted_plan
from weight_update.weights.cargo import Format
from weight_update.weights.extract import extract_weights
from weight_update.weights.extraction_cache import ExtractionCache
from weight_update.weights.specs import TensorSpec, Weight


def packs(_: TensorSpec) -> bool:
    return True


def plan(memory: PlanMemory, weights: tuple[Weight, ...], bucket_bytes: int = 1 << 20, **options):
    format_of = Format(bucket_bytes, packs)
    given = UpdateOptions(**options)
    return fitted_plan(Payload(weights), {}, (), given, lambda _: format_of, memory)


def remembered() -> tuple[torch.nn.Module, tuple[Weight, ...]]:
    """A model, and its weights as they are extracted from the second time on."""
    model, cache = torch.nn.Linear(3, 2), ExtractionCache()
    cache.extract(model)
    cache.extract(model)
    return model, cache.extract(model)


def test_a_model_that_is_as_it_was_is_planned_once() -> None:
    _model, weights = remembered()
    memory = PlanMemory()

    assert plan(memory, weights) is plan(memory, weights)


def test_another_size_of_buckets_is_another_plan() -> None:
    _model, weights = remembered()
    memory = PlanMemory()
    plan(memory, weights)

    assert len(plan(memory, weights, bucket_bytes=1).buckets) == 2


def test_other_weights_are_another_plan() -> None:
    (_model, weights), (_other, others) = remembered(), remembered()
    memory = PlanMemory()
    plan(memory, weights)

    assert plan(memory, others).buckets[0].weights == others


def test_values_that_are_to_be_checked_are_read_each_time() -> None:
    _model, weights = remembered()
    memory = PlanMemory()

    first = plan(memory, weights, check_finite=True)

    assert plan(memory, weights, check_finite=True) is not first


def test_no_tensor_is_kept() -> None:
    memory, tensor = PlanMemory(), torch.zeros(3)
    kept = weakref.ref(tensor)
    plan(memory, extract_weights({"w": tensor}))

    del tensor
    gc.collect()

    assert kept() is None
