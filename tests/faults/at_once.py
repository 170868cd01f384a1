"""Runs the library's spawned calls where they are started, so that nothing is a race."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

PACKAGE = "weight_update.update."
# It hands work to a thread that outlives the call, so it has to be one.
KEPT = f"{PACKAGE}background"


def spawn_at_once(call: Callable[..., Any], *args: object) -> Future[Any]:
    """Runs a call now; its future is done."""
    future: Future[Any] = Future()
    try:
        future.set_result(call(*args))
    except BaseException as error:  # noqa: BLE001 - the waiter re-raises it
        future.set_exception(error)
    return future


@contextmanager
def one_thread() -> Iterator[None]:
    """Every call of the update procedure runs at once, in the thread that makes it."""
    modules = {n: m for n, m in sys.modules.items() if n.startswith(PACKAGE) and n != KEPT}
    names = [
        f"{name}.{starts}"
        for name, module in modules.items()
        for starts in ("spawn", "hand_over")
        if hasattr(module, starts)
    ]
    assert names, "the update procedure spawns nothing any more"
    patches = [patch(name, spawn_at_once) for name in names]
    for each in patches:
        each.start()
    try:
        yield
    finally:
        for each in patches:
            each.stop()
