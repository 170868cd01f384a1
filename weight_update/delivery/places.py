"""Which rank of the trainer shares a GPU with which rank of which engine."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import takewhile
from typing import Protocol


class Ranked(Protocol):
    """An engine that says how many ranks it has, once it was asked."""

    @property
    def ranks(self) -> int | None:
        """How many; None when it does not say."""


class Places:
    """Engines and the trainer's ranks side by side, as engines are placed on GPUs.

    An engine's ranks stand beside as many ranks of the trainer, from the engine's offset on.
    Unless it is given, it follows from the engines before: they fill the GPUs one after the other.

    Args:
        offsets: By engine, the rank that shares a GPU with its first.

    Example:
        >>> from types import SimpleNamespace as Engine
        >>> places = Places()
        >>> for url in ("http://a:1", "http://b:1"):
        ...     places.add(url, Engine(ranks=2))
        >>> places.first("http://b:1"), sorted(places.ranks())
        (2, [0, 1, 2, 3])
    """

    def __init__(self, offsets: Mapping[str, int] | None = None) -> None:
        self._offsets = dict(offsets or {})
        self._engines: dict[str, Ranked] = {}

    def add(self, url: str, engine: Ranked) -> None:
        """Notes an engine, behind all that are there; one that comes back keeps its place."""
        self._engines[url] = engine

    def first(self, url: str) -> int:
        """The trainer's rank that shares a GPU with an engine's first."""
        given = self._offsets.get(url)
        if given is not None:
            return given
        before = takewhile(lambda other: other != url, self._engines)
        return sum(self._size(other) for other in before)

    def ranks(self) -> set[int]:
        """The trainer's ranks that share a GPU with some engine's."""
        firsts = {url: self.first(url) for url in self._engines}
        return {first + rank for url, first in firsts.items() for rank in range(self._size(url))}

    def _size(self, url: str) -> int:
        return self._engines[url].ranks or 1
