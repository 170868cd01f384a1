"""How far an update is, told to the caller's hook."""

from __future__ import annotations

import logging
from dataclasses import replace

from weight_update.errors import Phase
from weight_update.report import Progress, ProgressHook
from weight_update.weights.buckets import Bucket, Plan

_log = logging.getLogger("weight_update")


class Meter:
    """Tells a hook how far an update is; without a hook it costs nothing.

    A hook that raises is warned of and not called again: no update fails over a progress bar.

    Args:
        hook: Called from the updating thread.
    """

    def __init__(self, hook: ProgressHook | None = None) -> None:
        self._hook = hook
        self._now = Progress("plan", bytes_done=0, bytes_total=0, bucket=0, buckets=0)

    def plan(self, plan: Plan) -> None:
        """Learns how much there is to send."""
        if self._hook is not None:
            self._now = replace(self._now, bytes_total=plan.nbytes, buckets=len(plan.buckets))

    def enter(self, phase: Phase) -> None:
        """Tells that a phase begins."""
        if self._hook is not None:
            self._tell(self._hook, replace(self._now, phase=phase))

    def confirm(self, bucket: Bucket) -> None:
        """Tells that every engine confirmed a bucket."""
        if self._hook is not None:
            now = self._now
            done = now.bytes_done + bucket.nbytes
            self._tell(self._hook, replace(now, bytes_done=done, bucket=now.bucket + 1))

    def _tell(self, hook: ProgressHook, now: Progress) -> None:
        self._now = now
        try:
            hook(now)
        except Exception as error:  # noqa: BLE001 - a hook must not break an update
            self._hook = None
            _log.warning("the progress hook failed and is not called again: %r", error)
