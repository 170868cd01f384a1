"""How far an update is, told to the caller's hook, and the seconds that each phase took."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from concurrent.futures import wait
from contextlib import contextmanager
from dataclasses import replace

from weight_update.errors import Phase
from weight_update.report import Progress, ProgressHook
from weight_update.waiting import spawn
from weight_update.weights.buckets import Bucket, Plan
from weight_update.weights.growing_plan import GrowingPlan

_HOOK_SECONDS = 1.0
_log = logging.getLogger("weight_update")


class Meter:
    """Tells a hook how far an update is; without a hook it costs nothing.

    A hook that raises, or does not return, is warned of and not called again: no update fails,
    and no engine stays paused, over a progress bar.

    Args:
        hook: Called from a thread of its own, one call after the other.
    """

    def __init__(self, hook: ProgressHook | None = None) -> None:
        self._hook = hook
        self._told = False
        self._now = Progress("plan", bytes_done=0, bytes_total=0, bucket=0, buckets=0)

    def plan(self, plan: Plan | GrowingPlan) -> None:
        """Learns how much there is to send."""
        if self._hook is not None:
            self._now = replace(self._now, bytes_total=plan.nbytes, buckets=plan.requests)

    def enter(self, phase: Phase) -> None:
        """Tells that a phase begins."""
        if self._hook is not None and (phase != self._now.phase or not self._told):
            self._tell(self._hook, replace(self._now, phase=phase))

    def confirm(self, bucket: Bucket) -> None:
        """Tells that every engine confirmed a bucket."""
        if self._hook is not None:
            now = self._now
            done = now.bytes_done + bucket.nbytes
            self._tell(self._hook, replace(now, bytes_done=done, bucket=now.bucket + 1))

    def _tell(self, hook: ProgressHook, now: Progress) -> None:
        self._now, self._told = now, True
        call = spawn(hook, now)
        wait([call], timeout=_HOOK_SECONDS)
        error = call.exception() if call.done() else None
        if error is not None and not isinstance(error, Exception):
            raise error  # an interrupt of the update, which happened to come inside the hook
        if error is not None or not call.done():
            self._hook = None
            words = repr(error) if error else f"no return within {_HOOK_SECONDS:.0f} s"
            _log.warning("the progress hook failed and is not called again: %s", words)


class Stopwatch:
    """Seconds by phase, and which phase runs now."""

    def __init__(self, meter: Meter | None = None) -> None:
        self.meter = meter or Meter()
        self.seconds: dict[str, float] = {}
        self.phase: Phase = "plan"
        self._start = time.perf_counter()

    @contextmanager
    def running(self, phase: Phase) -> Iterator[None]:
        """Times a phase; a failure inside it leaves the phase's name behind."""
        self.phase = phase
        self.meter.enter(phase)
        start = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[phase] = self.seconds.get(phase, 0.0) + time.perf_counter() - start

    def finish(self) -> dict[str, float]:
        """All seconds so far, with ``total``."""
        return {**self.seconds, "total": time.perf_counter() - self._start}
