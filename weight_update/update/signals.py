"""SIGTERM during an update: engines are settled before the process ends."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def orderly_end() -> Iterator[None]:
    """Has SIGTERM raise SystemExit(143) while an update runs.

    By default it ends a process at once, and would leave the engines paused. A handler that
    somebody has set stays, and other threads than the main one cannot set any.
    """
    ours = (
        threading.current_thread() is threading.main_thread()
        and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    )
    if not ours:
        yield
        return
    came: list[int] = []

    def leave(number: int, _: FrameType | None) -> None:
        came.append(number)
        raise SystemExit(128 + number)

    signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
    if came:  # it was raised inside a finalizer, where Python drops it
        raise SystemExit(128 + came[0])
