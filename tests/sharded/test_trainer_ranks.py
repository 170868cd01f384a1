"""Trainers whose ranks all join the group of an update, against two engines (``"node"``).

Each test looks at one thing that ``node_ranks.py`` did; the ranks are started once for all.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from .conftest import Results
from .test_ranks import same_error

Run = Callable[[str], Results]
TWO, THREE = "node of two", "node of three"
# Rank offset and world size that each engine was told, by the trainer's ranks in the group.
PLACES = {2: [[[2, 4]], [[3, 4]]], 3: [[[3, 5]], [[4, 5]]]}
NOBODY_JOINED = [[], []]


def each(told: dict[int, Any], part: str) -> dict[int, Any]:
    return {rank: of_rank[part] for rank, of_rank in told.items()}


def served(told: dict[int, Any]) -> bool:
    """Whether all ranks have the same report, and both engines the weights, bit for bit."""
    reports = [told[rank].get("report", told[rank].get("text")) for rank in sorted(told)]
    assert isinstance(reports[0], dict), reports[0]
    assert reports == [reports[0]] * len(reports)
    assert [outcome["state"] for outcome in reports[0]["engines"].values()] == ["new", "new"]
    return bool(told[0]["wrong"] == [[], []])


def groups(told: dict[int, Any]) -> set[str]:
    """Groups that the ranks hold which follow."""
    return {told[rank]["group"] for rank in told if rank}


@pytest.mark.parametrize(("suite", "ranks"), [(TWO, 2), (THREE, 3)])
@pytest.mark.parametrize(
    ("scenario", "update"), [("replicas", "first"), ("replicas", "second"), ("sharded", "63")]
)
def test_replicas_and_shards_reach_every_engine_bit_for_bit(
    suite: str, ranks: int, scenario: str, update: str, run_node_suite: Run
) -> None:
    told = each(run_node_suite(suite)[scenario], update)
    assert len(told) == ranks
    assert served(told)


@pytest.mark.parametrize(("suite", "ranks"), [(TWO, 2), (THREE, 3)])
def test_the_engines_ranks_begin_after_the_trainers(
    suite: str, ranks: int, run_node_suite: Run
) -> None:
    told = run_node_suite(suite)["replicas"]
    assert told[0]["first"]["joined"] == PLACES[ranks]
    assert told[0]["world"] == ranks + 2


@pytest.mark.parametrize(("suite", "others"), [(TWO, "1"), (THREE, "1, 2")])
def test_the_report_says_which_ranks_are_in_the_group(
    suite: str, others: str, run_node_suite: Run
) -> None:
    for told in each(run_node_suite(suite)["replicas"], "second").values():
        reasons = told["report"]["route"]["reasons"]
        assert reasons == [f"rank(s) {others} of the trainer are in the group too"]


@pytest.mark.parametrize("suite", [TWO, THREE])
def test_a_group_serves_the_next_update_on_all_ranks(suite: str, run_node_suite: Run) -> None:
    told = run_node_suite(suite)["replicas"]
    assert told[0]["second"]["joined"] == NOBODY_JOINED
    assert len(groups(each(told, "first")) | groups(each(told, "second"))) == 1


def test_tensors_that_travel_one_by_one_are_taken_one_by_one(run_node_suite: Run) -> None:
    told = run_node_suite(THREE)["tensor_by_tensor"]
    assert served(told)
    assert told[0]["report"]["buckets"] == 1


def test_messages_do_not_pile_up_in_the_trainers_store(run_node_suite: Run) -> None:
    told = run_node_suite(THREE)["sharded"]
    keys = [max(of_rank["keys"][i] for of_rank in told.values()) for i in range(3)]
    assert keys[1:] == keys[:-1]


def test_of_a_stream_the_leaders_is_read_and_nobody_elses(run_node_suite: Run) -> None:
    told = run_node_suite(THREE)["stream"]
    assert served(told)
    assert [told[rank]["read"] for rank in range(3)] == [told[0]["report"]["tensors"], 0, 0]


def test_ranks_that_connect_together_use_that_group(run_node_suite: Run) -> None:
    told = run_node_suite(THREE)["connected_first"]
    assert served(told)
    assert [told[rank]["connected"] for rank in range(3)] == [True] * 3
    assert told[0]["joined"] == NOBODY_JOINED


@pytest.mark.parametrize(
    ("scenario", "kind", "words"),
    [
        ("refused_bucket", "EngineRejected", "injected fault"),
        ("dead_wire", "UpdateTimeout", "no answer within"),
        ("failing_rank", "WeightUpdateError", "rank 2: RuntimeError: out of memory"),
    ],
)
def test_what_fails_in_the_transfer_is_the_same_error_on_all_ranks_and_ends_the_group_on_all(
    scenario: str, kind: str, words: str, run_node_suite: Run
) -> None:
    told = each(run_node_suite(THREE)[scenario], "first")
    error = same_error(told)
    assert (error["kind"], error["phase"]) == (kind, "transfer")
    assert words in error["text"]
    assert groups(told) == {""}
    assert max(of_rank["seconds"] for of_rank in told.values()) < 40.0  # nobody hangs


@pytest.mark.parametrize("scenario", ["refused_bucket", "dead_wire", "failing_rank", "late_rank"])
def test_the_next_update_heals_the_engines_in_a_group_of_all_ranks(
    scenario: str, run_node_suite: Run
) -> None:
    told = each(run_node_suite(THREE)[scenario], "second")
    assert served(told)
    assert told[0]["joined"] == PLACES[3]
    assert "" not in groups(told)


def test_the_rank_that_failed_shows_where(run_node_suite: Run) -> None:
    told = each(run_node_suite(THREE)["failing_rank"], "first")
    assert told[2]["cause"] == "RuntimeError('out of memory')"


def test_under_a_quorum_all_ranks_meet_anew_with_the_engines_that_are_left(
    run_node_suite: Run,
) -> None:
    told = each(run_node_suite(THREE)["quorum"], "first")
    reports = [told[rank]["report"] for rank in range(3)]
    assert reports == [reports[0]] * 3
    assert [o["state"] for o in reports[0]["engines"].values()] == ["mixed", "new"]
    assert told[0]["joined"][1][-1] == [3, 4]
    assert told[0]["wrong"][1] == []
    assert served(each(run_node_suite(THREE)["quorum"], "second"))


def test_a_rank_of_another_host_follows_and_does_not_join(run_node_suite: Run) -> None:
    told = run_node_suite(THREE)["another_host"]
    assert served(told)
    assert told[0]["joined"] == PLACES[2]
    assert told[1]["group"]
    assert told[2]["group"] == ""


def test_a_rank_that_does_not_join_is_named(run_node_suite: Run) -> None:
    error = same_error(each(run_node_suite(THREE)["late_rank"], "first"))
    assert (error["kind"], error["phase"]) == ("UpdateTimeout", "connect")
    assert "rank 2 of the trainer did not join the group" in error["text"]


def test_a_rank_that_has_left_meanwhile_has_all_meet_anew(run_node_suite: Run) -> None:
    told = run_node_suite(THREE)["forgotten_group"]
    second = each(told, "second")
    assert served(second)
    assert second[0]["joined"] == PLACES[3]
    assert groups(each(told, "first")).isdisjoint(groups(second))


def test_where_nothing_is_broadcast_all_ranks_follow_and_none_joins(run_node_suite: Run) -> None:
    told = run_node_suite(THREE)["by_disk"]
    assert served(told)
    assert told[0]["report"]["route"]["way"] == "disk"
    assert groups(told) == {""}


def test_updates_in_the_background_are_refused(run_node_suite: Run) -> None:
    for told in run_node_suite(THREE)["background"].values():
        assert told["error"]["kind"] == "ConfigurationError"
        assert "does not go with updates in the background" in told["text"]


def test_a_rank_that_is_killed_in_the_transfer_is_named_on_all_that_are_left(
    run_node_suite: Run,
) -> None:
    told = run_node_suite("killed rank")["killed_rank"]
    assert sorted(told) == [0, 2]
    error = same_error(told)
    assert error["phase"] == "transfer"
    assert "rank 1 of the trainer has ended" in error["text"]
    assert error["engine"] is None
    assert max(of_rank["seconds"] for of_rank in told.values()) < 30.0


def test_a_sender_of_a_single_rank_then_heals_the_engines(run_node_suite: Run) -> None:
    told = run_node_suite("killed rank")["killed_rank"][0]
    assert [o["state"] for o in told["healed"]["report"]["engines"].values()] == ["new", "new"]
    assert told["wrong"] == [[], []]


def test_a_leader_that_is_killed_hangs_nobody_and_its_group_is_given_up(
    run_node_suite: Run,
) -> None:
    told = run_node_suite("killed leader")["killed_leader"]
    assert sorted(told) == [1, 2]
    for of_rank in told.values():
        assert "the store of the trainer's process group does not answer" in of_rank["text"]
        assert of_rank["group"] == ""
