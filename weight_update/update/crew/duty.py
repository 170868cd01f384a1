"""What a rank has to do in one update, and what it keeps from one to the next."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

from weight_update.errors import UpdateTimeout
from weight_update.update.crew.messages import Channel, stuck
from weight_update.update.crew.reads import Reads
from weight_update.update.crew.relay import Relay
from weight_update.update.crew.relays import Relays
from weight_update.update.crew.sharer import Sharer
from weight_update.update.crew.sharers import Sharers
from weight_update.waiting import Deadline
from weight_update.weights.shards.held import let_go
from weight_update.weights.specs import Weight

# After a failure, what a rank waits for its own reads: training goes on at once otherwise, and
# its collectives would meet those that still run.
LET_GO_SECONDS = 1.0


@dataclass
class Station:
    """What a rank keeps from one update to the next.

    Attributes:
        busy: Held by the update that runs.
        reads: Of the last update; one that failed may have left some behind.
        litter: Messages of updates that are over, by who was to hear them.
    """

    busy: threading.Lock = field(default_factory=threading.Lock)
    reads: Reads = field(default_factory=Reads)
    litter: dict[tuple[int, ...], list[str]] = field(default_factory=dict)


@dataclass(frozen=True)
class Relaying:
    """What a rank needs that is in the group of the rank that leads, or leads itself.

    Attributes:
        relay: Its end of the other's group.
        relays: The others in its own.
    """

    relay: Relay
    relays: Relays


@dataclass(frozen=True)
class Sharing:
    """What a rank needs that packs for engines on its own GPU, or has others do so.

    Attributes:
        sharer: Packs here what the rank that leads packs.
        sharers: The others that do, where this rank leads.
    """

    sharer: Sharer
    sharers: Sharers


_stations: WeakKeyDictionary[Any, Station] = WeakKeyDictionary()


@dataclass
class Duty:
    """One update, as one of its ranks sees it.

    Attributes:
        ranks: All that take part, in order; the first leads.
        channel: Messages between them.
        weights: What this rank extracted; the same on all.
        trouble: Why it could not.
        deadline: By when every rank must have come.
        reads: What was announced and is not read yet.
        entered: Whether the station is this update's.
        engines: What this rank would update, were it to lead.
        relaying: What it needs to take part in the group; None where the leader is alone in it.
        sharing: What it needs to pack too; None where the leader alone packs.
    """

    ranks: tuple[int, ...]
    channel: Channel
    weights: Sequence[Weight]
    trouble: Exception | None = None
    deadline: Deadline = field(default_factory=lambda: Deadline(0.0))
    reads: Reads = field(default_factory=Reads)
    entered: bool = False
    engines: tuple[str, ...] = ()
    relaying: Relaying | None = None
    sharing: Sharing | None = None

    def __post_init__(self) -> None:
        self.station = _stations.setdefault(self.channel, Station())

    @property
    def rank(self) -> int:
        """This rank."""
        return self.channel.rank

    def enter(self) -> None:
        """One update at a time: the ranks would not agree whose gather comes first."""
        if not self.station.busy.acquire(timeout=self.deadline.remaining()):
            raise UpdateTimeout(
                f"another update of rank {self.rank} still ran after {self.deadline.seconds:.1f} s",
                phase="plan",
            )
        self.entered = True

    def await_earlier_reads(self) -> None:
        """A gather that an earlier update left behind must not meet those of this one."""
        if not self.station.reads.idle(self.deadline.remaining() / 2):
            raise stuck(self.rank)
        self.station.reads = self.reads
        let_go()

    def leave(self) -> None:
        """The next update may come."""
        if self.entered:
            if self.station.reads.idle(0.0):
                let_go()
            self.station.busy.release()
