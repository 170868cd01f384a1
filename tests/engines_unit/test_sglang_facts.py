"""What a server's answers say of it; answers of every other shape say nothing, and harm nobody."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weight_update.engines.sglang.facts import (
    digests_of,
    first_row_of,
    instance_of,
    label_of,
    model_of,
)
from weight_update.facts import Digests, Part

INFO = {
    "version": "0.5.23",
    "tp_size": 2,
    "ep_size": 1,
    "dtype": "bfloat16",
    "device": "cuda",
    "quantization": None,
    "enable_lora": None,
    "model_path": "/models/a",
}
MODEL = {"architectures": ["LlamaForCausalLM"], "weight_version": "3"}


# -- label and instance --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("model", "label"),
    [
        ({"weight_version": "7"}, "7"),
        ({"weight_version": 7}, "7"),
        ({"weight_version": "default"}, "default"),
        ({"weight_version": None}, None),
        ({}, None),
    ],
)
def test_the_label_is_a_text_or_there_is_none(model: dict[str, Any], label: str | None) -> None:
    assert label_of(model) == label


START = {"random_seed": 5, "startup_time": {"scheduler_e2e": 1.25, "tokenizer_e2e": 9.5}}


@pytest.mark.parametrize(
    ("other", "same"),
    [
        ({**START, "port": 30000, "internal_states": [{"last_gen_throughput": 3.0}]}, True),
        ({**START, "random_seed": 6}, False),
        ({**START, "startup_time": {"scheduler_e2e": 1.25, "tokenizer_e2e": 9.75}}, False),
        ({"random_seed": 5}, False),
        ({"startup_time": dict(reversed(START["startup_time"].items())), "random_seed": 5}, True),
    ],
)
def test_an_instance_is_what_a_start_makes_anew(other: dict[str, Any], same: bool) -> None:
    assert (instance_of(START) == instance_of(other)) is same


@pytest.mark.parametrize("info", [{}, {"random_seed": None}, {"version": "0.5.23", "port": 1}])
def test_a_server_that_shows_nothing_of_its_start_has_no_instance(info: dict[str, Any]) -> None:
    assert instance_of(info) is None


def test_an_instance_repeats_no_key_of_the_answer() -> None:
    assert "secret" not in str(instance_of({**START, "api_key": "secret"}))


# -- layout --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "same"),
    [
        ({"port": 30001, "random_seed": 4, "mem_fraction_static": 0.5}, True),
        ({"model_path": "/elsewhere/b"}, True),
        ({"version": "0.5.22"}, False),
        ({"tp_size": 4}, False),
        ({"dtype": "float16"}, False),
        ({"device": "cpu"}, False),
        ({"quantization": "fp8"}, False),
        ({"enable_lora": True}, False),
        ({"ep_size": 2}, False),
    ],
)
def test_servers_of_one_layout_keep_equal_weights_in_equal_parts(
    change: dict[str, Any], same: bool
) -> None:
    layout = model_of(INFO, MODEL).layout

    assert layout is not None
    assert (model_of({**INFO, **change}, MODEL).layout == layout) is same


def test_another_architecture_is_another_layout() -> None:
    assert model_of(INFO, {"architectures": ["Qwen2ForCausalLM"]}).layout != (
        model_of(INFO, MODEL).layout
    )


@pytest.mark.parametrize(("path", "same"), [("/models/a", True), ("/models/b", False)])
def test_where_the_folder_decides_the_dtype_it_decides_the_layout(path: str, same: bool) -> None:
    here = model_of({**INFO, "dtype": "auto"}, MODEL).layout
    there = model_of({**INFO, "dtype": "auto", "model_path": path}, MODEL).layout

    assert (here == there) is same


@pytest.mark.parametrize(
    ("info", "model"),
    [
        ({}, MODEL),
        ({**INFO, "version": None}, MODEL),
        ({**INFO, "tp_size": None}, MODEL),
        ({**INFO, "dtype": ""}, MODEL),
        (INFO, {}),
        (INFO, {"architectures": None}),
        (INFO, {"architectures": []}),
        (INFO, {"architectures": "LlamaForCausalLM"}),
    ],
)
def test_a_server_that_does_not_say_enough_has_no_layout(
    info: dict[str, Any], model: dict[str, Any]
) -> None:
    assert model_of(info, model).layout is None


# -- digests -------------------------------------------------------------------------------


def rank(**sums: str) -> dict[str, Any]:
    return {"checksums": sums, "per_gpu_checksum": "0", "parallelism_info": []}


def described(**changes: Any) -> dict[str, Any]:
    parts = {"q": {"dim": 0, "start": 4, "length": 4}, "n": {"dim": None, "start": 0, "length": 0}}
    return {**rank(q="aa", n="bb"), "parts": parts, "digest": "sha256", "dtype": "float32"} | (
        changes
    )


def test_digests_are_read_rank_by_rank() -> None:
    body = {"success": True, "ranks": [rank(q="aa"), rank(q="ab")]}

    assert digests_of(body) == Digests(({"q": "aa"}, {"q": "ab"}))


def test_digests_that_describe_themselves_can_be_compared_with_the_trainers() -> None:
    found = digests_of({"ranks": [described(), described()]})

    parts = {"q": Part(0, 4, 4), "n": Part()}
    assert found == Digests(({"q": "aa", "n": "bb"},) * 2, (parts, parts), "float32")


@pytest.mark.parametrize(
    "change",
    [
        {"digest": "md5"},
        {"dtype": None},
        {"parts": None},
        {"parts": {"q": {"dim": 0, "start": 0, "length": 4}}},
        {"parts": {"q": {"dim": 0, "start": 0, "length": 4}, "n": {"dim": None}}},
        {"parts": {"q": {"dim": True, "start": 0, "length": 4}, "n": {"start": 0, "length": 0}}},
        {"parts": {"q": {"dim": 0, "start": -1, "length": 4}, "n": {"start": 0, "length": 0}}},
    ],
)
def test_digests_that_describe_themselves_in_part_compare_with_engines_only(
    change: dict[str, Any],
) -> None:
    found = digests_of({"ranks": [described(), described(**change)]})

    assert found == Digests(({"q": "aa", "n": "bb"},) * 2)


def test_ranks_of_two_dtypes_compare_with_engines_only() -> None:
    found = digests_of({"ranks": [described(), described(dtype="bfloat16")]})

    assert found is not None
    assert (found.parts, found.dtype) == (None, None)


@pytest.mark.parametrize(
    "body",
    [
        None,
        [],
        "html",
        {},
        {"success": True, "message": "Success."},
        {"ranks": []},
        {"ranks": {}},
        {"ranks": [None]},
        {"ranks": [{"checksums": None}]},
        {"ranks": [{"checksums": {"q": 1}}]},
        {"ranks": [rank(q="aa"), {}]},
    ],
)
def test_an_answer_without_digests_of_every_rank_has_none(body: Any) -> None:
    assert digests_of(body) is None


# -- first row -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("body", "row"),
    [
        ([[0.5, 1.0], [2.0, 3.0]], (0.5, 1.0)),
        ([0.5], (0.5,)),
        ([1, 2], (1.0, 2.0)),
        ([[[0.5, 1.0]], [[7.0, 8.0]]], (0.5, 1.0)),
        ([[0.5], [0.5]], (0.5,)),
    ],
    ids=[
        "a matrix",
        "a vector",
        "whole numbers",
        "a matrix of several leaders",
        "a vector of them",
    ],
)
def test_the_first_row_is_read_whatever_is_around_it(body: Any, row: tuple[float, ...]) -> None:
    assert first_row_of(body) == row


@pytest.mark.parametrize(
    "body",
    [None, {}, [], [[]], "x", 0.5, [None], [[None]], ["1"], [True], [[0.5, None]], [10**400]],
)
def test_an_answer_without_numbers_has_no_first_row(body: Any) -> None:
    assert first_row_of(body) is None


# -- any JSON ------------------------------------------------------------------------------

KEYS = st.sampled_from(
    [
        *("ranks", "checksums", "parts", "dim", "start", "length", "digest", "dtype", "q"),
        *("random_seed", "startup_time", "weight_version", "architectures", "version"),
        *("tp_size", "device", "quantization"),
    ]
)
JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.sampled_from(["sha256", "float32", "auto", "LlamaForCausalLM", ""]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=6),
    max_leaves=15,
)
OBJECTS = st.dictionaries(KEYS, JSON)


@given(OBJECTS, OBJECTS)
def test_any_object_is_read_as_far_as_it_says_something(
    info: dict[str, Any], model: dict[str, Any]
) -> None:
    label, instance, found = label_of(model), instance_of(info), model_of(info, model)

    assert label is None or isinstance(label, str)
    assert instance is None or len(instance) == 16
    assert all(isinstance(each, str) for each in found.architectures)
    assert found.layout is None or found.architectures


@given(JSON | st.builds(lambda rows: {"ranks": rows}, st.lists(OBJECTS, max_size=3)))
def test_any_json_is_digests_or_none(body: Any) -> None:
    found = digests_of(body)

    assert found is None or len(found.ranks) == len(body["ranks"])


@given(JSON)
def test_any_json_is_a_row_or_none(body: Any) -> None:
    found = first_row_of(body)

    assert found is None or (found and all(isinstance(value, float) for value in found))
