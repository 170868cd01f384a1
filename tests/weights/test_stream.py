"""Streams: read once, batch by batch, never far ahead, and safe against reused buffers."""

from __future__ import annotations

import gc
import logging
import weakref
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import pytest
import torch

from weight_update import ConfigurationError, WeightMismatchError, WeightUpdateError
from weight_update.transports.broadcast import BucketPacker
from weight_update.weights.buckets import plan_buckets
from weight_update.weights.specs import Weight
from weight_update.weights.stream import Stream

EIGHT_BYTES = torch.zeros(2)
Batches = list[list[str]]


def stream_of(*names: str) -> Stream:
    return Stream((name, EIGHT_BYTES) for name in names)


def names_of(batches: Iterable[tuple[Weight, ...]]) -> Batches:
    return [[weight.spec.name for weight in batch] for batch in batches]


# -- batches ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("limit", "expected"),
    [
        (8, [["a"], ["b"], ["c"]]),
        (15, [["a"], ["b"], ["c"]]),
        (16, [["a", "b"], ["c"]]),
        (1000, [["a", "b", "c"]]),
        (1, [["a"], ["b"], ["c"]]),
    ],
)
def test_a_batch_is_closed_before_it_would_exceed_the_limit(limit: int, expected: Batches) -> None:
    assert names_of(stream_of("a", "b", "c").batches(limit)) == expected


QKV = tuple(f"layers.0.{part}_proj.weight" for part in "qkv")
EXPERTS = tuple(f"mlp.experts.{i}.{part}_proj.weight" for i in (0, 1) for part in ("gate", "up"))


@pytest.mark.parametrize(
    ("names", "limit", "expected"),
    [
        (("a", *QKV, "b"), 24, [["a"], [*QKV], ["b"]]),
        (("a", *QKV, "b"), 8, [["a"], [*QKV], ["b"]]),
        (("a", "b", *QKV), 40, [["a", "b", *QKV]]),
        (("a", *EXPERTS), 32, [["a"], [*EXPERTS]]),
        (("a", *EXPERTS), 24, [["a"], [*EXPERTS[:2]], [*EXPERTS[2:]]]),
        (("norm.weight", "norm2.weight"), 8, [["norm.weight"], ["norm2.weight"]]),
    ],
    ids=["group", "larger group", "all fit", "set", "larger set", "no group"],
)
def test_neighbours_that_engines_fuse_stay_in_one_batch(
    names: tuple[str, ...], limit: int, expected: Batches
) -> None:
    assert names_of(stream_of(*names).batches(limit)) == expected


def test_the_iterator_is_never_more_than_one_tensor_ahead_of_its_batch() -> None:
    asked: list[str] = []

    def pairs() -> Iterator[tuple[str, torch.Tensor]]:
        for name in "abcdef":
            asked.append(name)
            yield name, EIGHT_BYTES

    batches = Stream(pairs()).batches(16)
    assert asked == []
    ahead = [(names_of([batch])[0], "".join(asked)) for batch in batches]

    assert ahead == [(["a", "b"], "abc"), (["c", "d"], "abcde"), (["e", "f"], "abcdef")]


def test_the_head_is_shown_beforehand_and_still_sent() -> None:
    stream = stream_of("a", "b")

    assert [stream.head().spec.name, stream.head().spec.name] == ["a", "a"]
    assert names_of(stream.batches(8)) == [["a"], ["b"]]


# -- values -------------------------------------------------------------------------------


def test_one_buffer_may_serve_for_all_tensors() -> None:
    buffer = torch.empty(2)
    pairs = ((name, buffer.fill_(i)) for i, name in enumerate("abcde"))

    read = [float(w.read()[0]) for batch in Stream(pairs).batches(16) for w in batch]

    assert read == [0.0, 1.0, 2.0, 3.0, 4.0]


def test_buckets_packed_from_a_stream_hold_its_values() -> None:
    torch.manual_seed(0)
    tensors = {
        f"w{i}": torch.randn(3, i + 1).to([torch.float32, torch.bfloat16][i % 2]) for i in range(9)
    }
    packer = BucketPacker(torch.device("cpu"))
    found: dict[str, torch.Tensor] = {}

    for batch in Stream(iter(tensors.items())).batches(64):
        for bucket in plan_buckets(batch, 64).buckets:
            (buffer,) = packer.pack(bucket).tensors
            offset = 0
            for spec in bucket.specs:
                part = buffer[offset : offset + spec.nbytes]
                found[spec.name] = part.view(spec.dtype).reshape(spec.shape).clone()
                offset += spec.nbytes

    assert found.keys() == tensors.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in tensors.items())


@pytest.mark.parametrize(
    "tensor",
    [
        torch.arange(6.0).reshape(2, 3).t(),
        torch.arange(8.0)[::2],
        torch.ones(1).expand(4),
        torch.tensor(3),
        torch.empty(0, 4),
        torch.ones(2, requires_grad=True),
    ],
    ids=["transposed", "strided", "expanded", "zero-dim", "empty", "trained"],
)
def test_values_of_any_layout_are_the_tensors(tensor: torch.Tensor) -> None:
    batches = Stream([("a", tensor), ("b", EIGHT_BYTES)]).batches(1000)

    (weight, _) = next(batches)

    assert torch.equal(weight.read(), tensor.detach())
    assert not weight.read().requires_grad


def test_values_are_freed_once_the_next_batch_is_asked_for() -> None:
    alive: list[weakref.ref[torch.Tensor]] = []

    def pairs() -> Iterator[tuple[str, torch.Tensor]]:
        for name in "abcdef":
            tensor = torch.zeros(2)
            alive.append(weakref.ref(tensor))
            yield name, tensor
            del tensor

    batches, kept = Stream(pairs()).batches(16), []
    for batch in batches:
        kept.append(batch)
        gc.collect()
        assert sum(ref() is not None for ref in alive) <= 1  # the newest, not yet copied

    with pytest.raises(ConfigurationError, match="'a' of a stream is gone") as failure:
        kept[0][0].read()
    assert failure.value.phase == "transfer"


# -- names --------------------------------------------------------------------------------


def test_a_name_map_looks_at_the_whole_stream() -> None:
    table = {"^a": "x", "^c": "z"}

    batches = stream_of("a", "b", "c").batches(8, name_map=table)

    assert names_of(batches) == [["x"], ["b"], ["z"]]


def test_a_name_map_leaves_weights_out_and_groups_by_the_new_names() -> None:
    names = {"a": "a", "1": QKV[0], "2": QKV[1], "3": QKV[2], "head": None}

    batches = stream_of(*names).batches(24, name_map=names.__getitem__)

    assert names_of(batches) == [["a"], [*QKV]]


def test_two_names_that_a_map_makes_one_are_refused_across_batches() -> None:
    with pytest.raises(WeightMismatchError, match="'a' and 'c' the same name, 'x'"):
        names_of(stream_of("a", "b", "c").batches(8, name_map={"a|c": "x"}))


def test_an_expression_that_matched_nothing_is_a_warning_at_the_end(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.WARNING, logger="weight_update"):
        names_of(stream_of("a").batches(8, name_map={"a": "b", "nowhere": "x"}))

    assert "'nowhere' matched no name" in caplog.text


# -- what is refused ----------------------------------------------------------------------


REFUSED: dict[str, tuple[list[Any], type[WeightUpdateError], str]] = {
    "nothing": ([], ConfigurationError, "no weights.*a new iterator to each update"),
    "no pair": ([EIGHT_BYTES], ConfigurationError, "item 0 .* is Tensor, and no pair"),
    "a name alone": (["ab"], ConfigurationError, "is str, and no pair"),
    "three": ([("a", EIGHT_BYTES, 0)], ConfigurationError, "is tuple, and no pair"),
    "no text": ([(0, EIGHT_BYTES)], WeightMismatchError, "item 0 .* the name 0 is no text"),
    "an empty name": ([("", EIGHT_BYTES)], WeightMismatchError, "the name '' is no text"),
    "no tensor": (
        [("a", EIGHT_BYTES), ("b", [1.0])],
        WeightMismatchError,
        "item 1 of the stream: 'b' is list, and no tensor",
    ),
    "an array": (
        [("a", np.ones(2))],
        WeightMismatchError,
        "'a' is ndarray, and no tensor.*from_numpy",
    ),
    "a name twice": (
        [("a", EIGHT_BYTES), ("b", EIGHT_BYTES), ("a", EIGHT_BYTES)],
        WeightMismatchError,
        "has 'a' twice",
    ),
    "a sparse tensor": ([("a", torch.eye(2).to_sparse())], ConfigurationError, "not dense"),
}


@pytest.mark.parametrize(("pairs", "error", "words"), REFUSED.values(), ids=list(REFUSED))
def test_items_that_cannot_be_sent_are_refused_as_they_come(
    pairs: list[Any], error: type[WeightUpdateError], words: str
) -> None:
    with pytest.raises(error, match=words) as failure:
        names_of(Stream(iter(pairs)).batches(8))

    assert type(failure.value) is error
    assert failure.value.phase == "plan"


def test_a_stream_is_read_once() -> None:
    stream = stream_of("a")
    names_of(stream.batches(8))

    for again in (stream.head, lambda: names_of(stream.batches(8))):
        with pytest.raises(ConfigurationError, match=r"was read already.*a function that returns"):
            again()


def test_an_error_of_the_iterator_is_the_users_to_see() -> None:
    def pairs() -> Iterator[tuple[str, torch.Tensor]]:
        yield "a", EIGHT_BYTES
        raise KeyError("layers.1")

    with pytest.raises(KeyError, match=r"layers\.1"):
        names_of(Stream(pairs()).batches(8))


def test_nothing_more_is_asked_for_after_its_end() -> None:
    asked: list[int] = []

    def endless() -> Iterator[tuple[str, torch.Tensor]]:
        for index in range(1000):
            asked.append(index)
            yield str(index), EIGHT_BYTES

    stream = Stream(endless())
    batches = stream.batches(8)
    next(batches)
    stream.end()
    assert len(list(batches)) <= 1
    assert len(asked) == 2


def test_a_stream_that_was_not_begun_can_be_read_after_an_update_that_failed() -> None:
    stream = stream_of("a", "b")
    stream.head()
    stream.end()
    assert names_of(stream.batches(8)) == [["a"], ["b"]]
