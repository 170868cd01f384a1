"""Who hears of updates: hooks of those that succeeded, loggers of all."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from weight_update.errors import WeightUpdateError
from weight_update.report import UpdateReport
from weight_update.schemes.hooks import PostHooks
from weight_update.schemes.loggers import Loggers, Start


class Listeners:
    """Tells hooks, then loggers, once engines generate again.

    They stay with the process that they were registered in: a copy has none.

    Args:
        wider: Who hears of these updates too, and of others.
    """

    def __init__(self, wider: Listeners | None = None) -> None:
        self._wider = wider
        self.hooks = PostHooks()
        told: Loggers | None = None if wider is None else wider.loggers
        self.loggers: Loggers = Loggers(told=told)

    def hear(
        self, push: Callable[[], UpdateReport], version: int, taken: float | None = None
    ) -> UpdateReport:
        """Runs an update and tells of it.

        Args:
            push: Runs it.
            version: The version before it.
            taken: When the trainer handed the weights over; None for now.

        Returns:
            Its report, with a warning for each hook that failed.

        Raises:
            WeightUpdateError: As ``push``; the loggers heard of it, and no hook did.
        """
        start = Start(version, self.loggers.now() if taken is None else taken)
        try:
            report = self._ran(push, start)
        except WeightUpdateError as error:
            if error.report is not None:
                self.loggers.tell(error.report, start, failed=True)
            raise
        report = self.hooks.run(report)
        self.loggers.tell(report, start, failed=False)
        return report

    def clear(self) -> None:
        """Nobody hears any more, but for the wider ones."""
        self.hooks.clear()
        self.loggers.clear()

    def __reduce__(self) -> Any:
        return Listeners, ()

    def _ran(self, push: Callable[[], UpdateReport], start: Start) -> UpdateReport:
        if self._wider is None:
            return push()
        return self._wider.hear(push, start.version, start.taken)
