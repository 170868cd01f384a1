"""What a training loop asks of a synchronizer, whatever the deployment."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager
from typing import Any, Protocol


class Timer(Protocol):
    """Measures what is done inside ``time(label)``."""

    def time(self, label: str) -> AbstractContextManager[Any]:
        """A context that is measured under a label."""


class WeightSynchronizer(ABC):
    """Brings a policy's weights to the engines that generate with them.

    1. :meth:`init_communicator` once, when trainer and engines run.
    2. :meth:`sync_weights` after each step of training.
    3. :meth:`shutdown`.
    """

    @property
    @abstractmethod
    def is_stale(self) -> bool:
        """Whether engines may hold other weights than the policy's last synchronised ones.

        True until the first success, and from the start of every sync until it has succeeded.
        """

    @abstractmethod
    def init_communicator(self) -> None:
        """Tells the engines what will come, and makes the group where one is needed."""

    @abstractmethod
    def sync_weights(
        self, *, timer: Timer | None = None, kv_scales: Mapping[str, float] | None = None
    ) -> dict[str, float] | None:
        """Brings the policy's weights to every engine.

        Args:
            timer: Measures the transfer, under the label
                ``prepare_for_generation/transfer_and_update_weights``.
            kv_scales: Scales of an fp8 KV cache, by name, where the engine takes them.

        Returns:
            Numbers for a logger.

        Raises:
            RuntimeError: Not every engine has the weights; see :class:`WeightUpdateError`.
            ValueError: ``kv_scales`` where the engine takes none.
        """

    def reconcile_communicator(
        self, absent_shards: Iterable[int], force: bool = False
    ) -> bool | None:
        """Rebuilds the communicator over the engines that are left.

        Args:
            absent_shards: Numbers of the engines that do not take part.
            force: Whether it is rebuilt though nobody left or came back.

        Returns:
            True if it was rebuilt, False if there was nothing to do, None if membership is not
            this synchronizer's to decide.
        """
        return None

    @abstractmethod
    def shutdown(self) -> None:
        """Frees channels on both ends; may be repeated."""
