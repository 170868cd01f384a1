"""A rank that reads along: it does what the leader says, and ends as the leader does."""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial
from itertools import count
from typing import Any

import torch

from weight_update.errors import UpdateTimeout, WeightUpdateError
from weight_update.report import UpdateReport, error_from_dict
from weight_update.update.crew import messages
from weight_update.update.crew.digests import digests
from weight_update.update.crew.duty import LET_GO_SECONDS, Duty
from weight_update.update.crew.reads import ReadingAlong
from weight_update.update.crew.recipes import told
from weight_update.update.crew.sharer import Sharer
from weight_update.waiting import Deadline

# The first bucket waits until all know of it, and every one until all have packed it.
_BUSY_POLL_SECONDS = 0.002


class Follower:
    """Follows one update.

    Args:
        duty: The update.
    """

    def __init__(self, duty: Duty) -> None:
        self._duty = duty
        self._channel = duty.channel
        self._reading = ReadingAlong(duty.weights, duty.reads)
        self._attempt = ""
        self._packs = False
        self._complained = False
        self._relay = None if duty.relaying is None else duty.relaying.relay
        self._sharer = None if duty.sharing is None else duty.sharing.sharer
        group = "" if self._relay is None else self._relay.group
        self._relay_told: tuple[str, BaseException | None] = (group, None)
        self._kept, self._patience = "", LET_GO_SECONDS

    def follow(self) -> UpdateReport:
        """Reads what is announced, until the leader says how it ended.

        Raises:
            WeightUpdateError: As on the leader.
        """
        duty = self._duty
        duty.enter()
        try:
            duty.await_earlier_reads()
        except WeightUpdateError as error:
            duty.trouble = duty.trouble or error
        token = self._report_for_duty()
        try:
            self._listen(token)
            return self._obey()
        except (KeyboardInterrupt, SystemExit) as interrupt:
            self._desert(interrupt)
            raise
        finally:
            if self._relay is not None:
                self._relay.settle(self._kept, self._patience)
            if self._sharer is not None and not self._reading.done:
                self._sharer.let_go()

    def _report_for_duty(self) -> str:
        """Says that this rank is ready, or why it is not."""
        duty, token = self._duty, uuid.uuid4().hex
        trouble = None if duty.trouble is None else messages.plain(duty.trouble, "plan")
        ready = {"token": token, "digests": digests(duty.weights), "error": trouble}
        shares = None if self._sharer is None else {"place": self._channel.place}
        ready |= {"engines": list(duty.engines), "relay": self._card(), "shares": shares}
        self._channel.post(messages.ready_key(duty.rank), ready)
        return token

    def _card(self) -> dict[str, Any] | None:
        """What the leader must know to have this rank in its group."""
        if self._relay is None:
            return None
        return {"place": self._channel.place, "group": self._relay.group}

    def _listen(self, token: str) -> None:
        """Waits until the leader has taken note, and learns where it speaks."""
        duty, grace = self._duty, messages.GRACE_SECONDS
        key = messages.answer_key(token)
        answer = self._seen(key, duty.deadline.afresh(duty.deadline.remaining() + grace))
        if answer is None and not self._channel.remove(messages.ready_key(duty.rank)):
            answer = self._seen(key, duty.deadline.afresh(grace))  # it was taken just now
        if answer is None:
            raise messages.absent(duty.ranks[:1], duty.deadline)
        self._channel.remove(key)
        self._attempt = answer["attempt"]
        duty.deadline = duty.deadline.afresh(answer["seconds"] + grace)

    def _obey(self) -> UpdateReport:
        for number in count():
            message = self._await(messages.said_key(self._attempt, number))
            if "report" in message or "error" in message:
                break
            self._do(message)
        return self._end(message)

    def _do(self, message: Mapping[str, Any]) -> None:
        relay = self._relay
        if "read" in message:
            self._reading.then(message["read"])
        elif "share" in message or "pack" in message:
            self._share(message)
        elif relay is None:
            return
        elif "join" in message and self._duty.rank in message["join"]["ranks"]:
            told = message["join"]
            relay.join(
                told, 1 + told["ranks"].index(self._duty.rank), self._device(told["backend"])
            )
        elif "take" in message:
            relay.take(message["take"], message["group"])
        elif message.get("drop") == relay.group:
            relay.drop()

    def _share(self, message: Mapping[str, Any]) -> None:
        """Plans or packs what the leader does, or only reads along, if others are to pack."""
        sharer = self._sharer
        if sharer is None or self._duty.rank not in message["ranks"]:
            self._reading.then(message.get("reads", ()))
        elif "share" in message:
            self._packs = True
            weights = self._duty.reads.in_turn(self._duty.weights, _already_announced)
            device = self._device("nccl" if message["on"] == "cuda" else "gloo")
            self._reading.then_do(0, partial(sharer.begin, message["share"], weights, device))
        else:
            self._reading.then_do(len(message["reads"]), partial(self._pack, sharer, message))

    def _pack(self, sharer: Sharer, message: Mapping[str, Any]) -> None:
        """Packs a bucket, and says where; without room for it, the others are not left alone."""
        reads = message["reads"]
        try:
            shared = sharer.pack(message["pack"], message["digest"])
        except Exception:
            if self._duty.reads.untouched(len(reads)):
                self._reading.read(reads)
            raise
        key = messages.shared_key(self._attempt, self._duty.rank, message["number"])
        self._channel.post(key, told(shared))

    def _device(self, backend: str) -> torch.device | None:
        """Where its bytes are; the model's GPU is this rank's, if it is on one."""
        if backend != "nccl":
            return torch.device("cpu")
        found = (w.device for w in self._duty.weights if w.device.type == "cuda")
        cuda: Any = torch.cuda
        if not cuda.is_available():
            return None
        return next(found, None) or torch.device("cuda", cuda.current_device())

    def _end(self, message: Mapping[str, Any]) -> UpdateReport:
        self._kept = message["group"]
        heard = messages.heard_key(self._attempt, self._duty.rank)
        if "error" in message:
            self._channel.post(heard, {})
            self._duty.reads.idle(LET_GO_SECONDS)
            cause = self._duty.trouble or self._reading.error() or self._relay_told[1]
            raise error_from_dict(message["error"]) from cause
        if not self._duty.reads.idle(self._duty.deadline.remaining()):
            raise messages.stuck(self._duty.rank)
        self._channel.post(heard, {})
        self._patience = self._duty.deadline.remaining()
        return UpdateReport.from_dict(message["report"])

    def _desert(self, interrupt: BaseException) -> None:
        """Nobody shall wait for a rank that leaves."""
        with suppress(WeightUpdateError):
            self._channel.remove(messages.ready_key(self._duty.rank))
            if self._attempt:
                self._complain(interrupt)

    def _await(self, key: str) -> dict[str, Any]:
        message = self._seen(key, self._duty.deadline)
        if message is None:
            raise UpdateTimeout(
                f"rank {self._duty.ranks[0]}, which talks to the engines, has said nothing for "
                f"{self._duty.deadline.seconds:.1f} s",
                phase="transfer",
                remedy="look at that rank: it has ended, or hangs",
            )
        return message

    def _seen(self, key: str, deadline: Deadline) -> dict[str, Any] | None:
        """The message under a key as soon as it is there; None at the deadline."""
        busy = self._relay is not None or self._packs
        for pause in messages.pauses(_BUSY_POLL_SECONDS if busy else messages.LAST_POLL_SECONDS):
            message = self._channel.peek(key)
            if message is not None or deadline.expired():
                return message
            self._look_after_reads()
            self._look_after_relay()
            deadline.sleep(pause)
        return None

    def _look_after_reads(self) -> None:
        error = self._reading.error()
        if error is not None and not self._complained:
            self._complained = True
            self._complain(error)

    def _look_after_relay(self) -> None:
        """Says when this rank has joined the group, and when it fails there."""
        relay = self._relay
        if relay is None or not self._attempt:
            return
        error = relay.error()
        now = (relay.group, error)
        if now != self._relay_told and (error is not None or relay.joined):
            self._relay_told = now
            told = None if error is None else messages.plain(error, "transfer")
            key = messages.relay_key(self._attempt, self._duty.rank)
            self._channel.post(key, {"group": relay.group, "error": told})

    def _complain(self, error: BaseException) -> None:
        fault = {"rank": self._duty.rank, "error": messages.plain(error, "transfer")}
        self._channel.post(messages.fault_key(self._attempt), fault)


def _already_announced(_: Sequence[int]) -> None:
    """The leader said what is read, and this rank reads just that."""
