"""Names by the user's own rules."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping

from weight_update.weights.specs import Weight

NameMap = Callable[[str], str | None] | Mapping[str, str]
"""A function from a name to the engine's (None leaves the weight out), or a table of regular
expressions and what they are replaced by."""


def renamed(weights: Iterable[Weight], name_map: NameMap | None) -> Iterator[Weight]:
    """The weights under the names that ``name_map`` gives them."""
    yield from weights
