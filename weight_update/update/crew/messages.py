"""What the ranks say to each other, under which keys, and how long they listen.

========================== ========== ===================================================
key                        from       message
========================== ========== ===================================================
``ready/{rank}``           a follower its token, its engines and digests, or its error; where
                                      it runs, and the group it is in, if it may join one
``answer/{token}``         the leader where it will speak, and for how long
``{attempt}/{number}``     the leader what is read next; which group to join, what is broadcast
                                      in it next, or that it is over; how to plan, and what is
                                      packed next; at last the report, or the error, and the
                                      group that may be used again
``{attempt}/fault``        a follower the error of a read that failed
``{attempt}/relay/{rank}`` a follower the group that it joined, or its error there
``{attempt}/shared/...``   a follower where a bucket lies that it packed
``{attempt}/heard/{rank}`` a follower that it knows how it ended
========================== ========== ===================================================
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Protocol

from weight_update.errors import Phase, UpdateTimeout, WeightUpdateError, wrapped
from weight_update.report import error_from_dict
from weight_update.waiting import Deadline

_FIRST_POLL_SECONDS = 0.001
LAST_POLL_SECONDS = 0.02
# An update may take this much longer than its time-out; so the others wait for its end.
GRACE_SECONDS = 5.0


class Neighbour(Protocol):
    """Another rank on this host."""

    def ended(self) -> bool:
        """Whether its process has surely ended."""


class Channel(Protocol):
    """Messages between the ranks of one trainer; a message stays until it is removed."""

    @property
    def rank(self) -> int:
        """This process among all ranks."""

    @property
    def ranks(self) -> int:
        """How many ranks there are."""

    @property
    def place(self) -> Mapping[str, Any]:
        """Where this rank runs, as a message can hold it."""

    def neighbour(self, place: Mapping[str, Any]) -> Neighbour | None:
        """The process at another rank's place; None if it is on another host."""

    def post(self, key: str, message: Mapping[str, Any]) -> None:
        """Leaves a message, in place of one that is there."""

    def peek(self, key: str) -> dict[str, Any] | None:
        """The message that is there, which stays; None if there is none."""

    def remove(self, key: str) -> bool:
        """Takes a message away; False if there was none (any more)."""


def ready_key(rank: int) -> str:
    """Where a follower says that it has come."""
    return f"ready/{rank}"


def answer_key(token: str) -> str:
    """Where the leader answers it."""
    return f"answer/{token}"


def said_key(attempt: str, number: int) -> str:
    """Where the leader speaks, one message after the other."""
    return f"{attempt}/{number}"


def fault_key(attempt: str) -> str:
    """Where a follower says that its read failed."""
    return f"{attempt}/fault"


def relay_key(attempt: str, rank: int) -> str:
    """Where a follower says how it fares in the leader's group."""
    return f"{attempt}/relay/{rank}"


def shared_key(attempt: str, rank: int, number: int) -> str:
    """Where a follower says where its memory holds a bucket."""
    return f"{attempt}/shared/{rank}/{number}"


def heard_key(attempt: str, rank: int) -> str:
    """Where a follower says that it heard the end."""
    return f"{attempt}/heard/{rank}"


def pauses(longest: float = LAST_POLL_SECONDS) -> Iterator[float]:
    """Seconds between two looks at the channel: short ones first."""
    pause = _FIRST_POLL_SECONDS
    while True:
        yield pause
        pause = min(1.3 * pause, longest)


def plain(error: BaseException, phase: Phase) -> dict[str, Any]:
    """An error as a message can hold it."""
    if not isinstance(error, Exception):
        error = WeightUpdateError(f"it was interrupted by {type(error).__name__}", phase=phase)
    return wrapped(error, phase).to_dict()


def error_of_rank(rank: int, told: Mapping[str, Any]) -> WeightUpdateError:
    """The error that a rank told of."""
    return error_from_dict({**told, "message": f"rank {rank}: {told['message']}"})


def has_ended(rank: int) -> WeightUpdateError:
    """A rank that took part is gone."""
    return WeightUpdateError(
        f"rank {rank} of the trainer has ended",
        remedy="restart the trainer; a sender of a single rank heals the engines",
    )


def absent(ranks: Iterable[int], deadline: Deadline) -> UpdateTimeout:
    """Some ranks did not come."""
    several = ", ".join(map(str, sorted(ranks)))
    return UpdateTimeout(
        f"rank(s) {several} did not call update_weights() within {deadline.seconds:.1f} s",
        phase="plan",
        remedy="of a sharded trainer every rank calls it",
    )


def stuck(rank: int) -> UpdateTimeout:
    """A gather of an update that is over still runs."""
    return UpdateTimeout(
        f"the training group is stuck: rank {rank} is still in a gather that an update began",
        phase="plan",
        remedy="another rank did not take part in it; once the group's own time-out ends it, look "
        "whether the group still works, else restart the trainer",
    )
