"""The rank that talks to the engines: it says what is read next, and how it ended."""

from __future__ import annotations

import threading
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any

from weight_update.errors import (
    ConfigurationError,
    UpdateTimeout,
    WeightMismatchError,
    WeightUpdateError,
)
from weight_update.report import UpdateReport
from weight_update.update.crew import messages
from weight_update.update.crew.digests import differs_from
from weight_update.update.crew.duty import LET_GO_SECONDS, Duty
from weight_update.update.crew.messages import Neighbour
from weight_update.waiting import Deadline
from weight_update.weights.specs import Weight

Update = Callable[[], UpdateReport]


class Leader:
    """Leads one update.

    Args:
        duty: The update.
    """

    def __init__(self, duty: Duty) -> None:
        self._duty = duty
        self._channel = duty.channel
        self._others = duty.ranks[1:]
        self._relays = None if duty.relaying is None else duty.relaying.relays
        self._sharers = None if duty.sharing is None else duty.sharing.sharers
        self._attempt = uuid.uuid4().hex
        self._said = 0
        self._saying = threading.Lock()
        self._present: set[int] = set()
        self._over = False

    def command(self, update: Update) -> UpdateReport:
        """Runs ``update``, and tells the others how it ended.

        Raises:
            WeightUpdateError: What ``update`` raised, or a rank that is missing or failed.
        """
        try:
            report = self._updated(update)
            self._end({"report": report.to_dict()})
            self._await_hearing()
            return report
        finally:
            self._over = True
            if self._relays is not None:
                self._relays.leave()
            if self._sharers is not None:
                self._sharers.leave()

    def lead(self) -> tuple[Weight, ...]:
        """Waits until every rank is ready, and returns the weights, which then are read together.

        Raises:
            WeightUpdateError: A rank failed, has other weights, or did not come in time.
        """
        duty = self._duty
        duty.enter()
        if duty.trouble is not None:
            with suppress(UpdateTimeout):
                dict(self._muster())
            raise duty.trouble
        ready = dict(self._muster())
        self._sweep()
        for rank, message in sorted(ready.items()):
            self._inspect(rank, message)
        self._meet_relays(ready)
        if self._sharers is not None:
            self._sharers.enter(self, {rank: told["shares"] for rank, told in ready.items()})
        duty.await_earlier_reads()
        return duty.reads.in_turn(duty.weights, self._announce)

    def check(self) -> None:
        """Raises the error of another rank whose read failed, or that left the group."""
        if self._relays is not None:
            self._relays.check()
        if self._sharers is not None:
            self._sharers.check()
        self.raise_fault()

    def raise_fault(self) -> None:
        """Raises the error that another rank told of."""
        fault = self._channel.peek(messages.fault_key(self._attempt))
        if fault is not None:
            raise messages.error_of_rank(fault["rank"], fault["error"])

    # -- to those in the group ------------------------------------------------------------

    @property
    def deadline(self) -> Deadline:
        """By when the update ends."""
        return self._duty.deadline

    def neighbour(self, place: Mapping[str, Any]) -> Neighbour | None:
        """The process at another rank's place; None if it is on another host."""
        return self._channel.neighbour(place)

    def relay_says(self, rank: int) -> dict[str, Any] | None:
        """How a rank says that it fares in the group."""
        return self._channel.peek(messages.relay_key(self._attempt, rank))

    def shared_by(self, rank: int, number: int) -> dict[str, Any] | None:
        """Where a rank says that it packed something; None if it has not yet."""
        key = messages.shared_key(self._attempt, rank, number)
        message = self._channel.peek(key)
        if message is not None:
            self._channel.remove(key)
        return message

    def say(self, message: Mapping[str, Any]) -> None:
        """Tells all others, one message after the other, from whatever thread."""
        with self._saying:
            litter = self._duty.station.litter.setdefault(self._others, [])
            if not self._said:
                litter.append(messages.fault_key(self._attempt))
            for rank in message["ranks"] if "pack" in message else ():
                litter.append(messages.shared_key(self._attempt, rank, message["number"]))
            litter.append(messages.said_key(self._attempt, self._said))
            self._said += 1
            self._channel.post(litter[-1], message)

    def _meet_relays(self, ready: Mapping[int, Mapping[str, Any]]) -> None:
        if self._relays is None:
            return
        self._relays.enter(self, {rank: message["relay"] for rank, message in ready.items()})
        keys = [messages.relay_key(self._attempt, rank) for rank in self._relays.ranks]
        self._duty.station.litter.setdefault(self._others, []).extend(keys)

    def _end(self, message: Mapping[str, Any]) -> None:
        group = "" if self._relays is None else self._relays.group
        self.say({**message, "group": group})

    # -------------------------------------------------------------------------------------

    def _updated(self, update: Update) -> UpdateReport:
        try:
            if self._duty.trouble is not None:
                self.lead()
            return update()
        except BaseException as error:
            with suppress(Exception):  # the first error is the one to raise
                self._dismiss(error)
            raise

    def _dismiss(self, error: BaseException) -> None:
        if not self._duty.entered:  # it failed before it asked for the weights
            self._duty.deadline = self._duty.deadline.afresh(LET_GO_SECONDS)
            with suppress(WeightUpdateError):
                self.lead()
        self._end({"error": messages.plain(error, "plan")})
        self._duty.reads.idle(LET_GO_SECONDS)
        self._await_hearing()

    def _await_hearing(self) -> None:
        """Who holds the store must not end the process before all have heard how it ended."""
        waiting, end = set(self._present), self._duty.deadline.afresh(LET_GO_SECONDS)
        for pause in messages.pauses():
            heard = {rank: messages.heard_key(self._attempt, rank) for rank in waiting}
            waiting -= {rank for rank, key in heard.items() if self._channel.remove(key)}
            if not waiting or end.expired():
                break
            end.sleep(pause)
        if not waiting:
            self._sweep()

    def _muster(self) -> Iterator[tuple[int, dict[str, Any]]]:
        """Every other rank and what it has to say, as they come; each is told where to listen."""
        missing, deadline = set(self._others), self._duty.deadline
        for pause in messages.pauses():
            for rank in sorted(missing):
                key = messages.ready_key(rank)
                message = self._channel.peek(key)
                # One that has given up meanwhile took its message back.
                if message is not None and self._channel.remove(key):
                    missing.remove(rank)
                    self._present.add(rank)
                    self._answer(message["token"])
                    yield rank, message
            if not missing:
                return
            if deadline.expired():
                raise messages.absent(missing, deadline)
            deadline.sleep(pause)

    def _answer(self, token: str) -> None:
        patience = self._duty.deadline.remaining() + messages.GRACE_SECONDS
        answer = {"attempt": self._attempt, "seconds": patience}
        self._channel.post(messages.answer_key(token), answer)

    def _inspect(self, rank: int, message: Mapping[str, Any]) -> None:
        """Raises if a rank could not extract its weights, has others, or runs another update."""
        if message["error"] is not None:
            raise messages.error_of_rank(rank, message["error"])
        mine, theirs = self._duty.engines, message["engines"]
        if mine and theirs and not set(mine) & set(theirs):
            raise ConfigurationError(
                f"rank {rank} updates {theirs[0]}, and rank {self._duty.rank} {mine[0]}",
                phase="plan",
                remedy="give every rank the same URLs, and call senders in the same order on all",
            )
        name = differs_from(self._duty.weights, message["digests"])
        if name is not None:
            where = f" from {name!r} on" if name else ""
            raise WeightMismatchError(
                f"rank {rank} has other weights than rank {self._duty.rank}{where}",
                phase="plan",
                remedy="pass the same model on every rank, wrapped alike",
            )

    def _announce(self, indices: Sequence[int]) -> None:
        if self._over:
            raise WeightUpdateError("the update that this bucket belongs to is over")
        if not self._duty.reads.idle(self._duty.deadline.remaining()):
            raise messages.stuck(self._duty.rank)
        self._duty.reads.expect(len(indices))
        if self._sharers is None or not self._sharers.packing:
            self.say({"read": list(indices)})

    def _sweep(self) -> None:
        """Removes what was said before: every rank that is ready has heard it."""
        for key in self._duty.station.litter.pop(self._others, ()):
            self._channel.remove(key)
