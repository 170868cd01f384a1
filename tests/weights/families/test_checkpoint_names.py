"""What is extracted is what checkpoints of its family hold, by transformers' own save and load."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from weight_update.weights.extract import extract_weights
from weight_update.weights.specs import Weight

from .tiny import CONFIGS, meta_model, tiny_model

# A model that was never loaded from a published checkpoint is saved without the level of names
# that those have in their vision tower.
TOWERS = {"gemma3", "llava", "llava-moe"}
# Loaded transposed, and saved as it stands in memory, by transformers 5.
TRANSPOSED = {"qwen3-vl-moe"}


def extracted(model: Any) -> dict[str, Weight]:
    return {weight.spec.name: weight for weight in extract_weights(model)}


def values(weights: dict[str, Weight]) -> dict[str, torch.Tensor]:
    return {name: weight.read() for name, weight in weights.items()}


def on_disk(directory: Path) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}
    for file in directory.glob("*.safetensors"):
        found |= load_file(file)
    return found


def push_to_disk(model: Any, directory: Path) -> Any:
    """The model that transformers loads from what is extracted."""
    model.config.save_pretrained(directory)
    push = {name: value.contiguous() for name, value in values(extracted(model)).items()}
    save_file(push, directory / "model.safetensors", metadata={"format": "pt"})
    return type(model).from_pretrained(directory)


def assert_same(some: dict[str, torch.Tensor], others: dict[str, torch.Tensor]) -> None:
    assert some.keys() == others.keys()
    for name, value in some.items():
        assert value.dtype == others[name].dtype, name
        assert torch.equal(value, others[name]), name


@pytest.mark.parametrize("family", CONFIGS.keys() - TOWERS - TRANSPOSED)
def test_it_is_what_save_pretrained_writes_bit_for_bit(family: str, tmp_path: Path) -> None:
    model = tiny_model(family)
    model.save_pretrained(tmp_path)

    weights = extracted(model)

    assert_same(values(weights), on_disk(tmp_path))
    assert {name: weight.spec.shape for name, weight in weights.items()} == {
        name: tuple(value.shape) for name, value in on_disk(tmp_path).items()
    }


@pytest.mark.parametrize("family", sorted(TOWERS))
def test_a_vision_tower_has_the_names_with_which_a_loaded_model_is_saved(
    family: str, tmp_path: Path
) -> None:
    loaded = push_to_disk(tiny_model(family), tmp_path)
    loaded.save_pretrained(tmp_path / "again")

    assert_same(values(extracted(loaded)), on_disk(tmp_path / "again"))


@pytest.mark.parametrize("family", CONFIGS)
def test_transformers_loads_from_it_the_same_model(family: str, tmp_path: Path) -> None:
    model = tiny_model(family)

    loaded = push_to_disk(model, tmp_path)

    assert_same(loaded.state_dict(), model.state_dict())


@pytest.mark.parametrize("family", CONFIGS)
def test_a_model_without_memory_has_the_same_names_and_shapes(family: str) -> None:
    without, with_memory = extracted(meta_model(family)), extracted(tiny_model(family))

    assert [weight.spec for weight in without.values()] == [
        weight.spec for weight in with_memory.values()
    ]


def test_deepseek_v3_in_its_own_size_has_the_published_names_and_shapes() -> None:
    config = transformers.DeepseekV3Config(num_hidden_layers=4)
    with torch.device("meta"):
        model = transformers.DeepseekV3ForCausalLM(config)

    shapes = {name: weight.spec.shape for name, weight in extracted(model).items()}

    assert shapes["model.layers.3.mlp.experts.255.gate_proj.weight"] == (2048, 7168)
    assert shapes["model.layers.3.mlp.experts.255.up_proj.weight"] == (2048, 7168)
    assert shapes["model.layers.3.mlp.experts.255.down_proj.weight"] == (7168, 2048)
    assert shapes["model.layers.3.mlp.gate.e_score_correction_bias"] == (256,)
    assert shapes["model.layers.2.mlp.gate_proj.weight"] == (18432, 7168)
    assert sum(".experts." in name for name in shapes) == 3 * 256


@pytest.mark.parametrize("tied", [True, False])
def test_a_vision_model_whose_text_part_ties_sends_the_embedding_once(tied: bool) -> None:
    name, make = CONFIGS["qwen2-vl"]
    config = make()
    config.tie_word_embeddings = config.text_config.tie_word_embeddings = tied
    model = getattr(transformers, name)(config)
    if not tied:  # of equal values, but not the same tensor
        model.lm_head.weight.data.copy_(model.get_input_embeddings().weight.data)

    names = extracted(model).keys()

    assert "model.embed_tokens.weight" in names
    assert ("lm_head.weight" in names) is not tied
