"""How the ranks of a sharded trainer agree: threads for ranks, a dictionary between them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from weight_update.errors import (
    ConfigurationError,
    EngineRejected,
    UpdateTimeout,
    WeightMismatchError,
    WeightUpdateError,
)
from weight_update.report import EngineOutcome, EngineState, UpdateReport
from weight_update.update.crew import Crew
from weight_update.waiting import Deadline, spawn
from weight_update.weights.reading import read_in_turn
from weight_update.weights.specs import TensorSpec, Weight

CPU = torch.device("cpu")
RANKS = 3
PATIENCE = 30.0  # what no test waits for


class Board:
    """What all ranks see."""

    def __init__(self) -> None:
        self.messages: dict[str, Mapping[str, Any]] = {}
        self.changing = threading.Lock()

    def channel(self, rank: int) -> BoardChannel:
        return BoardChannel(self, rank)


@dataclass(eq=False)
class BoardChannel:
    board: Board
    rank: int
    ranks: int = RANKS

    @property
    def place(self) -> dict[str, Any]:
        return {"host": "here", "process": self.rank}

    def neighbour(self, place: Mapping[str, Any]) -> None:
        return None

    def post(self, key: str, message: Mapping[str, Any]) -> None:
        with self.board.changing:
            self.board.messages[key] = message

    def peek(self, key: str) -> dict[str, Any] | None:
        with self.board.changing:
            found = self.board.messages.get(key)
        return None if found is None else dict(found)

    def remove(self, key: str) -> bool:
        with self.board.changing:
            return self.board.messages.pop(key, None) is not None


class Collective:
    """A gather of all ranks: each waits in it until the others have come."""

    def __init__(self) -> None:
        self.barrier = threading.Barrier(RANKS)
        self.order: dict[int, list[str]] = {rank: [] for rank in range(RANKS)}

    def read(self, rank: int, name: str) -> torch.Tensor:
        self.barrier.wait(PATIENCE)
        self.order[rank].append(name)
        return torch.ones(2)


@dataclass
class Trainer:
    """Three ranks, and what each of them extracts."""

    board: Board = field(default_factory=Board)
    gather: Collective = field(default_factory=Collective)
    broken: dict[int, Callable[[], torch.Tensor]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.channels = [self.board.channel(rank) for rank in range(RANKS)]

    def weights(self, rank: int, names: Sequence[str] = "abcd") -> list[Weight]:
        def reader(name: str) -> Callable[[], torch.Tensor]:
            if name == "c" and rank in self.broken:
                return self.broken[rank]
            return lambda: self.gather.read(rank, name)

        plain = Weight(TensorSpec("plain", torch.float32, (1,)), CPU, lambda: torch.zeros(1))
        shards = [
            Weight(TensorSpec(name, torch.float32, (2,)), CPU, reader(name), collective=True)
            for name in names
        ]
        return [plain, *shards]

    def crew(self, rank: int, names: Sequence[str] = "abcd") -> Crew:
        crew = Crew.of(self.weights(rank, names), lambda: self.channels[rank])
        assert crew is not None
        return crew

    def run(
        self,
        update: Callable[[Crew], UpdateReport],
        *,
        ranks: Sequence[int] = range(RANKS),
        crews: Mapping[int, Crew] | None = None,
        seconds: float = PATIENCE,
    ) -> list[Future[UpdateReport]]:
        def one(rank: int) -> UpdateReport:
            crew = (crews or {}).get(rank) or self.crew(rank)
            return crew.run(lambda: update(crew), Deadline(seconds))

        return [spawn(one, rank) for rank in ranks]


def report(version: int = 1) -> UpdateReport:
    outcome = EngineOutcome("http://a:1", EngineState.NEW, str(version), paused=False)
    return UpdateReport(version, 8, 4, 2, {"total": 0.25}, {outcome.url: outcome}, warnings=("w",))


def in_buckets(crew: Crew, size: int = 2, *, backwards: bool = False) -> UpdateReport:
    """Reads everything as an update does."""
    weights = crew.lead()[:: -1 if backwards else 1]
    for first in range(0, len(weights), size):
        assert len(list(read_in_turn(weights[first : first + size]))) > 0
    return report()


def errors_of(runs: Sequence[Future[UpdateReport]]) -> list[WeightUpdateError]:
    found = [run.exception(PATIENCE) for run in runs]
    assert all(isinstance(error, WeightUpdateError) for error in found), found
    return found  # type: ignore[return-value]


def same(errors: Sequence[WeightUpdateError]) -> WeightUpdateError:
    """The error that all ranks raise."""
    first = errors[0]
    told = [(type(e), str(e), e.phase, e.engine, e.engines, e.report) for e in errors]
    assert told == [told[0]] * len(told)
    return first


def test_weights_that_one_rank_reads_alone_need_no_crew() -> None:
    plain = Weight(TensorSpec("w", torch.float32, (1,)), CPU, lambda: torch.zeros(1))
    assert Crew.of([plain], lambda: pytest.fail("nobody is asked")) is None
    shard = Weight(plain.spec, CPU, plain.read, collective=True)
    assert Crew.of([shard], lambda: None) is None


def test_the_lowest_rank_that_holds_a_part_leads() -> None:
    weight = Weight(
        TensorSpec("w", torch.float32, (1,)), CPU, lambda: torch.zeros(1), None, True, None, (1, 2)
    )
    channels = Trainer().channels
    crews = [Crew.of([weight], lambda rank=rank: channels[rank]) for rank in (1, 2)]
    assert [crew is not None and crew.leads for crew in crews] == [True, False]


def test_a_rank_that_holds_no_part_is_told_so() -> None:
    weight = Weight(
        TensorSpec("w", torch.float32, (1,)), CPU, lambda: torch.zeros(1), None, True, None, (1, 2)
    )
    with pytest.raises(ConfigurationError, match=r"rank 0 holds no part.*ranks 1, 2"):
        Crew.of([weight], lambda: Trainer().channels[0])


@pytest.mark.parametrize("backwards", [False, True])
def test_all_ranks_read_in_the_order_of_the_leader_and_get_its_report(backwards: bool) -> None:
    trainer = Trainer()
    runs = trainer.run(lambda crew: in_buckets(crew, backwards=backwards))
    assert [run.result(PATIENCE) for run in runs] == [report()] * RANKS
    order = list("abcd")[:: -1 if backwards else 1]
    assert trainer.gather.order == dict.fromkeys(range(RANKS), order)


def test_only_the_leader_talks_to_the_engines() -> None:
    asked: list[bool] = []

    def update(crew: Crew) -> UpdateReport:
        asked.append(crew.leads)
        return in_buckets(crew)

    for run in Trainer().run(update):
        run.result(PATIENCE)
    assert asked == [True]


def test_a_reader_that_stops_halfway_leaves_nobody_waiting() -> None:
    trainer = Trainer()

    def update(crew: Crew) -> UpdateReport:
        reading = read_in_turn(crew.lead())
        next(reading), next(reading)
        reading.close()
        raise EngineRejected("no", engine="http://a:1", phase="transfer")

    error = same(errors_of(trainer.run(update)))
    assert type(error) is EngineRejected
    assert trainer.gather.order == {key: list("abcd") for key in range(RANKS)}


def test_what_the_leader_raises_is_raised_on_all_ranks_with_its_report() -> None:
    def update(crew: Crew) -> UpdateReport:
        crew.lead()
        error = EngineRejected("full", engine="http://a:1", phase="transfer", remedy="wait")
        error.report = report(7)
        raise error

    error = same(errors_of(Trainer().run(update)))
    assert error.report == report(7)


def test_an_error_before_the_weights_are_asked_for_reaches_all_ranks() -> None:
    def update(crew: Crew) -> UpdateReport:
        raise ConfigurationError("the engine cannot", phase="connect")

    assert "the engine cannot" in str(same(errors_of(Trainer().run(update))))


@pytest.mark.parametrize("rank", range(RANKS))
def test_a_rank_that_cannot_extract_ends_it_on_all_before_any_engine_is_asked(rank: int) -> None:
    trainer = Trainer()
    trouble = WeightMismatchError("no such weight", phase="plan")
    crew = Crew.without_weights(range(RANKS), trouble, lambda: trainer.channels[rank])
    assert crew is not None

    def update(crew: Crew) -> UpdateReport:
        crew.lead()
        pytest.fail("the engines were asked")

    error = same(errors_of(trainer.run(update, crews={rank: crew})))
    assert isinstance(error, WeightMismatchError)
    assert "no such weight" in str(error)


@pytest.mark.parametrize("names", ["abce", "abc", "abcde"])
def test_ranks_with_different_weights_are_refused(names: str) -> None:
    trainer = Trainer()
    runs = trainer.run(in_buckets, crews={2: trainer.crew(2, names)})
    error = same(errors_of(runs))
    assert isinstance(error, WeightMismatchError)
    assert "rank 2 has other weights than rank 0" in str(error)
    assert trainer.gather.order == {0: [], 1: [], 2: []}


@pytest.mark.parametrize("ranks", [(0, 1), (1, 2), (2,), (0,)])
def test_ranks_that_never_come_are_a_time_out_on_all_that_did(
    ranks: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("weight_update.update.crew.messages.GRACE_SECONDS", 0.2)
    errors = errors_of(Trainer().run(in_buckets, ranks=ranks, seconds=1.0))
    missing = "2" if 0 in ranks and 1 in ranks else "1, 2" if 0 in ranks else "0"
    for error in errors:
        assert isinstance(error, UpdateTimeout)
        assert f"rank(s) {missing} did not call" in str(error)


def with_engines(*engines: tuple[str, ...]) -> list[Future[UpdateReport]]:
    """An update of ranks that each mean to update some engines."""
    trainer = Trainer()

    def one(rank: int) -> UpdateReport:
        crew = trainer.crew(rank)
        return crew.run(lambda: in_buckets(crew), Deadline(PATIENCE), engines[rank])

    return [spawn(one, rank) for rank in range(RANKS)]


def test_ranks_that_update_other_engines_are_refused_though_their_weights_look_alike() -> None:
    error = same(errors_of(with_engines(("http://a",), ("http://b",), ("http://a",))))
    assert isinstance(error, ConfigurationError)
    assert "rank 1 updates http://b, and rank 0 http://a" in str(error)


def test_an_engine_that_one_rank_alone_has_added_or_removed_is_no_objection() -> None:
    runs = with_engines(("http://a", "http://b"), ("http://a",), ("http://a", "http://c"))
    assert [run.result(PATIENCE) for run in runs] == [report()] * RANKS


def test_after_a_rank_came_too_late_all_meet_again() -> None:
    trainer = Trainer()
    errors_of(trainer.run(in_buckets, ranks=(0, 1), seconds=0.1))
    runs = trainer.run(in_buckets)
    assert [run.result(PATIENCE) for run in runs] == [report()] * RANKS


def boom() -> torch.Tensor:
    raise RuntimeError("boom")


def watched(crew: Crew) -> UpdateReport:
    """Reads in a thread, and watches the others meanwhile, as the library's reader does."""
    weights = crew.lead()
    reading = spawn(lambda: list(read_in_turn(weights)))
    deadline = Deadline(PATIENCE)
    while not reading.done():
        crew.check()
        assert not deadline.expired()
        deadline.sleep(0.002)
    reading.result()
    return report()


def test_a_read_that_fails_on_one_rank_fails_on_all_though_the_others_are_stuck_in_it() -> None:
    trainer = Trainer(broken={2: boom})
    error = same(errors_of(trainer.run(watched)))
    assert str(error) == "transfer: rank 2: RuntimeError: boom"


def test_the_rank_whose_read_failed_shows_where() -> None:
    trainer = Trainer(broken={2: boom})
    *_, error = errors_of(trainer.run(watched))
    assert isinstance(error.__cause__, RuntimeError)


def test_an_update_does_not_begin_while_a_gather_of_the_last_one_is_stuck() -> None:
    trainer = Trainer(broken={2: boom})
    errors_of(trainer.run(watched))
    trainer.broken.clear()
    error = same(errors_of(trainer.run(watched, seconds=4.0)))
    assert isinstance(error, UpdateTimeout)
    assert "the training group is stuck" in str(error)


def test_once_the_stuck_gather_has_ended_an_update_works() -> None:
    trainer = Trainer(broken={2: boom})
    errors_of(trainer.run(watched))
    trainer.broken.clear()
    trainer.gather.barrier.abort()  # as the time-out of the training group does
    trainer.gather.barrier.reset()
    runs = trainer.run(watched)
    assert [run.result(PATIENCE) for run in runs] == [report()] * RANKS


def test_a_weight_is_never_read_without_the_others() -> None:
    trainer = Trainer()

    def update(crew: Crew) -> UpdateReport:
        crew.lead()[1].read()
        return report()

    assert "is read without the other ranks" in str(same(errors_of(trainer.run(update))))


def test_messages_do_not_pile_up() -> None:
    trainer = Trainer()
    kept = []
    for _ in range(4):
        for run in trainer.run(in_buckets):
            run.result(PATIENCE)
        kept.append(len(trainer.board.messages))
    assert kept == [kept[0]] * 4


def test_rows_are_for_the_extraction_alone() -> None:
    trainer = Trainer()
    seen: list[Weight] = []

    def update(crew: Crew) -> UpdateReport:
        seen.extend(crew.lead())
        return in_buckets_of(seen)

    for run in trainer.run(update):
        run.result(PATIENCE)
    assert [weight.rows for weight in seen] == [None] * 5


def in_buckets_of(weights: Sequence[Weight]) -> UpdateReport:
    list(read_in_turn(weights))
    return report()
