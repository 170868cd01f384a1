"""A stream of weights: names and tensors that are made one after the other, and read once."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from typing import Any

import torch

from weight_update.errors import ConfigurationError, WeightMismatchError
from weight_update.options import NameMap
from weight_update.weights.buckets import GroupOf
from weight_update.weights.extract import extract_weights, not_tensors
from weight_update.weights.families.fused import group_of as fused_group_of
from weight_update.weights.families.fused import set_of
from weight_update.weights.name_map import Renamer
from weight_update.weights.specs import Weight

_log = logging.getLogger("weight_update")
_IN_PAIRS = "yield pairs: (name, tensor)"


class Stream:
    """Weights from an iterable of names and tensors, read once and never far ahead.

    A tensor has to keep its value until the next one is asked for, and no longer: one buffer may
    serve for all. So a bucket's tensors are copied once more as they come, and the trainer holds
    three buckets where two are enough for a source that can be read at any time.

    Members of a group that engines fuse stay in one bucket if they follow each other.

    Args:
        pairs: Names and tensors.
        whole: Whether they are all weights of the model, and not some of them.

    Example:
        >>> stream = Stream((f"layers.{i}.bias", torch.ones(2)) for i in range(3))
        >>> [[weight.spec.name for weight in batch] for batch in stream.batches(16)]
        [['layers.0.bias', 'layers.1.bias'], ['layers.2.bias']]
    """

    def __init__(self, pairs: Iterable[tuple[str, torch.Tensor]], *, whole: bool = False) -> None:
        self.whole = whole
        self._first: list[_Item] = []
        self._items = _items(pairs)
        self._taken = self._over = False

    def end(self) -> None:
        """Asks for nothing more once it was begun, also in a thread that was left behind."""
        self._over = self._taken

    def head(self) -> Weight:
        """The first weight, which is read and kept for the first batch.

        Raises:
            ConfigurationError: There is none.
        """
        if not self._first:
            self._refuse_second_pass()
            first = next(self._items, None)
            if first is None:
                raise ConfigurationError(
                    "the stream has no weights to send",
                    phase="plan",
                    remedy="pass a new iterator to each update: one can be read once only",
                )
            self._first.append(first)
        return self._first[0].weight

    def batches(
        self,
        limit: int,
        group_of: GroupOf = fused_group_of,
        name_map: NameMap | None = None,
    ) -> Iterator[tuple[Weight, ...]]:
        """The weights in batches, each made when it is asked for.

        A batch's values can be read until the next batch is asked for.

        Args:
            limit: Bytes that a batch may have; one weight or one group may have more.
            group_of: The group that a name belongs to.
            name_map: As for :func:`~weight_update.weights.name_map.renamed`. An expression that
                matches nothing is a warning here: that is known when all was sent.

        Raises:
            ConfigurationError: An item is no pair, its tensor cannot be sent, or the stream was
                read before.
            WeightMismatchError: A name is no text or comes twice, or a value is no tensor.
        """
        self.head()
        self._refuse_second_pass()
        self._taken = True
        rename = Renamer(name_map)
        batch = _Batch(limit, group_of)
        while item := self._next():
            renamed = rename(item.weight)
            if renamed is None:
                continue
            full = batch.before(renamed)
            if full:
                yield from _given(full)
            batch.add(renamed, item)
        if batch.pairs:
            yield from _given(batch.pairs)
        if rename.idle:
            _log.warning("name_map: %s matched no name", ", ".join(map(repr, rename.idle)))

    def _next(self) -> _Item | None:
        if self._over:
            return None
        return self._first.pop() if self._first else next(self._items, None)

    def _refuse_second_pass(self) -> None:
        if self._taken:
            raise ConfigurationError(
                "the stream was read already",
                phase="plan",
                remedy="pass a new iterator to each update, or a function that returns one",
            )


class _Item:
    """A tensor of a stream, as long as it is needed."""

    def __init__(self, name: str, weight: Weight) -> None:
        self._name = name
        self._read = weight.read
        self._kept: torch.Tensor | None = None
        self._gone = False
        self.weight = Weight(weight.spec, weight.device, self.read)

    def read(self) -> torch.Tensor:
        """The value."""
        if self._gone:
            raise ConfigurationError(
                f"weight {self._name!r} of a stream is gone: it can be read once only",
                phase="transfer",
            )
        return self._read() if self._kept is None else self._kept

    def keep(self) -> None:
        """Makes it independent of what the iterator does next."""
        if not self._gone:
            self._kept = self._read().clone(memory_format=torch.contiguous_format)
            del self._read

    def release(self) -> None:
        """Frees it."""
        self._gone, self._kept = True, None
        self.__dict__.pop("_read", None)


def _items(pairs: Iterable[Any]) -> Iterator[_Item]:
    seen: set[str] = set()
    for index, pair in enumerate(pairs):
        name, tensor = _checked(index, pair)
        if name in seen:
            raise WeightMismatchError(f"the stream has {name!r} twice", phase="plan")
        seen.add(name)
        (weight,) = extract_weights({name: tensor})
        if weight.collective:
            raise ConfigurationError(
                f"weight {name!r} is a shard of a distributed tensor",
                phase="plan",
                remedy="yield full_tensor(), or pass the module on every rank",
            )
        item = _Item(name, weight)
        del pair, tensor, weight
        yield item
        item.keep()


def _checked(index: int, pair: Any) -> tuple[str, torch.Tensor]:
    if not isinstance(pair, (tuple, list)) or len(pair) != 2:
        raise ConfigurationError(
            f"item {index} of the stream is {type(pair).__name__}, and no pair",
            phase="plan",
            remedy=_IN_PAIRS,
        )
    name, tensor = pair
    if not isinstance(name, str) or not name:
        raise WeightMismatchError(
            f"item {index} of the stream: the name {name!r} is no text",
            phase="plan",
            remedy=_IN_PAIRS,
        )
    if not isinstance(tensor, torch.Tensor):
        raise WeightMismatchError(
            f"item {index} of the stream: {name!r} is {type(tensor).__name__}, and no tensor",
            phase="plan",
            remedy=not_tensors({name: tensor}),
        )
    return name, tensor


_Pair = tuple[Weight, _Item]


def _given(pairs: list[_Pair]) -> Iterator[tuple[Weight, ...]]:
    """The weights, whose values are freed once they are not needed any more."""
    yield tuple(weight for weight, _ in pairs)
    for _, item in pairs:
        item.release()


class _Batch:
    """Weights that wait until a batch is full."""

    def __init__(self, limit: int, group_of: GroupOf) -> None:
        self.pairs: list[_Pair] = []
        self._limit = limit
        self._group_of = group_of
        self._nbytes = 0

    def add(self, weight: Weight, item: _Item) -> None:
        """Adds a weight."""
        self.pairs.append((weight, item))
        self._nbytes += weight.spec.nbytes

    def before(self, weight: Weight) -> list[_Pair]:
        """What has to leave before a weight is added; its own group stays with it."""
        if self._nbytes + weight.spec.nbytes <= self._limit:
            return []
        cut = self._cut(weight.spec.name)
        leaving, self.pairs = self.pairs[:cut], self.pairs[cut:]
        self._nbytes -= sum(each.spec.nbytes for each, _ in leaving)
        return leaving

    def _cut(self, name: str) -> int:
        """Where a run of the name's group begins; of its set, if that is not all there is."""
        for key_of in (self._set_of, self._group_of):
            key = key_of(name)
            start = len(self.pairs)
            if key is None:
                continue
            while start and key_of(self.pairs[start - 1][0].spec.name) == key:
                start -= 1
            if start:
                return start
        return len(self.pairs) if key is None else 0

    def _set_of(self, name: str) -> str | None:
        group = self._group_of(name)
        return group and set_of(group)
