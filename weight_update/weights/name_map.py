"""Names by the user's own rules."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from weight_update.errors import ConfigurationError, WeightMismatchError, some_of
from weight_update.options import NameMap
from weight_update.weights.specs import Weight


def renamed(weights: Iterable[Weight], name_map: NameMap | None) -> Iterator[Weight]:
    r"""The weights under the names that ``name_map`` gives them; values are not touched.

    Args:
        weights: The weights, under a checkpoint's names.
        name_map: A function from a name to the engine's, None to leave the weight out; or a
            table of regular expressions and what they are replaced by. Every expression of a
            table is applied, in order, as :func:`re.sub` does.

    Raises:
        ConfigurationError: An expression matches no name, or the function raised.
        WeightMismatchError: A result is no name, or two weights get the same one.

    Example:
        >>> import torch
        >>> from weight_update.weights.extract import extract_weights
        >>> weights = extract_weights({"policy.a": torch.ones(1), "policy.b": torch.ones(1)})
        >>> [each.spec.name for each in renamed(weights, {r"^policy\.": "model."})]
        ['model.a', 'model.b']
    """
    rename = Renamer(name_map)
    for weight in weights:
        new = rename(weight)
        if new is not None:
            yield new
    rename.refuse_idle()


def check_name_map(name_map: Any) -> None:
    """Raises ConfigurationError unless ``name_map`` is None, a function, or a table that works.

    Example:
        >>> check_name_map({r"(": ""})
        Traceback (most recent call last):
        weight_update.errors.ConfigurationError: name_map: '(' is no regular expression: ...
    """
    if isinstance(name_map, Mapping):
        _rules_of(name_map)
    elif name_map is not None and not callable(name_map):
        raise ConfigurationError(
            f"name_map={name_map!r} must be a function, or a table of regular expressions"
        )


def rule_against_mark(unknown: Iterable[str], lacking: Iterable[str]) -> str | None:
    r"""An expression for what stands before all names that an engine does not know, if anything.

    Args:
        unknown: Names that the engine does not know.
        lacking: Names of its own that none of a push is.

    Example:
        >>> rule_against_mark(["policy.head", "policy.norm"], ["head", "norm"])
        '^policy\\.'
        >>> rule_against_mark(["policy.head", "critic.head"], ["head"]) is None
        True
    """
    parts = [name.partition(".") for name in unknown]
    marks, bare = {mark for mark, _, _ in parts}, {rest for _, _, rest in parts}
    if len(marks) != 1 or bare.isdisjoint(lacking):
        return None
    return f"^{re.escape(marks.pop())}\\."


class Renamer:
    """Renames one weight after the other, and remembers what names it gave.

    Args:
        name_map: As for :func:`renamed`.

    Attributes:
        idle: Expressions of a table that have matched no name so far.
    """

    def __init__(self, name_map: NameMap | None) -> None:
        self.idle: dict[str, None] = {}
        self._homes: dict[str, str] = {}
        self._rules: list[tuple[re.Pattern[str], str]] = []
        self._function: Callable[[str], Any] = self._by_table
        if isinstance(name_map, Mapping):
            self._rules = _rules_of(name_map)
            self.idle = dict.fromkeys(name_map)
        elif name_map is not None:
            self._function = name_map

    def __call__(self, weight: Weight) -> Weight | None:
        """The weight under its new name; None if it is left out."""
        name = weight.spec.name
        new = _checked(name, self._applied(name))
        if new is None:
            return None
        if (first := self._homes.setdefault(new, name)) != name:
            raise WeightMismatchError(
                f"name_map gives {first!r} and {name!r} the same name, {new!r}", phase="plan"
            )
        return weight if new == name else replace(weight, spec=replace(weight.spec, name=new))

    def refuse_idle(self) -> None:
        """Raises ConfigurationError if an expression has matched nothing."""
        if self.idle:
            raise ConfigurationError(
                f"name_map: {', '.join(map(repr, self.idle))} matches no name; the names are "
                f"{some_of(list(self._homes.values()))}",
                phase="plan",
                remedy="weight_update.get_model_metadata(model) shows all names of a model",
            )

    def _applied(self, name: str) -> Any:
        try:
            return self._function(name)
        except Exception as error:
            raise ConfigurationError(
                f"name_map failed on {name!r}: {error!r}", phase="plan"
            ) from error

    def _by_table(self, name: str) -> str:
        for pattern, replacement in self._rules:
            name, times = pattern.subn(replacement, name)
            if times:
                self.idle.pop(pattern.pattern, None)
        return name


def _rules_of(table: Mapping[Any, Any]) -> list[tuple[re.Pattern[str], str]]:
    if not table:
        raise ConfigurationError("name_map={} renames nothing", remedy="leave it out")
    return [_rule(*entry) for entry in table.items()]


def _rule(pattern: Any, replacement: Any) -> tuple[re.Pattern[str], str]:
    if not isinstance(pattern, str) or not isinstance(replacement, str):
        raise ConfigurationError(f"name_map: {pattern!r}: {replacement!r} must be text both")
    try:
        compiled = re.compile(pattern)
    except (re.error, RecursionError, OverflowError) as error:
        raise ConfigurationError(
            f"name_map: {pattern!r} is no regular expression: {error}"
        ) from error
    try:
        compiled.sub(replacement, "")
    except (re.error, IndexError) as error:
        raise ConfigurationError(
            f"name_map: {replacement!r} cannot replace {pattern!r}: {error}"
        ) from error
    return compiled, replacement


def _checked(name: str, new: Any) -> str | None:
    if new is None or (isinstance(new, str) and new):
        return new
    what = "an empty name" if new == "" else f"{new!r}, which is no text"
    raise WeightMismatchError(f"name_map gives {name!r} {what}", phase="plan")
