"""Sharded trainers in processes of their own, against engines (C06, C21, C33, C43).

Each test looks at one thing that ``ranks.py`` did; the ranks are started once for all.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest

from .conftest import Results

LAYOUTS = {
    "fsdp2 on three ranks": 3,
    "fsdp2, not resharded": 4,
    "fsdp2 in two replicas": 4,
    "fsdp2 beside plain parameters": 4,
    "tensor parallel": 2,
    "tensor parallel and fsdp2": 4,
    "fsdp1 with flat parameters": 2,
    "fsdp1 with original parameters": 2,
    "fsdp1 with a mesh": 4,
    "fsdp1 in two replicas": 4,
}


@pytest.fixture(scope="module")
def whole(run_suite: Callable[[str], Results]) -> Results:
    return run_suite("whole")


def reports(told: dict[int, Any]) -> list[Any]:
    """Of all ranks, or what a rank raised instead."""
    return [told[rank].get("report", told[rank].get("text")) for rank in sorted(told)]


def all_new(told: dict[int, Any]) -> bool:
    """Whether every rank has the same report, of an engine that serves the new weights."""
    found = reports(told)
    assert isinstance(found[0], dict), found[0]
    assert found == [found[0]] * len(found)
    return [outcome["state"] for outcome in found[0]["engines"].values()] == ["new"]


def same_error(told: dict[int, Any]) -> dict[str, Any]:
    """The error that every rank raised."""
    errors = [(each.get("error"), each.get("text")) for _, each in sorted(told.items())]
    assert errors[0][0] is not None, told
    assert errors == [errors[0]] * len(errors)
    return {**errors[0][0], "text": errors[0][1]}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_c06_the_engine_holds_the_whole_model_bit_for_bit(layout: str, whole: Results) -> None:
    told = {rank: each[layout] for rank, each in whole["values"].items() if layout in each}
    assert len(told) == LAYOUTS[layout]
    assert all_new(told)
    assert told[0]["wrong"] == []


@pytest.mark.parametrize("layout", LAYOUTS)
def test_c43_names_are_the_bare_models_once_each_and_flat_parameters_are_never_sent(
    layout: str, whole: Results
) -> None:
    names = [each[layout]["names"] for each in whole["values"].values() if layout in each]
    assert names == [names[0]] * len(names)
    assert len(set(names[0])) == len(names[0]) == whole["values"][0][layout]["report"]["tensors"]
    assert not [name for name in names[0] if "_flat" in name or "_fsdp" in name]


def test_tied_embeddings_travel_once(whole: Results) -> None:
    assert all_new(whole["tied"])
    assert whole["tied"][0]["wrong"] == []
    untied = whole["values"][0]["fsdp2 on three ranks"]["report"]["tensors"]
    assert whole["tied"][0]["report"]["tensors"] == untied - 1


def test_adapters_on_shards_are_merged(whole: Results) -> None:
    assert all_new(whole["adapters"])
    assert whole["adapters"][0]["wrong"] == []


def test_c06_every_rank_takes_part_in_as_many_collectives(whole: Results) -> None:
    counts = [each["collectives"] for each in whole["several_updates"].values()]
    assert counts == [counts[0]] * 4
    assert len(set(counts[0])) == 1


def test_versions_go_up_alike_on_all_ranks(whole: Results) -> None:
    first, *others = (each["versions"] for each in whole["several_updates"].values())
    assert [second - first_ for first_, second in itertools.pairwise(first)] == [1, 1]
    assert others == [first] * 3
    assert {each["sender"] for each in whole["several_updates"].values()} == {first[-1]}


def test_the_trainers_store_does_not_grow_from_update_to_update(whole: Results) -> None:
    keys = [max(each["keys"][i] for each in whole["several_updates"].values()) for i in range(3)]
    assert keys[1:] == keys[:-1]


def test_c06_a_bucket_that_is_refused_is_the_same_error_on_all_ranks(whole: Results) -> None:
    told = {rank: each["first"] for rank, each in whole["refused_bucket"].items()}
    error = same_error(told)
    assert error["kind"] == "EngineRejected"
    assert error["phase"] == "transfer"
    assert "injected fault" in error["text"]
    assert [o["state"] for o in error["report"]["engines"].values()] == ["mixed"]
    assert max(each["seconds"] for each in told.values()) < 30.0  # nobody hangs


def test_the_next_update_heals_the_engine(whole: Results) -> None:
    assert all_new({rank: each["second"] for rank, each in whole["refused_bucket"].items()})
    assert whole["refused_bucket"][0]["wrong"] == []


def test_c06_a_slow_engine_runs_nobody_into_the_training_groups_time_out(
    whole: Results,
) -> None:
    told = whole["slow_engine"]
    assert all_new(told)
    assert told[0]["wrong"] == []
    assert min(each["seconds"] for each in told.values()) > told[0]["limit"]


def test_a_rank_that_never_calls_is_a_time_out_on_all_that_did(whole: Results) -> None:
    told = {rank: each["first"] for rank, each in whole["absent_rank"].items() if rank != 2}
    error = same_error(told)
    assert error["kind"] == "UpdateTimeout"
    assert error["phase"] == "plan"
    assert "rank(s) 2 did not call update_weights()" in error["text"]


def test_once_it_calls_the_update_works(whole: Results) -> None:
    assert all_new({rank: each["second"] for rank, each in whole["absent_rank"].items()})
    assert whole["absent_rank"][0]["wrong"] == []


def test_c43_an_emptied_parameter_on_one_rank_ends_it_on_all(
    whole: Results,
) -> None:
    error = same_error(whole["emptied_parameter"])
    assert error["kind"] == "ConfigurationError"
    assert "rank 1: 1 parameter(s) are empty here, 'taken' first" in error["text"]
    assert "/pause_generation" not in whole["emptied_parameter"][0]["asked"]


def test_ranks_with_different_weights_are_refused(whole: Results) -> None:
    error = same_error(whole["other_weights"])
    assert error["kind"] == "WeightMismatchError"
    assert "rank 2 has other weights than rank 0" in error["text"]


def test_ranks_that_call_other_senders_are_refused_though_the_models_look_alike(
    whole: Results,
) -> None:
    error = same_error(whole["crossed_senders"])
    assert error["kind"] == "ConfigurationError"
    assert "rank 1 updates http" in error["text"]


def test_a_rank_outside_the_mesh_is_told_that_it_holds_no_part(whole: Results) -> None:
    assert "rank 3 holds no part of these weights" in whole["outsider"][3]["text"]


def test_c21_whole_values_never_pile_up(whole: Results) -> None:
    """A bucket's at most on the rank that packs; one at a time on the others."""
    told = whole["memory"]
    assert all_new(told)
    bucket, largest = 20_000, told[0]["largest"]
    assert told[0]["model"] > 3 * (bucket + largest)
    assert told[0]["peak"] <= bucket + largest
    assert [told[rank]["peak"] for rank in (1, 2, 3)] == [largest] * 3


def test_c33_nothing_is_split_off_a_default_group_that_is_bound_to_a_device(whole: Results) -> None:
    told = whole["bound_default_group"]
    assert all_new(told)
    assert told[0]["wrong"] == []
    assert [(each["made"], each["bound"]) for each in told.values()] == [([], "cpu:0")] * 4


@pytest.mark.parametrize("rank", range(4))
def test_rows_of_a_shard_are_those_of_the_whole(rank: int, whole: Results) -> None:
    told = whole["rows"][rank]
    assert {places for places, wrong in told.items() if wrong is None} == {
        "[Shard(dim=0), Shard(dim=0)]",
        "[Shard(dim=0), Shard(dim=1)]",
    }
    assert [wrong for wrong in told.values() if wrong] == []


def test_only_the_owners_of_rows_send_them(whole: Results) -> None:
    assert [whole["rows_cost"][rank] for rank in range(4)] == [
        {"of one owner": 1, "of three": 3}
    ] * 4


def test_c06_a_read_that_fails_on_one_rank_is_the_same_error_on_all(
    run_suite: Callable[[str], Results],
) -> None:
    told = run_suite("raising")["raising_read"]
    firsts = {rank: each["first"] for rank, each in told.items()}
    error = same_error(firsts)
    assert "rank 2: RuntimeError: boom" in error["text"]
    assert error["phase"] == "transfer"
    assert firsts[2]["cause"] == "RuntimeError('boom')"
    assert max(each["seconds"] for each in firsts.values()) < 30.0


def test_after_that_the_training_group_is_broken_and_the_next_update_says_so_on_all_ranks(
    run_suite: Callable[[str], Results],
) -> None:
    """Gloo closes the connections of a gather that timed out: there is nothing to heal."""
    told = run_suite("raising")["raising_read"]
    error = same_error({rank: each["second"] for rank, each in told.items()})
    assert error["phase"] in ("plan", "transfer")


def test_a_rank_that_is_killed_in_its_read_hangs_nobody(
    run_suite: Callable[[str], Results],
) -> None:
    told = run_suite("killed")["killed_reader"]
    assert sorted(told) == [0, 1]
    same_error(told)
    assert max(each["seconds"] for each in told.values()) < 30.0


def test_a_leader_that_is_killed_hangs_nobody(run_suite: Callable[[str], Results]) -> None:
    told = run_suite("leaderless")["killed_leader"]
    assert sorted(told) == [1, 2]
    for each in told.values():
        assert "the store of the trainer's process group does not answer" in each["text"]
