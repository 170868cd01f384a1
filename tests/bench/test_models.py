"""Models of the benchmark have the tensors and bytes that a job names, and change when told."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import LlamaForCausalLM

from weight_update.bench.models import ModelShape, change
from weight_update.weights.extract import extract_weights

LAYERS = st.integers(1, 400)


def sizes(shape: ModelShape) -> list[int]:
    with torch.device("meta"):
        model = LlamaForCausalLM(shape.config())
    return [weight.spec.nbytes for weight in extract_weights(model)]


@pytest.mark.parametrize("tensors", [12, 20, 21, 300, 2_000])
def test_a_model_has_as_many_tensors_as_the_job_says(tensors: int):
    assert len(sizes(ModelShape(tensors, 50_000_000))) == tensors


def test_the_largest_job_has_twenty_thousand_tensors():
    shape = ModelShape(20_000, 1_000_000_000)

    assert 9 * shape.layers + (2 if shape.tied else 3) == 20_000


@pytest.mark.parametrize("tensors", [21, 300])
def test_a_model_has_about_as_many_bytes_as_the_job_says(tensors: int):
    total = sum(sizes(ModelShape(tensors, 1_000_000_000)))

    assert 0.9e9 < total < 1.1e9


@given(LAYERS, st.integers(10_000, 10**10))
@settings(max_examples=200)
def test_every_shape_is_one_that_attention_can_have(layers: int, nbytes: int):
    config = ModelShape(9 * layers + 3, nbytes).config()

    assert config.num_hidden_layers == layers
    assert config.hidden_size % (2 * config.num_attention_heads) == 0


def test_each_change_gives_every_parameter_new_finite_values():
    model = ModelShape(21, 100_000).build(torch.device("cpu"))
    for _ in range(60):
        before = [parameter.clone() for parameter in model.parameters()]
        change(model)
        for old, new in zip(before, model.parameters(), strict=True):
            assert not torch.equal(old, new)
            assert new.isfinite().all()
