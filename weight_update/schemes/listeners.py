"""Who hears of a sender's updates: hooks of those that succeeded, loggers of all."""

from __future__ import annotations

from collections.abc import Callable

from weight_update.errors import WeightUpdateError
from weight_update.report import UpdateReport
from weight_update.schemes.hooks import PostHooks
from weight_update.schemes.loggers import Loggers, Start


class Listeners:
    """Tells hooks, then loggers, once engines generate again."""

    def __init__(self) -> None:
        self.hooks = PostHooks()
        self.loggers = Loggers()

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
            report = push()
        except WeightUpdateError as error:
            if error.report is not None:
                self.loggers.tell(error.report, start, failed=True)
            raise
        report = self.hooks.run(report)
        self.loggers.tell(report, start, failed=False)
        return report

    def clear(self) -> None:
        """Nobody hears any more."""
        self.hooks.clear()
        self.loggers.clear()
