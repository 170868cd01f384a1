"""Trainers whose ranks share GPUs with engines' ranks: each packs for its neighbour (CPU memory).

Each test looks at one thing that ``colocated_ranks.py`` did; the ranks are started once for all.
A payload names the process whose memory it opens, so it can be seen whose an engine was given.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from transformers import LlamaForCausalLM

from weight_update.reference_engine import ReferenceEngine

from .conftest import Results, engine_model, suites_of
from .test_ranks import same_error
from .test_trainer_ranks import each, served

Run = Callable[[str], Results]
TWO = "two by two"


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    with (
        ReferenceEngine(engine_model(tied=False), wait=False) as first,
        ReferenceEngine(engine_model(tied=False), wait=False) as second,
        suites_of("colocated_ranks.py", tmp_path_factory, first.url, second.url) as run,
    ):
        yield run


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Any, list[int]]]:
    """What the ranks told, and what the engine then generates."""
    config = engine_model(tied=False).config
    config.vocab_size = config.intermediate_size = 64  # even, for two ranks
    with (
        ReferenceEngine(LlamaForCausalLM(config), tp=2) as engine,
        suites_of("colocated_ranks.py", tmp_path_factory, engine.url, engine.url) as run,
    ):
        told = run("wide engine")["wide"]
        yield told, engine.generate([3, 14, 15], max_new_tokens=8)["output_ids"]


def owners(told: dict[int, Any], engine: int) -> set[tuple[tuple[int, ...], ...]]:
    """Whose memory each rank of an engine was given, over all requests."""
    return {tuple(map(tuple, request)) for request in told[0]["owners"][engine]}


@pytest.mark.parametrize(
    ("scenario", "update"),
    [
        ("updates", "100"),
        ("updates", "101"),
        ("updates", "102"),
        ("tensor_by_tensor", None),
        ("cast", None),
        ("replicas", None),
        ("stream", None),
        ("synchronizer", None),
        ("crossed", None),
        ("small_buffer", None),
    ],
)
def test_every_engine_holds_the_whole_model_bit_for_bit(
    scenario: str, update: str | None, run: Run
) -> None:
    told = run(TWO)[scenario]
    assert served(told if update is None else each(told, update))


@pytest.mark.parametrize(
    "scenario", ["updates", "tensor_by_tensor", "cast", "replicas", "synchronizer"]
)
def test_each_engine_opens_the_memory_of_the_rank_beside_it(scenario: str, run: Run) -> None:
    told = run(TWO)[scenario]
    told = each(told, "100") if scenario == "updates" else told
    assert owners(told, 0) == {((0,),)}
    assert owners(told, 1) == {((1,),)}
    assert "rank(s) 1 of the trainer share memory" in told[0]["report"]["route"]["reasons"][0]


def test_where_engines_are_placed_otherwise_their_offsets_say_so(run: Run) -> None:
    told = run(TWO)["crossed"]
    assert owners(told, 0) == {((1,),)}
    assert owners(told, 1) == {((0,),)}


def test_each_rank_of_an_engine_opens_the_memory_of_the_rank_beside_it(
    wide: tuple[Any, list[int]],
) -> None:
    told, generated = wide
    assert owners(told, 0) == {((0,), (1,))}
    assert generated == told[0]["tokens"]
    assert told[0]["report"] == told[2]["report"]  # which reads along, and packs nothing


def test_what_others_cannot_plan_is_opened_where_the_leader_packed_it(run: Run) -> None:
    told = run(TWO)["stream"]
    assert told[0]["owners"][1][-1] == [[0]]


def test_the_leaders_free_memory_decides_how_large_buckets_are(run: Run) -> None:
    told = run(TWO)["small_buffer"]
    assert told[0]["report"]["buckets"] > run(TWO)["synchronizer"][0]["report"]["buckets"]


def test_nothing_piles_up_in_the_store_nor_in_memory(run: Run) -> None:
    for told in run(TWO)["updates"].values():
        assert len(set(told["keys"])) == 1
        assert [len(files) for files in told["files"]] == [2, 2, 2]
        assert told["files"][0] == told["files"][2]


@pytest.mark.parametrize(
    ("scenario", "kind", "words"),
    [
        ("other_options", "WeightMismatchError", "rank 1: bucket 0 has other weights here"),
        ("no_room", "ConfigurationError", "rank 1: 35840 bytes of buffers do not fit"),
    ],
)
def test_what_a_rank_cannot_pack_is_known_before_any_weight_moves(
    scenario: str, kind: str, words: str, run: Run
) -> None:
    told = run(TWO)[scenario]
    error = same_error(told if scenario == "other_options" else each(told, "first"))
    assert error["kind"] == kind
    assert words in error["text"]
    assert {e["state"] for e in error["report"]["engines"].values()} == {"old"}


@pytest.mark.parametrize(
    ("scenario", "kind", "words"),
    [
        ("failing_pack", "ConfigurationError", "rank 1: out of memory"),
        ("refused_bucket", "EngineRejected", "injected fault"),
    ],
)
def test_what_fails_in_the_transfer_is_the_same_error_on_all_ranks(
    scenario: str, kind: str, words: str, run: Run
) -> None:
    error = same_error(each(run(TWO)[scenario], "first"))
    assert (error["kind"], error["phase"]) == (kind, "transfer")
    assert words in error["text"]
    assert {e["state"] for e in error["report"]["engines"].values()} == {"mixed"}


@pytest.mark.parametrize("scenario", ["no_room", "failing_pack", "refused_bucket"])
def test_no_rank_is_left_in_a_gather_and_the_next_update_heals(scenario: str, run: Run) -> None:
    assert served(each(run(TWO)[scenario], "second"))


def test_no_engine_takes_memory_back_before_every_rank_has_made_room(run: Run) -> None:
    told = run(TWO)["making_room"]
    assert told[1]["early"] == [False]
    assert told[0]["report"] == told[1]["report"]


@pytest.mark.parametrize(
    ("phase", "rank", "updated"),
    [
        ("offload_before_refit", 1, False),
        ("offload_before_refit", 0, False),
        ("prepare_for_generation", 0, False),
        ("offload_after_refit", 1, True),
    ],
)
def test_a_phase_that_fails_on_one_rank_ends_the_sync_alike_on_all(
    phase: str, rank: int, updated: bool, run: Run
) -> None:
    told = each(run(TWO)["failing_phases"], f"{phase} {rank}")
    assert all("no memory" in of_rank["text"] for of_rank in told.values())
    assert [of_rank["stale"] for of_rank in told.values()] == [True, True]
    assert told[0]["updated"] is updated
    assert served(each(run(TWO)["failing_phases"], "healed"))


def test_nobody_waits_for_a_rank_that_is_interrupted_in_a_phase(run: Run) -> None:
    told = run(TWO)["interrupted_phase"]
    assert told[1] == {"interrupted": True}
    assert "rank 1: it was interrupted by KeyboardInterrupt" in told[0]["text"]


def test_a_rank_that_is_killed_is_named_and_a_sender_of_one_rank_heals(run: Run) -> None:
    told = run("killed rank")["killed_rank"]
    assert sorted(told) == [0], told
    error = told[0]["error"]
    assert error["phase"] == "transfer"
    assert "rank 1 of the trainer has ended" in told[0]["text"]
    assert {e["state"] for e in error["report"]["engines"].values()} <= {"mixed", "old"}
    assert [e["state"] for e in told[0]["healed"]["report"]["engines"].values()] == ["new"] * 2
    assert told[0]["wrong"] == [[], []]


def test_a_leader_that_is_killed_hangs_nobody(run: Run) -> None:
    told = run("killed leader")["killed_leader"]
    assert sorted(told) == [1], told
    assert "the store of the trainer's process group does not answer" in told[1]["text"]
