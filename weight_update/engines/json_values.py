"""Values out of whatever JSON a server answers."""

from __future__ import annotations

from typing import Any, TypeGuard


def word(value: Any) -> str:
    """A text in lower case; empty for anything else."""
    return value.lower() if isinstance(value, str) else ""


def texts(value: Any) -> tuple[str, ...]:
    """The texts of a list; none of anything else."""
    return tuple(row for row in value if isinstance(row, str)) if isinstance(value, list) else ()


def is_count(value: Any) -> TypeGuard[int]:
    """Whether a value is a whole number from zero on."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def is_number(value: Any) -> bool:
    """Whether a value is a number that a float can be made of."""
    small = isinstance(value, int) and not isinstance(value, bool) and value.bit_length() < 1000
    return small or isinstance(value, float)
