"""A shape is called wrong only where an engine cannot load it."""

from __future__ import annotations

import pytest

from weight_update.weights.shapes import misshapen


@pytest.mark.parametrize(
    ("ours", "theirs", "trims", "wrong"),
    [
        ((4, 8), (4, 8), False, False),
        ((4, 6), (4, 8), False, True),
        ((8, 4), (4, 8), False, True),  # transposed
        ((4, 3, 2, 2), (4, 12), False, False),  # a flattened kernel
        ((4, 1, 3), (4, 4), False, True),
        ((), (1,), False, False),
        ((9, 4), (8, 4), False, True),
        ((9, 4), (8, 4), True, False),
        ((7, 4), (8, 4), True, True),
        ((9, 5), (8, 4), True, True),
    ],
)
def test_shapes_of_one_name(
    ours: tuple[int, ...], theirs: tuple[int, ...], trims: bool, wrong: bool
) -> None:
    assert any(misshapen({"a": ours}, {"a": theirs}, trims=trims)) is wrong


def test_names_that_only_one_has_tell_nothing() -> None:
    assert not list(misshapen({"a": (1,)}, {"b": (2,)}))
