"""Version numbers: they move once, and never below a label that an engine shows."""

from __future__ import annotations

from collections.abc import Iterable

# A longer label is somebody's digits, and no count of updates.
_MOST_DIGITS = 1000


def next_version(current: int, labels: Iterable[str | None]) -> int:
    """The version that the next successful update gets.

    Args:
        current: The last version this trainer counted; 0 before the first.
        labels: What the engines show.

    Example:
        >>> next_version(0, ["default", None])
        1
        >>> next_version(0, ["7", "default"])
        8
    """
    shown = (int(label) for label in labels if label is not None and _is_number(label))
    return max(current, *shown, 0) + 1


def counts_on(label: str | None, later: str | None) -> bool:
    """Whether one label counts on from another.

    Example:
        >>> counts_on("3", "4"), counts_on("3", "default"), counts_on("default", "1")
        (True, False, True)
    """
    if later is None or not _is_number(later):
        return False
    return label is None or not _is_number(label) or int(later) > int(label)


def _is_number(label: str) -> bool:
    return label.isdecimal() and len(label) <= _MOST_DIGITS
