"""What all rows share: staleness, the phases around an update, the timer, what is returned."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from weight_update.delivery.delivery import Delivery
from weight_update.errors import ConfigurationError
from weight_update.report import UpdateReport
from weight_update.synchronizers.interface import Timer, WeightSynchronizer

TRANSFER_LABEL = "prepare_for_generation/transfer_and_update_weights"


class DeliverySynchronizer(WeightSynchronizer):
    """A synchronizer whose updates are a delivery's: a row says which, and what happens around it.

    Args:
        delivery: Brings the weights to the engines.

    Attributes:
        report: Of the last update that succeeded.
    """

    takes_kv_scales = False

    def __init__(self, delivery: Delivery) -> None:
        self._delivery = delivery
        self._stale = True
        self.report: UpdateReport | None = None

    @property
    def is_stale(self) -> bool:
        """Whether engines may hold other weights than the policy's last synchronised ones."""
        return self._stale

    def sync_weights(
        self, *, timer: Timer | None = None, kv_scales: Mapping[str, float] | None = None
    ) -> dict[str, float] | None:
        """Runs one update between the row's phases; see :class:`WeightSynchronizer`."""
        self._refuse(kv_scales)
        self._stale = True
        with self._phases():
            measured = nullcontext() if timer is None else timer.time(TRANSFER_LABEL)
            with measured:
                self.report = self._delivery.update(
                    self._source(kv_scales), whole=True, bucket_bytes=self._bucket_bytes()
                )
        self._stale = False
        return metrics(self.report)

    def shutdown(self) -> None:
        """Gives the group up on both ends; may be repeated."""
        self._stale = True
        self._delivery.shutdown()

    @abstractmethod
    def _phases(self) -> AbstractContextManager[Any]:
        """What happens before and after an update, and after a failed one all the same."""

    @abstractmethod
    def _source(self, kv_scales: Mapping[str, float] | None) -> Callable[[], Any]:
        """Returns what to send."""

    @abstractmethod
    def _bucket_bytes(self) -> int | None:
        """The size of a bucket; None lets the way that bytes take choose."""

    def _refuse(self, kv_scales: Mapping[str, float] | None) -> None:
        if kv_scales and not self.takes_kv_scales:
            raise ConfigurationError(
                f"{type(self).__name__} and its engines do not support kv_scales; got "
                f"{sorted(kv_scales)}",
                phase="plan",
                remedy="leave them out, or let the engine compute its own",
            )


def metrics(report: UpdateReport) -> dict[str, float]:
    """The numbers of a report that a logger wants.

    Example:
        >>> metrics(UpdateReport(3, 8, 1, 1, {"transfer": 0.5, "total": 1.0}, {}))
        {'version': 3.0, 'bytes': 8.0, 'transfer_seconds': 0.5, 'total_seconds': 1.0}
    """
    seconds = {f"{phase}_seconds": spent for phase, spent in report.seconds.items()}
    return {"version": float(report.version), "bytes": float(report.bytes), **seconds}
