"""What the update procedure asks of engines and of the way that bytes take."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from weight_update.facts import Digests, Intake, NameCheck, Sighting
from weight_update.options import PauseMode, Way
from weight_update.waiting import Deadline
from weight_update.weights.buckets import Bucket, Plan
from weight_update.weights.cargo import Cargo, Format, Terms
from weight_update.weights.growing_plan import GrowingPlan
from weight_update.weights.specs import TensorSpec


class Session(Protocol):
    """One update of one engine.

    The procedure calls ``open``, then ``apply`` once a bucket, then ``close``. After a
    failure it calls ``recover`` instead, which must leave an engine that may continue.
    """

    def open(self, deadline: Deadline) -> bool:
        """Opens the update; returns whether another trainer's was open and had to be closed."""

    def apply(
        self, bucket: Bucket, cargo: Cargo, *, group_name: str, flush: bool, deadline: Deadline
    ) -> None:
        """Announces a bucket; returns when the engine has loaded it."""

    def close(self, deadline: Deadline) -> None:
        """Ends the update."""

    def recover(self, deadline: Deadline) -> None:
        """Undoes an unfinished update as far as the engine allows; nothing open is no error."""


class Engine(Protocol):
    """One inference engine, as the fleet sees it."""

    url: str
    harmless_name: str
    flush_skipped: str

    @property
    def ranks(self) -> int | None:
        """Ranks that join the group, or None when the engine does not say."""

    def inspect(self, deadline: Deadline) -> None:
        """Learns release and layout; raises if updates cannot work."""

    def objection(self, mode: PauseMode) -> str | None:
        """Why this engine cannot be updated under a pause mode; None when it can."""

    @property
    def salts_prefixes(self) -> bool:
        """Whether a request may bring a cache key that no older prefix matches."""

    @property
    def ends_without_group(self) -> bool:
        """Whether an update request that comes after its group was dropped ends the engine."""

    @property
    def intake(self) -> Intake:
        """How the engine takes weights, as far as it says."""

    @property
    def layout(self) -> str | None:
        """Equal for engines that hold equal weights in equal parts; None when it does not say."""

    def workers(self, deadline: Deadline) -> tuple[str, ...]:
        """URLs of the engines behind this one, if it is a router; none for an engine."""

    def observe(self, deadline: Deadline, *, readiness: bool = True) -> Sighting:
        """What the engine shows now; nothing is changed by looking.

        Args:
            deadline: Bound of the calls.
            readiness: Whether it matters if the engine generates, which may cost a call.
        """

    def label(self, deadline: Deadline) -> str | None:
        """The version label that the engine shows now."""

    def check_names(self, names: Sequence[str], deadline: Deadline) -> NameCheck:
        """Compares the names of a push with those that the engine can load."""

    def digests(self, deadline: Deadline) -> Digests | None:
        """Digests of all weights that it holds now, or None when it cannot make any."""

    def first_values(self, name: str, deadline: Deadline) -> tuple[float, ...] | None:
        """The start of the first row of a weight that it holds, or None when it cannot tell."""

    def join(
        self,
        *,
        address: str,
        port: int,
        rank_offset: int,
        world_size: int,
        group_name: str,
        backend: str,
        deadline: Deadline,
    ) -> None:
        """Joins a group; returns when all ranks of the engine have."""

    def leave(self, group_name: str, deadline: Deadline) -> None:
        """Drops a group."""

    def pause(self, mode: PauseMode, deadline: Deadline, *, again: bool) -> None:
        """Pauses generation; ``again`` when it may be paused already, in whatever mode."""

    def drain(self, mode: PauseMode, deadline: Deadline) -> None:
        """Waits for running requests, where that is meaningful."""

    def resume(self, deadline: Deadline) -> None:
        """Continues generation."""

    def can_flush(self, mode: PauseMode) -> bool:
        """Whether the prefix cache can be flushed under a pause mode."""

    def flushes_with_update(self, mode: PauseMode) -> bool:
        """Whether the last update request carries the flush."""

    def flush(self, deadline: Deadline) -> None:
        """Flushes the prefix cache, asking again while the engine is busy."""

    def flush_once(self, deadline: Deadline) -> bool:
        """Asks for one flush; whether it was done."""

    def stamp(self, label: str, deadline: Deadline) -> None:
        """Writes the version label."""

    def session(self, way: Way) -> Session:
        """A session for one update, whose bytes come by a way."""

    def close(self) -> None:
        """Closes connections."""


class Group(Protocol):
    """The group that an update's bytes travel in.

    Attributes:
        name: What engines know it by; empty where bytes take another way, and no engine joins.
    """

    name: str
    address: str
    port: int
    device: torch.device

    @property
    def given_up(self) -> bool:
        """Whether nothing can be sent in it any more."""

    @property
    def backend(self) -> str:
        """The torch backend that the engines must use too."""

    def join(self) -> None:
        """Joins as rank 0; blocks until every peer came or the group is given up."""

    def arrived(self, rank: int) -> bool:
        """Whether a rank has come to the rendezvous, as far as that can be seen."""

    def decoy(self) -> Group | None:
        """A rendezvous of the same name and place that nobody else joins, if one can be had."""

    def missing_rank(self) -> int | None:
        """The rank that is waited for right now, when that is known."""

    def broadcast(self, tensors: list[torch.Tensor]) -> None:
        """Starts sending to all engines."""

    def moving(self) -> bool:
        """Whether bytes are still under way; raises when they never will arrive."""

    def give_up(self) -> None:
        """Frees both ends without waiting."""


class Packer(Protocol):
    """Turns a bucket into the tensors that travel."""

    def format(self, specs: Sequence[TensorSpec] | None, terms: Terms) -> Format:
        """How tensors are divided among requests; None for those of a stream, not known yet."""

    def reserve(self, plan: Plan | GrowingPlan) -> None:
        """Learns what will be packed."""

    def objections(self, plan: Plan | GrowingPlan) -> list[str]:
        """Why some tensors cannot travel; empty when all can."""

    def pack(self, bucket: Bucket) -> Cargo:
        """What travels for a bucket."""

    def abandon(self) -> None:
        """Leaves the buffers to a pack that does not end; later ones get others."""
