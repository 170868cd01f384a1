"""What was gathered last, as long as it is read from: a whole unit serves many reads.

One thing at most is held in a process, so that whole values never pile up. All ranks read the
same in the same order, so all hold the same.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager

_held: list[tuple[object, AbstractContextManager[object]]] = []


def hold(owner: object, gather: Callable[[], AbstractContextManager[object]]) -> None:
    """Gathers for ``owner``, unless that is what is held; anything else is let go before.

    Example:
        >>> from contextlib import contextmanager
        >>> @contextmanager
        ... def gathered():
        ...     print("gathered")
        ...     yield
        ...     print("let go")
        >>> hold("a unit", gathered), hold("a unit", gathered)
        gathered
        (None, None)
        >>> let_go()
        let go
    """
    if _held and _held[-1][0] is owner:
        return
    let_go()
    context = gather()
    context.__enter__()
    _held.append((owner, context))


def let_go() -> None:
    """Gives back what is held."""
    while _held:
        _, context = _held.pop()
        context.__exit__(None, None, None)
