"""Names by the user's own rules: what is renamed, what is left out, what is refused."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch

from weight_update import ConfigurationError, WeightMismatchError, WeightUpdateError
from weight_update.weights.extract import extract_weights
from weight_update.weights.name_map import check_name_map, renamed
from weight_update.weights.specs import TensorSpec, Turn, Weight

NAMES = ["policy.embed", "policy.layers.0.q", "policy.layers.1.q", "policy.head"]


def weights(*names: str) -> tuple[Weight, ...]:
    return extract_weights({name: torch.full((2,), float(i)) for i, name in enumerate(names)})


def names_by(name_map: Any, *names: str) -> list[str]:
    return [weight.spec.name for weight in renamed(weights(*(names or NAMES)), name_map)]


# -- what it does -------------------------------------------------------------------------


def test_without_a_map_names_stay() -> None:
    assert names_by(None) == NAMES


def test_a_function_gives_names_and_leaves_weights_out() -> None:
    def engines_name(name: str) -> str | None:
        return None if name.endswith("head") else name.removeprefix("policy.")

    assert names_by(engines_name) == ["embed", "layers.0.q", "layers.1.q"]


@pytest.mark.parametrize(
    ("table", "expected"),
    [
        ({r"^policy\.": "model."}, "model.layers.0.q"),
        ({r"^policy\.": "", r"^layers": "blocks"}, "blocks.0.q"),
        ({r"\.": "/"}, "policy/layers/0/q"),
        ({r"layers\.(\d+)\.(?P<part>q)": r"\g<part>.\1"}, "policy.q.0"),
        ({r"y": "ies", "ies": "y"}, "policy.layers.0.q"),
    ],
    ids=["prefix", "in order", "every match", "groups", "there and back"],
)
def test_every_expression_of_a_table_is_applied_in_order(
    table: Mapping[str, str], expected: str
) -> None:
    assert names_by(table)[1] == expected


def test_only_the_name_changes() -> None:
    turn = Turn(3, lambda _: None)
    spec = TensorSpec("a", torch.bfloat16, (2, 3))
    value = torch.ones(2, 3, dtype=torch.bfloat16)
    weight = Weight(spec, value.device, lambda: value, lambda a, b: value[a:b], True, turn)

    (new,) = renamed([weight], {"a": "b"})

    assert new.spec == TensorSpec("b", torch.bfloat16, (2, 3))
    assert new.read() is value
    assert (new.rows, new.collective, new.turn) == (weight.rows, True, turn)


def test_values_go_with_their_names() -> None:
    swap = {"policy.embed": "policy.head", "policy.head": "policy.embed"}

    new = renamed(weights(*NAMES), lambda name: swap.get(name, name))

    assert {each.spec.name: float(each.read()[0]) for each in new} == {
        "policy.head": 0.0,
        "policy.layers.0.q": 1.0,
        "policy.layers.1.q": 2.0,
        "policy.embed": 3.0,
    }


# -- what is refused ----------------------------------------------------------------------


def raises(_: str) -> str:
    raise KeyError("layers")


REFUSED: dict[str, tuple[Any, type[WeightUpdateError], str]] = {
    "an idle expression": (
        {r"^policy\.": "", "nowhere": "x"},
        ConfigurationError,
        "'nowhere' matches no name; the names are 'policy.*weight_update.get_model_metadata",
    ),
    "an expression that an earlier one left nothing": (
        {r"^policy\.": "", r"policy": "x"},
        ConfigurationError,
        "'policy' matches no name",
    ),
    "two weights of one name": (
        {r"\d": "0"},
        WeightMismatchError,
        "'policy.layers.0.q' and 'policy.layers.1.q' the same name, 'policy.layers.0.q'",
    ),
    "a name that another weight keeps": (
        {"head": "embed"},
        WeightMismatchError,
        "'policy.embed' and 'policy.head' the same name",
    ),
    "an empty name by a table": ({r".*head": ""}, WeightMismatchError, "'policy.head' an empty"),
    "an empty name by a function": (lambda _: "", WeightMismatchError, "an empty name"),
    "no text": (lambda _: 3, WeightMismatchError, "'policy.embed' 3, which is no text"),
    "bytes": (str.encode, WeightMismatchError, "no text"),
    "a function that fails": (raises, ConfigurationError, "failed on 'policy.embed'.*KeyError"),
}


@pytest.mark.parametrize(("name_map", "error", "words"), REFUSED.values(), ids=list(REFUSED))
def test_a_map_that_does_not_fit_the_names_is_refused_with_the_names(
    name_map: Any, error: type[WeightUpdateError], words: str
) -> None:
    with pytest.raises(error, match=words) as failure:
        names_by(name_map)

    assert type(failure.value) is error
    assert failure.value.phase == "plan"


@pytest.mark.parametrize("name_map", [None, str.lower, {"a": "b"}, {r"(\d)": r"x\1"}], ids=repr)
def test_what_can_be_a_map_passes_the_check(name_map: Any) -> None:
    check_name_map(name_map)


@pytest.mark.parametrize(
    ("name_map", "words"),
    [
        ("policy", "must be a function, or a table"),
        ([("a", "b")], "must be a function, or a table"),
        ({}, "renames nothing"),
        ({"(": ""}, r"'\(' is no regular expression"),
        ({"a": r"\1"}, "cannot replace 'a'"),
        ({"a": r"\g<x>"}, "cannot replace 'a'"),
        ({"a": None}, "'a': None must be text both"),
        ({1: "a"}, "1: 'a' must be text both"),
    ],
    ids=repr,
)
def test_what_cannot_be_a_map_is_refused_before_there_are_names(name_map: Any, words: str) -> None:
    with pytest.raises(ConfigurationError, match=words):
        check_name_map(name_map)
