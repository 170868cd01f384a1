"""The LoRA job of the weights benchmark, on a model of no size."""

from __future__ import annotations

import json

import pytest
import torch

pytest.importorskip("peft")

from weight_update.bench.weights.lora import LoraShape, lora_rows

CPU = torch.device("cpu")
TINY = LoraShape(
    layers=2, hidden=32, intermediate=48, heads=2, kv_heads=1, vocabulary=64, tied=True
)


def test_the_rows_have_all_ways_of_reading_and_what_each_of_them_held():
    row, beside_base = lora_rows(CPU, 3, {"machine": {}}, shape=TINY, bucket_bytes=10_000)

    assert beside_base.job == row.job
    assert beside_base.aim is None
    assert [pair.seconds for pair in beside_base.pairs] == [pair.seconds for pair in row.pairs]
    data = json.loads(json.dumps(row.to_dict()))
    largest = 2 * 64 * 32
    assert len(data["ratios"]) == 3
    assert data["ratio"] > 0
    assert data["aim"] == pytest.approx(1 / 3)
    assert data["allowed_memory_bytes"] == 2 * 10_000 + largest
    assert data["copy_memory_bytes"] is None or data["copy_memory_bytes"] >= 0
    assert data["settings"]["bucket_bytes"] == 10_000
    assert data["machine"] == {}


def test_the_model_has_an_adapter_with_effect_on_every_linear_layer_but_the_head():
    model = TINY.build(torch.device("cpu"))

    factors = [value for name, value in model.named_parameters() if ".lora_B." in name]
    assert len(factors) == 2 * 7
    assert all(value.abs().sum() > 0 for value in factors)
    assert {p.dtype for p in model.parameters() if not p.requires_grad} == {torch.bfloat16}
