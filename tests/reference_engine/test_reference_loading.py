"""The engine loads what has arrived while the next tensors arrive, and nobody sees half of it."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from weight_update.reference_engine.loading import Buffers, Load, Loader
from weight_update.reference_engine.shards import Shard
from weight_update.reference_engine.weights import Arrival, Weights

CPU = torch.device("cpu")
PATIENCE = 20.0


class Held:
    """Something that is written when it is let."""

    def __init__(self) -> None:
        self.let = threading.Event()
        self.written = False

    def __call__(self) -> None:
        assert self.let.wait(PATIENCE)
        self.written = True


@pytest.fixture
def held() -> Iterator[Held]:
    one = Held()
    yield one
    one.let.set()


def test_who_has_something_written_does_not_wait_for_it(held: Held) -> None:
    Loader(CPU).start(held)

    assert not held.written


def test_who_finishes_waits_for_all_that_is_written(held: Held) -> None:
    loader, late = Loader(CPU), Held()
    loader.start(held)
    loader.start(late)
    late.let.set()
    threading.Timer(0.05, held.let.set).start()

    loader.finish()

    assert held.written
    assert late.written


def test_one_thing_is_written_after_the_other(held: Held) -> None:
    loader, order = Loader(CPU), []
    loader.start(held)
    second = loader.start(lambda: order.append(held.written))
    held.let.set()

    second.wait()

    assert order == [True]


def test_what_goes_wrong_is_told_to_who_finishes() -> None:
    loader = Loader(CPU)
    loader.start(lambda: [].remove(1))

    with pytest.raises(ValueError, match="not in list"):
        loader.finish()


def test_nothing_is_waited_for_where_nothing_is_written() -> None:
    Loader(CPU).finish()


def test_two_buffers_take_turns_and_are_kept() -> None:
    buffers = Buffers(CPU)
    done = Load(lambda: None, lambda: None)
    places = []
    for _ in range(4):
        places.append(buffers.take(64).data_ptr())
        buffers.read_by(done)

    assert places[:2] == places[2:]
    assert places[0] != places[1]


def test_a_buffer_that_nothing_reads_is_taken_again() -> None:
    """One request after the other that fails costs one buffer, and not two."""
    buffers = Buffers(CPU)

    assert buffers.take(64).data_ptr() == buffers.take(64).data_ptr()


def test_a_buffer_is_not_written_to_before_it_was_read() -> None:
    buffers, asked = Buffers(CPU), []
    for turn in range(3):
        buffers.take(8)
        buffers.read_by(Load(lambda turn=turn: asked.append(turn), lambda: None))

    assert asked == [0]  # the third set goes where the first one was


class Linear(torch.nn.Linear):
    config: Any = type("Config", (), {"tie_word_embeddings": False})


@pytest.fixture
def weights() -> Weights:
    model = torch.nn.Module()
    model.add_module("l", torch.nn.Linear(2, 3))
    model.config = Linear.config
    return Weights(model, {"l.weight": [3, 2], "l.bias": [3]}, Shard())


ROW = torch.zeros(6)


@pytest.mark.parametrize(
    ("arrivals", "fit"),
    [
        ([("l.weight", [3, 2], ROW), ("l.bias", [3], ROW[:3])], True),
        ([("no.such", [6], ROW)], True),  # it is skipped
        ([("l.weight", [2, 3], ROW)], False),
        ([("l.weight", [3, 2], ROW.double())], False),
        ([], True),
    ],
    ids=["as they are", "unknown", "another shape", "another dtype", "none"],
)
def test_only_what_surely_loads_is_answered_before_it_is_loaded(
    weights: Weights, arrivals: list[Arrival], fit: bool
) -> None:
    assert weights.fit(arrivals) is fit


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_on_a_gpu_copies_come_after_their_arrival_and_before_what_reads_them() -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    loader = Loader(device)
    source, place = torch.zeros(1 << 24, device=device), torch.zeros(1 << 24, device=device)
    torch.cuda._sleep(50_000_000)
    source.fill_(1.0)

    load = loader.start(lambda: place.copy_(source))
    load.precede()
    source.fill_(2.0)
    loader.finish()

    assert place.eq(1.0).all()
