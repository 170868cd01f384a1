"""Which collectors count an update by themselves, since it was asked for in their own.

A collector's ``update_policy_weights_()`` may lead to a sender: through a weight updater, or a
scheme of the user's own. TorchRL then counts when it returns, so the sender must not. Who asked
stands on the stack of the caller, and nowhere else.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import FrameType
from typing import Any


def self_counting() -> list[Any]:
    """The collectors that count what the caller does, once it returned to them.

    Example:
        >>> self_counting()
        []
    """
    return [c for frame in _callers() for c in _counts_after(frame)]


def moved_by(collector: Any) -> Any:
    """What moves when a collector counts: its tracker, which others may share, or itself."""
    return getattr(collector, "policy_version_tracker", None) or collector


def counted_by(hook: Any) -> Any:
    """Whose version a hook moves: that of the object whose ``increment_version`` it is.

    Example:
        >>> counted_by(print) is None
        True
    """
    moves = getattr(hook, "__name__", "") == "increment_version"
    return getattr(hook, "__self__", None) if moves else None


def _callers() -> Iterator[FrameType]:
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        yield frame
        frame = frame.f_back


def _counts_after(frame: FrameType) -> list[Any]:
    name = frame.f_code.co_name
    if name == "update_policy_weights_":
        return _counts_itself(frame.f_locals.get("self"))
    if name == "push_weights":  # of a weight updater, which calls its hooks when it has pushed
        return list(_counted_by_hooks(frame.f_locals.get("self")))
    return []


def _counts_itself(collector: Any) -> list[Any]:
    from torchrl.collectors import Collector  # imported long since, if anybody's method is running

    # Those with workers leave it to their workers.
    return [collector] if isinstance(collector, Collector) else []


def _counted_by_hooks(updater: Any) -> Iterator[Any]:
    for hook in getattr(updater, "post_hooks", None) or ():
        owner = counted_by(hook)
        if owner is not None:
            # An updater's own method counts for all its collectors.
            yield from (owner.collectors or ()) if owner is updater else (owner,)
