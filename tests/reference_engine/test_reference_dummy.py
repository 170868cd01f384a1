"""An engine without files of weights, and a look at what it holds."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig

from weight_update.reference_engine import ReferenceEngine
from weight_update.reference_engine.dummy import ParameterBag, read_shapes
from weight_update.reference_engine.sums import positional_sums

CONFIG = LlamaConfig(
    architectures=["LlamaForCausalLM"],
    vocab_size=64,
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=1,
    num_attention_heads=4,
)
SHAPES = {"model.norm.weight": [8], "model.layers.0.mlp.experts.7.up_proj.weight": [4, 8]}


def look(engine: ReferenceEngine) -> dict[str, Any]:
    (rank,) = engine.call("GET", "/_reference/weights")["ranks"]
    return dict(rank)


def test_a_directory_with_a_configuration_alone_is_enough(tmp_path: Path):
    CONFIG.save_pretrained(tmp_path)
    with ReferenceEngine(tmp_path, load_format="dummy") as engine:
        told = engine.call("GET", "/model_info")
        output = engine.generate([1, 2, 3], max_new_tokens=4, ignore_eos=True)["output_ids"]

    assert told["load_format"] == "dummy"
    assert len(output) == 4


def test_without_being_told_so_a_directory_needs_weights(tmp_path: Path):
    CONFIG.save_pretrained(tmp_path)
    with pytest.raises(RuntimeError, match="no safetensors"):
        ReferenceEngine(tmp_path)


def test_parameters_that_belong_to_no_model_are_held_and_generate_nothing(tmp_path: Path):
    CONFIG.save_pretrained(tmp_path)
    (tmp_path / "shapes.json").write_text(json.dumps(SHAPES))
    with ReferenceEngine(tmp_path, shapes=tmp_path / "shapes.json") as engine:
        found = look(engine)
        with pytest.raises(RuntimeError, match="belong to no model"):
            engine.generate([1, 2, 3], max_new_tokens=4)
        engine.call("GET", "/ping")

    assert found["sums"].keys() == found["addresses"].keys() == SHAPES.keys()


@pytest.mark.parametrize("text", ["[]", "{}", '{"a": 3}', '{"a": [0]}', '{"a": ["4"]}'])
def test_a_file_without_shapes_is_refused(tmp_path: Path, text: str):
    file = tmp_path / "shapes.json"
    file.write_text(text)
    with pytest.raises(ValueError, match="does not hold a shape"):
        read_shapes(file)


def test_a_bag_has_its_parameters_under_the_given_names():
    bag = ParameterBag(CONFIG, SHAPES, torch.bfloat16)

    assert {name: list(value.shape) for name, value in bag.named_parameters()} == SHAPES
    assert {value.dtype for value in bag.parameters()} == {torch.bfloat16}


BASE = torch.arange(1.0, 1001.0).to(torch.bfloat16)


def changed(index: int) -> torch.Tensor:
    other = BASE.clone()
    other[index] += 8
    return other


@pytest.mark.parametrize(
    "other",
    [changed(0), changed(999), BASE.flip(0), BASE.roll(1), BASE[:-1], BASE.neg(), BASE * 0],
    ids=["first", "last", "reversed", "shifted", "shorter", "sign", "zero"],
)
def test_other_values_or_another_order_have_another_sum(other: torch.Tensor):
    first, second = positional_sums([BASE, other])

    assert first != second


def test_equal_values_have_the_same_sum_wherever_they_lie():
    strided = torch.stack([BASE, BASE], dim=1)[:, 0]

    assert len(set(positional_sums([BASE, strided, BASE.view(10, 100)]))) == 1


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float16, torch.float32, torch.int64])
def test_the_sum_is_of_the_bits_whatever_the_dtype(dtype: torch.dtype):
    a, b = torch.arange(50).to(dtype), torch.arange(1, 51).to(dtype)
    first, second = positional_sums([a, b])

    assert first != second


def test_the_sum_of_a_long_tensor_depends_on_every_part_of_it():
    zeros = torch.zeros((1 << 22) + 5, dtype=torch.int8)
    late, early = zeros.clone(), zeros.clone()
    late[-1], early[4] = 1, 1

    assert len(set(positional_sums([zeros, late, early]))) == 3
