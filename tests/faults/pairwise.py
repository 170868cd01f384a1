"""A small choice of rows in which every pair of values occurs (pure)."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

Row = dict[str, Any]
Pair = tuple[tuple[str, Any], tuple[str, Any]]


def pairs_of(row: Row) -> frozenset[Pair]:
    """All pairs of values of a row.

    Example:
        >>> len(pairs_of({"a": 1, "b": 2, "c": 3}))
        3
    """
    return frozenset(itertools.combinations(sorted(row.items(), key=lambda item: item[0]), 2))


def rows_of(factors: Mapping[str, Sequence[Any]], allowed: Callable[[Row], bool]) -> list[Row]:
    """The whole product, less what is not allowed."""
    rows = (
        dict(zip(factors, values, strict=True)) for values in itertools.product(*factors.values())
    )
    return [row for row in rows if allowed(row)]


def all_pairs(
    factors: Mapping[str, Sequence[Any]], allowed: Callable[[Row], bool] = lambda row: True
) -> list[Row]:
    """Few rows in which every pair of values occurs that occurs in any allowed row.

    Greedy: each time the row that brings most pairs that are missing yet; the first of equals,
    so the choice is the same every time.

    Args:
        factors: Values by factor; they must be hashable.
        allowed: Which rows make sense.

    Example:
        >>> rows = all_pairs({"a": [1, 2], "b": [1, 2], "c": [1, 2]})
        >>> len(rows), rows[0]
        (4, {'a': 1, 'b': 1, 'c': 1})
    """
    candidates = [(pairs_of(row), row) for row in rows_of(factors, allowed)]
    missing = frozenset[Pair]().union(*(pairs for pairs, _ in candidates))
    chosen = []
    while missing:
        pairs, row = max(candidates, key=lambda candidate: len(candidate[0] & missing))
        chosen.append(row)
        missing -= pairs
    return chosen
