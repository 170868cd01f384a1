"""The pipes between a collector and what counts in its workers, without workers."""

from __future__ import annotations

import multiprocessing
import pickle
from collections.abc import Iterator
from concurrent.futures import Future
from multiprocessing.connection import Connection

import pytest

from weight_update.collectors.worker_counting import Count, WorkerEnds, Workers, count_at, pipes

PATIENCE = 60.0

Pair = tuple[Workers, WorkerEnds]

_serving: list[Future[None]] = []


def serve(end: Connection, count: Count) -> Future[None]:
    """Counts at an end, which its thread closes; nobody else may close it at the same time."""
    _serving.append(count_at(end, count))
    return _serving[-1]


@pytest.fixture
def pair() -> Iterator[Pair]:
    """Both ends of pipes to two workers."""
    workers, ends = pipes(multiprocessing, 2, "Collector")
    yield workers, ends
    workers.close()
    while _serving:
        _serving.pop().result(PATIENCE)
    ends.close()


def test_all_workers_count_before_the_parent_goes_on(pair: Pair) -> None:
    workers, ends = pair
    counted: list[int] = []

    def count(version: int) -> list[str]:
        counted.append(version)
        return []

    for end in ends.all:
        serve(end, count)
    assert workers.count(3, PATIENCE) == []
    assert counted == [3, 3]


def test_what_goes_wrong_in_a_worker_is_told_in_its_words(pair: Pair) -> None:
    workers, ends = pair

    def fail(_: int) -> list[str]:
        raise ValueError("no tracker")

    serve(ends.all[0], fail)
    serve(ends.all[1], lambda _: ["is tired"])
    assert workers.count(1, PATIENCE) == [
        "worker 0 of Collector failed (ValueError: no tracker)",
        "worker 1 of Collector is tired",
    ]


def test_a_dead_worker_is_told_of_once_and_not_waited_for(pair: Pair) -> None:
    workers, ends = pair
    alive, dead = ends.all
    serve(alive, lambda _: [])
    dead.close()
    assert workers.count(1, PATIENCE) == ["worker 1 of Collector is gone"]
    assert workers.count(2, PATIENCE) == []


def test_a_worker_that_dies_while_it_counts_is_not_waited_for(pair: Pair) -> None:
    workers, ends = pair
    alive, dying = ends.all
    serve(alive, lambda _: [])

    def die(_: int) -> list[str]:
        dying.close()
        raise OSError("it is killed")

    serve(dying, die)
    assert workers.count(1, PATIENCE) == ["worker 1 of Collector is gone"]


def test_a_late_answer_is_not_taken_for_the_next_one(pair: Pair) -> None:
    workers, ends = pair
    quick, slow = ends.all
    serve(quick, lambda _: [])
    assert "worker 1 of Collector did not count version 1 within 0 s" in workers.count(1, 0.05)
    counted: list[int] = []

    def count(version: int) -> list[str]:
        counted.append(version)
        return [f"counted {version}"]

    serve(slow, count)  # it has the first version to answer still
    assert workers.count(2, PATIENCE) == ["worker 1 of Collector counted 2"]
    assert counted == [1, 2]


def test_a_worker_takes_its_own_end_and_closes_the_others(pair: Pair) -> None:
    workers, ends = pair
    taken = ends.take(1)
    assert taken is not None
    serve(taken, lambda _: [])
    assert workers.count(1, PATIENCE) == ["worker 0 of Collector is gone"]


def test_the_thread_of_a_worker_ends_with_the_parents_end(pair: Pair) -> None:
    workers, ends = pair
    ended = serve(ends.all[0], lambda _: [])
    workers.count(1, 0.05)
    assert not ended.done()
    workers.close()
    ended.result(PATIENCE)


def test_ends_that_are_pickled_for_no_worker_are_left_out(pair: Pair) -> None:
    _, ends = pair
    assert pickle.loads(pickle.dumps(ends)).all == []
    assert len(ends.all) == 2
