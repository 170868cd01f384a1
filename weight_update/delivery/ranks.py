"""An update of several ranks: every rank reads, or joins the group; one talks to the engines."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any, Protocol

import torch

from weight_update.errors import ConfigurationError, WeightUpdateError
from weight_update.options import TrainerRanks, UpdateOptions
from weight_update.report import UpdateReport
from weight_update.transports.rank_channel import open_channel
from weight_update.transports.relay_group import RelayGroup
from weight_update.update.crew import Crew, Relay, Relaying, Relays, Sharer, Sharers, Sharing
from weight_update.update.planning import Payload
from weight_update.update.reader import nobody_else
from weight_update.update.ways import Ends
from weight_update.waiting import Deadline
from weight_update.weights.shards.readers import readers_of

_log = logging.getLogger("weight_update")

# Who was interrupted tells those who have come, and waits for nobody else.
_FAREWELL_SECONDS = 1.0


class PushPayload(Protocol):
    """Updates the engines with what it reads."""

    def __call__(
        self, read: Callable[[], Payload], check_readers: Callable[[], None] = nobody_else
    ) -> UpdateReport:
        """Runs the update."""


class Ranks:
    """Runs updates with the ranks that hold parts of a model, or join the group, if any do.

    Args:
        trainer_ranks: ``"node"`` has all ranks take part in every update.
    """

    def __init__(self, trainer_ranks: TrainerRanks = "one") -> None:
        self._trainer_ranks: TrainerRanks = trainer_ranks
        self._relaying: Relaying | None = None
        if trainer_ranks == "node":
            self._relaying = Relaying(Relay(_open_end), Relays())
        self._sharing: Sharing | None = None
        self._known: frozenset[int] | None = None
        self._warned = False
        self.followed = False

    def ends(self, ends: Ends) -> Ends:
        """A way whose groups the trainer's other ranks join, if they are to."""
        return ends if self._relaying is None else self._relaying.relays.ends(ends)

    def shared_ends(
        self, ends: Ends, options: UpdateOptions, wanted: Callable[[], Collection[int]]
    ) -> Ends:
        """A way whose memory the trainer's other ranks share too, each that of its own GPU.

        Args:
            ends: The way without them.
            options: Everything that shapes an update.
            wanted: Tells which ranks share a GPU with an engine.
        """
        self._sharing = Sharing(Sharer(options, ends.open_packer), Sharers(wanted))
        return self._sharing.sharers.ends(ends, options)

    def close(self) -> None:
        """Leaves the group of another rank."""
        self.followed = False
        if self._relaying is not None:
            self._relaying.relay.drop()

    def connect(
        self, connect: Callable[[], None], deadline: Deadline, engines: Sequence[str]
    ) -> None:
        """Runs ``connect`` here, or follows the rank that does, if all are to take part.

        Args:
            connect: Makes the group.
            deadline: By when every rank must have come.
            engines: URLs of what this rank means to connect to.

        Raises:
            WeightUpdateError: The same on all ranks.
        """
        relaying = self._relaying
        crew = None if relaying is None else Crew.of((), open_channel, relaying, self._sharing)
        if crew is None:
            return connect()

        def lead() -> UpdateReport:
            crew.lead()
            connect()
            return UpdateReport(0, 0, 0, 0, {}, {})

        crew.run(lead, deadline, engines)
        self.followed = not crew.leads
        return None

    def together(
        self,
        source: Callable[[], Any],
        step: Callable[[], object],
        deadline: Deadline,
        engines: Sequence[str],
    ) -> None:
        """Runs a step here, and waits until every rank that takes part in updates has run its own.

        Args:
            source: Returns what updates send.
            step: Does this rank's part.
            deadline: By when every rank must have come.
            engines: URLs of what this rank means to update.

        Raises:
            WeightUpdateError: A step failed; it is the same on all ranks.
        """
        ranks = self._takers(source)
        if len(ranks) < 2:
            step()
            return
        try:
            step()
        except Exception as error:  # noqa: BLE001 - raised on every rank
            _meet(ranks, error, deadline, engines)
        except BaseException as interrupt:
            words = WeightUpdateError(f"it was interrupted by {type(interrupt).__name__}")
            with suppress(WeightUpdateError):
                _meet(ranks, words, deadline.at_most(_FAREWELL_SECONDS), engines)
            raise
        else:
            _meet(ranks, None, deadline, engines)

    def _takers(self, source: Callable[[], Any]) -> Collection[int]:
        """Who takes part, as far as the last update told; a source may be dear to ask."""
        channel = open_channel()
        if channel is None:
            return ()
        if self._known is None:
            self._known = frozenset(readers_of(source(), channel.ranks))
        return self._known or _everybody(channel.ranks, self._trainer_ranks)

    def update(
        self,
        source: Callable[[], Any],
        read: Callable[[Any], Payload],
        push: PushPayload,
        followed: Callable[[UpdateReport], None],
        deadline: Deadline,
        engines: Sequence[str],
    ) -> UpdateReport:
        """Runs ``push`` here, or follows the rank that does, if several take part.

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
            return self._alone(push, lambda: read(source()))
        crew, payload = None, Payload()
        try:
            given = source()
            self._known = frozenset(readers_of(given, channel.ranks))
            payload = read(given)
            crew = Crew.of(payload.weights, open_channel, self._relaying, self._sharing)
        except Exception as error:  # noqa: BLE001 - raised on every rank
            # Who read the last update waits for this one, even if there is nothing to look at.
            everybody = range(channel.ranks if self._relaying else 0)
            known = self._known or frozenset(everybody)
            crew = Crew.without_weights(known, error, open_channel, self._relaying, self._sharing)
            if crew is None:
                return self._alone(push, _raising(error))
        if crew is None:
            self._warn_of_each_for_itself(channel.rank, channel.ranks)
            return self._alone(push, lambda: payload)
        report = crew.run(
            lambda: push(lambda: replace(payload, weights=crew.lead()), crew.check),
            deadline,
            engines,
        )
        self.followed = not crew.leads
        if self.followed:
            followed(report)
        return report

    def _alone(self, push: PushPayload, read: Callable[[], Payload]) -> UpdateReport:
        if self._relaying is not None:
            self._relaying.relays.clear()
        return push(read)

    def _warn_of_each_for_itself(self, rank: int, ranks: int) -> None:
        if rank and not self._warned:
            self._warned = True
            _log.warning(
                "rank %d of %d updates the engines by itself: where every rank holds the whole "
                "model (DDP), one of them should call update_weights(), and not each",
                rank,
                ranks,
            )


def leads(source: Callable[[], Any], trainer_ranks: TrainerRanks = "one") -> bool:
    """Whether this rank speaks to the engines; one that holds all weights by itself does.

    Args:
        source: Returns what is sent; asked only where there are other ranks.
        trainer_ranks: Of the options: ``"node"`` has one of all ranks speak, whatever they hold.

    Example:
        >>> leads(dict)
        True
    """
    channel = open_channel()
    if channel is None:
        return True
    takers = readers_of(source(), channel.ranks) or _everybody(channel.ranks, trainer_ranks)
    return not takers or channel.rank == min(takers)


def _everybody(ranks: int, trainer_ranks: TrainerRanks) -> set[int]:
    return set(range(ranks if trainer_ranks == "node" else 0))


def _meet(
    ranks: Collection[int], trouble: Exception | None, deadline: Deadline, engines: Sequence[str]
) -> None:
    """Waits for all ranks; raises on each of them what went wrong on one."""
    crew = Crew.without_weights(ranks, trouble, open_channel)
    assert crew is not None, "several ranks read together, and this is one of them"

    def lead() -> UpdateReport:
        crew.lead()
        return UpdateReport(0, 0, 0, 0, {}, {})

    crew.run(lead, deadline, engines)


def refuse_background(source: Any, trainer_ranks: TrainerRanks) -> None:
    """Raises ConfigurationError if other ranks must take part in an update of ``source``."""
    channel = open_channel()
    if channel is None:
        return
    if trainer_ranks == "node":
        raise ConfigurationError(
            "trainer_ranks='node' does not go with updates in the background: ranks that skip "
            "different ones would wait for each other",
            phase="plan",
            remedy="call update_weights() on every rank, or use trainer_ranks='one'",
        )
    if readers_of(source, channel.ranks):
        raise ConfigurationError(
            "a sharded model cannot be sent in the background: its ranks would read it while "
            "they train",
            phase="plan",
            remedy="call update_weights() on every rank",
        )


def _open_end(told: Mapping[str, Any], rank: int, device: torch.device) -> RelayGroup:
    return RelayGroup(
        name=told["name"],
        address=told["address"],
        port=told["port"],
        world_size=told["world_size"],
        rank=rank,
        device=device,
    )


def _raising(error: Exception) -> Callable[[], Payload]:
    def read() -> Payload:
        raise error

    return read
