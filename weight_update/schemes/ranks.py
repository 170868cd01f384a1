"""An update of a sharded trainer: every rank reads, one of them talks to the engines."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Protocol

from weight_update.errors import ConfigurationError
from weight_update.report import UpdateReport
from weight_update.transports.rank_channel import open_channel
from weight_update.update.crew import Crew
from weight_update.update.planning import Payload
from weight_update.update.reader import nobody_else
from weight_update.waiting import Deadline
from weight_update.weights.shards.readers import readers_of

_log = logging.getLogger("weight_update")


class PushPayload(Protocol):
    """Updates the engines with what it reads."""

    def __call__(
        self, read: Callable[[], Payload], check_readers: Callable[[], None] = nobody_else
    ) -> UpdateReport:
        """Runs the update."""


class Ranks:
    """Runs updates with the ranks that hold parts of a model, if there are any."""

    def __init__(self) -> None:
        self._known: frozenset[int] = frozenset()
        self._warned = False

    def update(
        self,
        source: Callable[[], Any],
        read: Callable[[Any], Payload],
        push: PushPayload,
        followed: Callable[[UpdateReport], None],
        deadline: Deadline,
        engines: Sequence[str],
    ) -> UpdateReport:
        """Runs ``push`` here, or follows the rank that does, if the source is held in parts.

        Args:
            source: Returns what is to be sent.
            read: Makes the weights of it.
            push: Updates the engines.
            followed: Told of the report on ranks that do not talk to the engines.
            deadline: By when every rank must have come.
            engines: URLs of what this rank means to update.

        Raises:
            WeightUpdateError: The same on all ranks.
        """
        channel = open_channel()
        if channel is None:
            return push(lambda: read(source()))
        crew, payload = None, Payload()
        try:
            given = source()
            self._known = frozenset(readers_of(given, channel.ranks))
            payload = read(given)
            crew = Crew.of(payload.weights, open_channel)
        except Exception as error:  # noqa: BLE001 - raised on every rank
            # Who read the last update waits for this one, even if there is nothing to look at.
            crew = Crew.without_weights(self._known, error, open_channel)
            if crew is None:
                return push(_raising(error))
        if crew is None:
            self._warn_of_each_for_itself(channel.rank, channel.ranks)
            return push(lambda: payload)
        report = crew.run(
            lambda: push(lambda: replace(payload, weights=crew.lead()), crew.check),
            deadline,
            engines,
        )
        if not crew.leads:
            followed(report)
        return report

    def _warn_of_each_for_itself(self, rank: int, ranks: int) -> None:
        if rank and not self._warned:
            self._warned = True
            _log.warning(
                "rank %d of %d updates the engines by itself: where every rank holds the whole "
                "model (DDP), one of them should call update_weights(), and not each",
                rank,
                ranks,
            )


def refuse_shards(source: Any) -> None:
    """Raises ConfigurationError if other ranks must take part in reading ``source``."""
    channel = open_channel()
    if channel is not None and readers_of(source, channel.ranks):
        raise ConfigurationError(
            "a sharded model cannot be sent in the background: its ranks would read it while "
            "they train",
            phase="plan",
            remedy="call update_weights() on every rank",
        )


def _raising(error: Exception) -> Callable[[], Payload]:
    def read() -> Payload:
        raise error

    return read
