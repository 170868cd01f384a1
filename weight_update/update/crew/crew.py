"""The ranks that read one list of weights together, as one of them sees them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

from weight_update.errors import ConfigurationError
from weight_update.report import UpdateReport
from weight_update.update.crew.duty import Duty, Relaying, Sharing
from weight_update.update.crew.follower import Follower
from weight_update.update.crew.leader import Leader, Update
from weight_update.update.crew.messages import Channel
from weight_update.waiting import Deadline
from weight_update.weights.specs import Weight

OpenChannel = Callable[[], Channel | None]


class Crew:
    """The ranks that read one list of weights together, as one of them sees them.

    1. :meth:`of` says whether anything has to be read together at all.
    2. :meth:`run` runs the update on the leader, which calls :meth:`lead` once it needs the
       weights, and follows on all others.

    Args:
        ranks: All that take part, this one included.
        channel: Messages between them.
        weights: What this rank extracted; the same on all.
        trouble: Why it could not.
        relaying: What it takes to be in the leader's group, if they are to be.
        sharing: What it takes to pack too, where engines open memory.
    """

    def __init__(
        self,
        ranks: Collection[int],
        channel: Channel,
        weights: Sequence[Weight],
        trouble: Exception | None = None,
        relaying: Relaying | None = None,
        sharing: Sharing | None = None,
    ) -> None:
        ordered = tuple(sorted(ranks))
        duty = Duty(ordered, channel, weights, trouble, relaying=relaying, sharing=sharing)
        self._duty = duty
        self._leader = Leader(self._duty)

    @classmethod
    def of(
        cls,
        weights: Sequence[Weight],
        open_channel: OpenChannel,
        relaying: Relaying | None = None,
        sharing: Sharing | None = None,
    ) -> Crew | None:
        """The crew that reads ``weights``; None where this rank can read all by itself.

        Args:
            weights: What this rank extracted.
            open_channel: Opens the channel, or returns None where there is but one rank.
            relaying: Has every rank take part, also of what nobody has to read together.
            sharing: Has ranks pack that share a GPU with an engine.

        Raises:
            ConfigurationError: This rank holds no part of them.
        """
        together = [weight for weight in weights if weight.collective]
        channel = open_channel() if together or relaying else None
        if channel is None:
            return None
        everybody = range(channel.ranks)
        readers = {rank for weight in together for rank in weight.ranks or everybody}
        ranks = readers or set(everybody)
        return cls._among(ranks, channel, weights, relaying=relaying, sharing=sharing)

    @classmethod
    def without_weights(
        cls,
        ranks: Collection[int],
        trouble: Exception | None,
        open_channel: OpenChannel,
        relaying: Relaying | None = None,
        sharing: Sharing | None = None,
    ) -> Crew | None:
        """The crew of a rank that has nothing to read: it failed before, or all only meet.

        Args:
            ranks: Who takes part; none if nothing is read together.
            trouble: What went wrong; all of them will raise it. None where nothing did.
            open_channel: As in :meth:`of`.
            relaying: As in :meth:`of`.
            sharing: Likewise.
        """
        channel = open_channel() if ranks else None
        if channel is None:
            return None
        return cls._among(set(ranks), channel, (), trouble, relaying, sharing)

    @classmethod
    def _among(
        cls,
        ranks: set[int],
        channel: Channel,
        weights: Sequence[Weight],
        trouble: Exception | None = None,
        relaying: Relaying | None = None,
        sharing: Sharing | None = None,
    ) -> Crew | None:
        if channel.rank not in ranks:
            raise ConfigurationError(
                f"rank {channel.rank} holds no part of these weights; ranks "
                f"{', '.join(map(str, sorted(ranks)))} do",
                phase="plan",
                remedy="call update_weights() on those ranks only",
            )
        if len(ranks) == 1:
            return None
        return cls(ranks, channel, weights, trouble, relaying, sharing)

    @property
    def leads(self) -> bool:
        """Whether this rank talks to the engines."""
        return self._duty.rank == self._duty.ranks[0]

    def run(self, update: Update, deadline: Deadline, engines: Sequence[str] = ()) -> UpdateReport:
        """Runs ``update`` on the leader, and follows it on the others.

        Args:
            update: Updates the engines; it gets its weights from :meth:`lead`.
            deadline: By when every rank must have come. An update that runs is waited for as
                long as it says.
            engines: URLs of what this rank means to update. One that shares none with the leader
                runs another update, of a model that may look just the same.

        Raises:
            WeightUpdateError: The same on all ranks.
        """
        self._duty.deadline, self._duty.engines = deadline, tuple(engines)
        try:
            return self._leader.command(update) if self.leads else Follower(self._duty).follow()
        finally:
            self._duty.leave()

    def lead(self) -> tuple[Weight, ...]:
        """Waits until every rank is ready, and returns the weights, which then are read together.

        Raises:
            WeightUpdateError: A rank failed, has other weights, or did not come in time.
        """
        return self._leader.lead()

    def check(self) -> None:
        """Raises the error of another rank whose read failed."""
        self._leader.check()
