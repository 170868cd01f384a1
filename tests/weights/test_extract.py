"""Extraction: one flat list of names and lazy values from any source of weights."""

from __future__ import annotations

import gc
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tensordict import TensorDict
from torch import nn

from weight_update.errors import ConfigurationError, WeightMismatchError
from weight_update.weights.extract import extract_weights, get_model_metadata, match_metadata


def payload(source: Any) -> dict[str, torch.Tensor]:
    """Name to value, as an engine would get them."""
    return {w.spec.name: w.read() for w in extract_weights(source)}


# -- tied and untied heads (C14) -----------------------------------------------------------


def test_a_tied_head_travels_once_under_its_first_name(make_llama) -> None:
    names = list(get_model_metadata(make_llama(tie_word_embeddings=True)))

    assert "model.embed_tokens.weight" in names
    assert "lm_head.weight" not in names
    assert len(names) == len(set(names))


def test_an_untied_head_of_equal_values_is_sent_too(make_llama) -> None:
    model = make_llama()
    with torch.no_grad():
        model.lm_head.weight.copy_(model.model.embed_tokens.weight)

    assert "lm_head.weight" in get_model_metadata(model)


def test_tied_is_what_shares_storage_and_no_flag_of_a_config(make_llama) -> None:
    model = make_llama(tie_word_embeddings=True)
    model.config.tie_word_embeddings = False
    model.config.text_config = SimpleNamespace(tie_word_embeddings=False)

    assert "lm_head.weight" not in get_model_metadata(model)


def test_a_head_of_a_nested_module_is_kept() -> None:
    model = nn.ModuleDict({"mtp": nn.ModuleDict({"lm_head": nn.Linear(2, 2, bias=False)})})
    model["lm_head"] = nn.Linear(2, 2, bias=False)

    assert list(get_model_metadata(model)) == ["mtp.lm_head.weight", "lm_head.weight"]


def test_a_module_registered_under_two_names_travels_once() -> None:
    shared = nn.Linear(2, 2)

    names = list(get_model_metadata(nn.ModuleDict({"a": shared, "b": shared})))

    assert names == ["a.weight", "a.bias"]


@pytest.mark.parametrize("view", [lambda t: t[:2], lambda t: t.t()], ids=["part", "transposed"])
def test_another_view_of_the_same_storage_is_a_weight_of_its_own(view: Any) -> None:
    model = nn.Module()
    model.register_buffer("whole", torch.arange(12.0).view(4, 3))
    model.register_buffer("view", view(model.whole))

    assert list(get_model_metadata(model)) == ["whole", "view"]


def test_empty_tensors_are_never_taken_for_tied_ones() -> None:
    model = nn.Module()
    model.register_buffer("a", torch.empty(0, 4))
    model.register_buffer("b", torch.empty(0, 4))

    assert list(get_model_metadata(model)) == ["a", "b"]


def test_metadata_of_a_model_on_the_meta_device_lists_every_name() -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))

    assert list(get_model_metadata(model)) == ["0.weight", "0.bias", "1.weight", "1.bias"]


# -- buffers and extra state (C61) ---------------------------------------------------------


class Buffered(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(2, 2, bias=False)
        self.register_buffer("inv_freq", torch.ones(2))
        self.register_buffer("table", torch.ones(9), persistent=False)
        self.register_buffer("e_score_correction_bias", torch.ones(2))
        self.norm = nn.BatchNorm1d(2)


def test_parameters_and_persistent_buffers_are_sent_but_for_computed_tables() -> None:
    kept = [name for name in Buffered().state_dict() if name != "inv_freq"]
    assert list(get_model_metadata(Buffered())) == kept
    assert "table" not in get_model_metadata(Buffered())


def test_extra_state_is_no_weight() -> None:
    class WithState(nn.Linear):
        def get_extra_state(self) -> dict[str, int]:
            return {"steps": 3}

        def set_extra_state(self, state: Any) -> None: ...

    assert list(get_model_metadata(WithState(1, 1))) == ["weight", "bias"]


# -- metadata ------------------------------------------------------------------------------


def test_metadata_gives_dtype_and_shape_in_send_order(make_llama) -> None:
    model = make_llama(dtype=torch.bfloat16)

    metadata = get_model_metadata(model)

    assert metadata == {k: (v.dtype, v.shape) for k, v in model.state_dict().items()}
    assert list(metadata) == [w.spec.name for w in extract_weights(model)]
    assert all(isinstance(shape, torch.Size) for _, shape in metadata.values())


def test_frozen_parameters_are_sent_as_well() -> None:
    model = nn.Linear(2, 2).requires_grad_(False)

    assert list(get_model_metadata(model)) == ["weight", "bias"]


def test_matching_gives_the_order_of_the_metadata_and_ignores_other_names() -> None:
    weights = extract_weights({"x": torch.ones(1), "a": torch.ones(2), "b": torch.ones(3)})
    metadata = {"b": (torch.float32, torch.Size([3])), "a": (torch.float32, torch.Size([2]))}

    assert [w.spec.name for w in match_metadata(weights, metadata)] == ["b", "a"]


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({}, "Weight 'w' not found in weights"),
        ({"w": torch.zeros(2, 3, dtype=torch.float16)}, "changed dtype"),
        ({"w": torch.zeros(3, 2)}, "changed shape"),
        ({"w": torch.zeros(6)}, "changed shape"),
        ({"w": torch.zeros(0)}, "changed shape"),
    ],
)
def test_a_weight_that_differs_from_the_metadata_is_refused(
    given: dict[str, torch.Tensor], words: str
) -> None:
    metadata = {"w": (torch.float32, torch.Size([2, 3]))}

    with pytest.raises(WeightMismatchError, match=words) as caught:
        match_metadata(extract_weights({"other": torch.zeros(1), **given}), metadata)

    assert isinstance(caught.value, ValueError)
    assert caught.value.phase == "plan"
    assert caught.value.remedy


def test_a_mismatch_lists_every_weight_that_differs_and_both_facts() -> None:
    metadata = {
        "a": (torch.float32, torch.Size([1])),
        "b": (torch.bfloat16, torch.Size([2])),
        "c": (torch.float32, torch.Size([1008, 4])),
    }
    weights = extract_weights({"b": torch.zeros(2), "c": torch.zeros(1000, 4)})

    with pytest.raises(WeightMismatchError) as caught:
        match_metadata(weights, metadata)

    for words in ("3 weight(s)", "'a' not found", "bfloat16", "float32", "1008", "1000"):
        assert words in str(caught.value)


@pytest.mark.parametrize(
    "change", [lambda m: m.half(), lambda m: m.resize_token_embeddings(40)], ids=["cast", "resize"]
)
def test_a_model_that_changed_since_its_metadata_was_taken_is_refused(make_llama, change) -> None:
    model = make_llama()
    metadata = get_model_metadata(model)
    change(model)

    with pytest.raises(WeightMismatchError):
        match_metadata(extract_weights(model), metadata)


# -- sources -------------------------------------------------------------------------------


def test_a_mapping_keeps_its_order_and_its_names() -> None:
    assert list(payload({"b": torch.ones(1), "a": torch.ones(1)})) == ["b", "a"]


@pytest.mark.parametrize("nested", [False, True])
def test_a_tensordict_gives_the_same_names_as_the_module(nested: bool) -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
    flat = TensorDict({k: v.detach() for k, v in model.state_dict().items()}, [])

    source = flat.unflatten_keys(".") if nested else flat

    got = payload(source)
    assert got.keys() == dict(get_model_metadata(model)).keys()
    assert all(torch.equal(got[k], v) for k, v in model.state_dict().items())


def test_a_state_dict_gives_what_the_module_gives(make_llama) -> None:
    model = make_llama()

    from_module, from_mapping = payload(model), payload(model.state_dict())

    assert list(from_module) == list(from_mapping)
    assert all(torch.equal(from_module[k], from_mapping[k]) for k in from_module)


@pytest.mark.parametrize(
    "source", [nn.Module(), nn.ReLU(), {}, TensorDict({}, [])], ids=["module", "relu", "{}", "td"]
)
def test_a_source_without_weights_is_refused(source: Any) -> None:
    with pytest.raises(ConfigurationError, match="has no weights to send") as caught:
        extract_weights(source)

    assert "register the training model" in caught.value.remedy


@pytest.mark.parametrize("source", [3, "weights", [torch.ones(1)], torch.ones(1), object()])
def test_what_is_no_source_of_weights_is_refused_by_type(source: Any) -> None:
    with pytest.raises(ConfigurationError, match=type(source).__name__) as caught:
        extract_weights(source)

    text = isinstance(source, str)
    wanted = "SavedStateDict(path)" if text else "mapping of names to tensors"
    assert wanted in caught.value.remedy


@pytest.mark.parametrize("value", [None, 1.0, [1.0], {"w": torch.ones(1)}])
def test_a_mapping_entry_that_is_no_tensor_is_named(value: Any) -> None:
    with pytest.raises(WeightMismatchError, match="'head'"):
        extract_weights({"a": torch.ones(1), "head": value})


def test_a_sparse_weight_is_refused_by_name() -> None:
    with pytest.raises(ConfigurationError, match=r"'w' is torch.sparse_coo"):
        extract_weights({"w": torch.eye(2).to_sparse()})


class PackedLinear(nn.Module):
    """Packed bytes under a weight's name, as 4-bit layers keep them; nobody can unpack these."""

    def __init__(self, *, as_buffer: bool) -> None:
        super().__init__()
        packed = torch.zeros(32, 1, dtype=torch.uint8)
        if as_buffer:
            self.register_buffer("weight", packed)
        else:
            self.weight = nn.Parameter(packed, requires_grad=False)


@pytest.mark.parametrize("as_buffer", [False, True], ids=["parameter", "buffer"])
def test_packed_bytes_never_travel_under_a_weights_name(as_buffer: bool) -> None:
    model = nn.ModuleDict({"mlp": PackedLinear(as_buffer=as_buffer), "head": nn.Linear(2, 2)})

    with pytest.raises(ConfigurationError, match=r"mlp\.weight.*uint8") as caught:
        extract_weights(model)

    assert "dequantise" in caught.value.remedy


# -- values --------------------------------------------------------------------------------


def test_values_are_detached_and_never_copied_before_they_are_read() -> None:
    model = nn.Linear(2, 2)

    values = payload(model)

    assert values["weight"].data_ptr() == model.weight.data_ptr()
    assert not any(value.requires_grad for value in values.values())


def test_extraction_reads_nothing_until_asked() -> None:
    model = nn.Linear(1, 1)
    weights = extract_weights(model)
    with torch.no_grad():
        model.weight.fill_(7.0)

    assert weights[0].read().item() == 7.0


def test_extraction_leaves_gradients_and_training_mode_alone() -> None:
    model = nn.Linear(2, 2)
    model(torch.ones(1, 2)).sum().backward()
    before = model.weight.grad.clone()

    payload(model)

    assert torch.equal(model.weight.grad, before)
    assert model.training
    assert model.weight.requires_grad


def test_metadata_does_not_keep_a_model_alive() -> None:
    model = nn.Linear(2, 2)
    freed: list[bool] = []
    torch.nn.Module.__setattr__(model, "token", Token(freed))
    metadata = get_model_metadata(model)

    del model
    gc.collect()

    assert freed == [True]
    assert metadata


class Token:
    """Notes when it is collected."""

    def __init__(self, freed: list[bool]) -> None:
        self._freed = freed

    def __del__(self) -> None:
        self._freed.append(True)


# -- models that merge adapters of their own ------------------------------------------------


class OwnAdapter(nn.Module):
    """An adapter that is not PEFT's: only the model knows how to merge it."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))
        self.delta = nn.Parameter(torch.full((2,), 0.5))

    def merge_and_unload(self) -> nn.Module:
        with torch.no_grad():
            self.weight += self.delta
        del self.delta
        return self


def test_a_foreign_adapter_is_merged_on_a_copy_with_a_warning(caplog) -> None:
    model = OwnAdapter()

    with caplog.at_level("WARNING", logger="weight_update"):
        values = payload(model)

    assert {k: v.tolist() for k, v in values.items()} == {"weight": [1.5, 1.5]}
    assert model.weight.tolist() == [1.0, 1.0]
    assert model.delta.tolist() == [0.5, 0.5]
    assert "OwnAdapter" in caplog.text


def test_a_merge_that_returns_no_module_is_refused_by_class_name() -> None:
    class Broken(OwnAdapter):
        def merge_and_unload(self) -> None:
            return None

    with pytest.raises(ConfigurationError, match=r"Broken.merge_and_unload"):
        extract_weights(Broken())
