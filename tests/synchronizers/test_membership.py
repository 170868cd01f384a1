"""Membership: ranks without gaps, whoever is left; the group follows who is there."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weight_update.synchronizers import (
    CollectiveWeightSynchronizer,
    NoSurvivingShards,
    plan_refit_membership,
)

from .nemo import Journal, NemoCluster, NemoPolicy, NemoVLLM


@st.composite
def fleets(draw: st.DrawFn) -> tuple[int, int, int, set[int]]:
    """Shards, workers of each, ranks of the trainer, and who is left."""
    shards = draw(st.integers(1, 9))
    left = draw(st.sets(st.integers(0, shards - 1), min_size=1))
    return shards, draw(st.integers(1, 8)), draw(st.integers(1, 64)), left


@given(fleets())
def test_ranks_are_contiguous_in_the_order_of_the_shards(fleet: tuple[int, int, int, set[int]]):
    shards, workers, train, left = fleet
    plan = plan_refit_membership(
        surviving_shards=left,
        dp_size=shards,
        total_gen_workers=shards * workers,
        train_world_size=train,
    )
    ranks = [
        train + first + worker
        for first in plan.shard_prefixes.values()
        for worker in range(workers)
    ]
    assert ranks == list(range(train, plan.world_size))
    assert plan.surviving_shards == sorted(left)
    assert (plan.train_world_size, plan.workers_per_shard) == (train, workers)


@pytest.mark.parametrize(
    ("shards", "workers", "train", "left", "words"),
    [
        (3, 4, 1, [0], "do not divide evenly"),
        (2, 1, 1, [0], "do not divide evenly"),
        (2, 0, 1, [0], "do not divide evenly"),
        (0, 4, 1, [0], "dp_size=0"),
        (2, 4, 0, [0], "train_world_size=0"),
        (2, 4, 1, [0, 2], r"not \[2\]"),
        (2, 4, 1, [-1], r"not \[-1\]"),
    ],
)
def test_a_fleet_that_does_not_add_up_is_refused(
    shards: int, workers: int, train: int, left: list[int], words: str
):
    with pytest.raises(ValueError, match=words):
        plan_refit_membership(
            surviving_shards=left,
            dp_size=shards,
            total_gen_workers=workers,
            train_world_size=train,
        )


def test_nobody_left_is_an_error_of_its_own():
    with pytest.raises(NoSurvivingShards) as caught:
        plan_refit_membership(
            surviving_shards=[], dp_size=2, total_gen_workers=4, train_world_size=1
        )
    assert isinstance(caught.value, RuntimeError)
    assert not isinstance(caught.value, ValueError)


@given(st.lists(st.tuples(st.sets(st.integers(0, 2), max_size=2), st.booleans()), max_size=6))
def test_the_group_always_spans_who_is_there(steps: list[tuple[set[int], bool]]):
    journal = Journal()
    sync = CollectiveWeightSynchronizer(
        NemoPolicy(journal), NemoVLLM(journal, dp_size=3), NemoCluster(2), NemoCluster(6)
    )
    sync.init_communicator()
    built = {0, 1, 2}
    for absent, force in steps:
        wanted = {0, 1, 2} - absent
        assert sync.reconcile_communicator(absent, force) is (force or wanted != built)
        built = wanted
        assert journal.arguments["P.init"]["world_size"] == 2 + 2 * len(built)
        if sync.generation.membership is not None:
            assert set(sync.generation.membership.shard_prefixes) == built
