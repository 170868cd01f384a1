"""The choice of rows for the table of real faults."""

from __future__ import annotations

import itertools
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from .pairwise import all_pairs, pairs_of, rows_of

FACTORS = st.lists(st.integers(2, 4), min_size=2, max_size=4).map(
    lambda sizes: {f"factor {i}": list(range(size)) for i, size in enumerate(sizes)}
)
BANNED = st.frozensets(st.integers(0, 200), max_size=60)


def sieve(factors: dict[str, list[int]], banned: frozenset[int]) -> Any:
    """Rows are banned by their place in the product."""
    whole = list(itertools.product(*factors.values()))
    return lambda row: whole.index(tuple(row.values())) not in banned


@given(FACTORS, BANNED)
def test_every_pair_of_an_allowed_row_occurs_and_no_row_is_banned(
    factors: dict[str, list[int]], banned: frozenset[int]
) -> None:
    allowed = sieve(factors, banned)
    chosen = all_pairs(factors, allowed)

    assert all(map(allowed, chosen))
    wanted = {pair for row in rows_of(factors, allowed) for pair in pairs_of(row)}
    assert {pair for row in chosen for pair in pairs_of(row)} == wanted


@given(FACTORS, BANNED)
def test_each_row_brings_a_pair_that_the_rows_before_it_lack(
    factors: dict[str, list[int]], banned: frozenset[int]
) -> None:
    seen: set[Any] = set()
    for row in all_pairs(factors, sieve(factors, banned)):
        assert pairs_of(row) - seen
        seen |= pairs_of(row)


@given(FACTORS)
def test_the_choice_is_far_smaller_than_the_product_and_the_same_every_time(
    factors: dict[str, list[int]],
) -> None:
    chosen = all_pairs(factors)

    assert chosen == all_pairs(factors)
    sizes = sorted(map(len, factors.values()))
    assert len(chosen) <= 2 * sizes[-1] * sizes[-2] + 2 * len(sizes)
