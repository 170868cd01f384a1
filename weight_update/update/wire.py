"""The wire: the group and the packer in use, made for one fleet and remade when it changes.

Before an update relies on NCCL, or on memory that engines open, a tiny transfer shows that it
works: NCCL builds its communicator then, and what a request costs is measured. Where NCCL cannot
connect the two ends, another course is taken for this group, and the report says so; settings of
the process are never changed.
"""

from __future__ import annotations

import logging
import os
import weakref
from collections.abc import Mapping

import torch

from weight_update.errors import UpdateTimeout, WeightUpdateError
from weight_update.options import UpdateOptions, Way, check_device_exists, parse_device
from weight_update.update.connect import assign_ranks, join, leave
from weight_update.update.fleet import Attempt, Fleet, Member
from weight_update.update.protocols import Group, Packer
from weight_update.update.rehearsal import Rehearsal, Stage
from weight_update.update.ways import (
    NCCL_REMEDY,
    Course,
    Ends,
    choose_way,
    compared_settings,
    detours,
    is_nccls,
    nccl_settings,
)
from weight_update.waiting import Deadline, spawn
from weight_update.weights.buckets import Bucket, Plan
from weight_update.weights.specs import TensorSpec, Weight

_log = logging.getLogger("weight_update")

# A transfer that hangs leaves time for another course.
_TRIAL_SHARE = 0.5
_ANSWER_SHARE = 0.25
_MEASURED_REQUESTS = 3


class Wire:
    """Owns the group that bytes travel in.

    Args:
        ways: What each way needs.
        options: Device, backend, address and number of ranks, as far as they are given.

    Attributes:
        way: The way in use, or to be used first.
        reasons: Why it is in use, for the report.
        warnings: What is wrong with it, for the report.
        group: The group in use, if any.
        world_size: The trainer's ranks and those of all engines, once they were asked.
        request_seconds: What an update request costs whatever its size, once it was measured.
    """

    def __init__(self, ways: Mapping[Way, Ends], options: UpdateOptions) -> None:
        self.group: Group | None = None
        self.world_size: int | None = None
        self.request_seconds: float | None = None
        self.way: Way = next((way for way in ways if way == options.transport), next(iter(ways)))
        self.reasons: tuple[str, ...] = ()
        self.warnings: tuple[str, ...] = ()
        self._ways = ways
        self._options = options
        self._packer: Packer | None = None
        self._fleet = Fleet(())
        self._serves: tuple[tuple[str, int], ...] = ()
        self._asked: tuple[tuple[tuple[str, int], ...], Course] | None = None
        self._found: Course | None = None
        self._closings = 0
        self._live: list[tuple[Group, Fleet]] = []
        weakref.finalize(self, _let_go, self._live, os.getpid())

    @property
    def usable(self) -> bool:
        """Whether there is a group that was not given up."""
        return self.group is not None and not self.group.given_up

    def serves(self, fleet: Fleet) -> bool:
        """Whether there is a group of exactly these engines, as of their last start."""
        return self.usable and self._serves == fleet.identity

    def ends(self) -> tuple[Group, Packer]:
        """The group and the packer.

        Raises:
            WeightUpdateError: There is none yet.
        """
        if self.group is None or self._packer is None:
            raise WeightUpdateError("Communication group not initialized")
        return self.group, self._packer

    def packer_for(self, device: torch.device) -> Packer:
        """The packer in use, or one like it."""
        return self._packer or self._ways[self.way].open_packer(device)

    def device_for(self, device: torch.device) -> torch.device:
        """Where the bytes of weights on a device travel."""
        device = parse_device(self._options.device) or device
        backend = self._options.backend
        if backend == "gloo" or (backend == "auto" and device.type != "cuda"):
            return torch.device("cpu")
        return device if device.type == "cuda" else torch.device("cuda", 0)

    def connect(
        self, fleet: Fleet, device: torch.device, num_gpus: int | None, deadline: Deadline
    ) -> None:
        """Makes a group of exactly these engines; one that has them all is kept.

        Engines that a course was found for take it again, until one of them restarts.

        Raises:
            WeightUpdateError: An engine refused or did not come.
        """
        if self.serves(fleet):
            return
        self.drop()
        source = self.device_for(device)
        check_device_exists(source)
        way, reasons = choose_way(fleet, self._options, self._ways)
        wanted = Course(way, source, reasons)
        if self._asked != (fleet.identity, wanted):
            self._asked, self._found = (fleet.identity, wanted), None
            self.request_seconds = None
        self.world_size = assign_ranks(fleet, num_gpus, 1 + len(self._ways[way].others.ranks))
        self._take(self._found or wanted, fleet, deadline)

    def _take(self, course: Course, fleet: Fleet, deadline: Deadline) -> None:
        """Opens a course and shows that it works, or else takes another."""
        self._open(course, fleet, deadline)
        if course.is_tried:
            try:
                self._try(fleet, deadline.share(_TRIAL_SHARE))
            except WeightUpdateError as failure:
                self.drop()
                self._found = None
                return self._take_another(course, failure, fleet, deadline)
        self._found = course
        return None

    def _open(self, course: Course, fleet: Fleet, deadline: Deadline) -> None:
        closings = self._closings
        packer = self._ways[course.way].open_packer(course.device)
        self.way, self.warnings = course.way, course.warnings
        self.reasons = (*course.reasons, *self._ways[course.way].others.reasons)
        self.group = self._join(fleet, course, deadline)
        self._packer, self._fleet, self._serves = packer, fleet, fleet.identity
        self._live.append((self.group, fleet))
        if closings != self._closings:
            self.drop()
            raise WeightUpdateError("shut down while it connected", phase="connect")

    def _take_another(
        self, course: Course, failure: WeightUpdateError, fleet: Fleet, deadline: Deadline
    ) -> None:
        """Takes another course than one that failed, or raises the failure."""
        settings = compared_settings(
            nccl_settings(os.environ), [member.engine.intake for member in fleet.members]
        )
        others = detours(course, failure, self._options, self._ways, settings)
        if others and not _answering(fleet, deadline.share(_ANSWER_SHARE)):
            others = []
        for other in others:
            _log.warning(other.reasons[-1])
            try:
                return self._take(other, fleet, deadline)
            except WeightUpdateError as error:
                failure.add_note(f"nor did {other.way} work: {error}")
        if is_nccls(failure) and course.device.type == "cuda":
            failure.remedy = failure.remedy or f"{settings}; {NCCL_REMEDY}; or use backend='auto'"
        raise failure

    def _join(self, fleet: Fleet, course: Course, deadline: Deadline) -> Group:
        urls = [member.url for member in fleet.members]
        world_size = self.world_size or 1

        def open_group() -> Group:
            # Finding the address asks the resolver, which may take its time.
            ends = self._ways[course.way]
            opening = spawn(ends.open_group, urls, self._options, world_size, course.device)
            try:
                return opening.result(deadline.remaining())
            except TimeoutError as error:
                if opening.done():
                    raise
                raise UpdateTimeout(
                    f"no address to listen on was found in {deadline.seconds:.1f} s",
                    phase="connect",
                    remedy="set master_address=",
                ) from error

        return join(fleet, open_group, world_size, deadline)

    def drop(self) -> None:
        """Gives the group up on both ends."""
        group, fleet = self.group, self._fleet
        self.group, self._packer, self._serves = None, None, ()
        self._live.clear()
        if group is not None:
            group.give_up()
            leave(fleet, group)

    def close(self) -> None:
        """Gives the group up; one that is just being made is given up when it is there."""
        self._closings += 1
        self.drop()

    def _try(self, fleet: Fleet, deadline: Deadline) -> None:
        """Sends numbers that no loader keeps, in a short pause of their own.

        The first broadcast builds NCCL's communicator, in 0.4-0.8 s, and engines join one only
        inside an update. Those after it tell what a request costs.
        """
        value = torch.ones(1)
        name = fleet.members[0].engine.harmless_name
        number = Weight(TensorSpec(name, value.dtype, (1,)), value.device, value.detach)
        # Memory is opened whether a weight is in it or not, and a loader that tripped over a
        # number would end the engine here.
        bucket = Bucket(() if self.way == "ipc" else (number,))
        requests = 1 if self.request_seconds is not None else 1 + _MEASURED_REQUESTS
        tried = self.rehearse(fleet, Plan((bucket,) * requests), deadline)
        self.request_seconds = tried.request_seconds or self.request_seconds

    def rehearse(self, fleet: Fleet, plan: Plan, deadline: Deadline) -> Rehearsal:
        """Brings a plan of harmless names to the engines of the group.

        Raises:
            WeightUpdateError: A step failed; every engine was settled.
        """
        group, packer = self.ends()
        check = self._ways[self.way].others.check
        stage = Stage(fleet, group, packer, self.way, self.reasons, self._options, check)
        return stage.rehearse(plan, deadline)


def _answering(fleet: Fleet, deadline: Deadline) -> bool:
    """Whether every engine answers, and is the one that it was: what failed is over there too."""
    anew: list[str] = []

    def look(member: Member, _: Attempt) -> None:
        if member.is_another(member.engine.observe(deadline)):
            anew.append(member.url)

    try:
        fleet.each("connect", look, deadline)
    except WeightUpdateError:
        return False
    return not anew


def _let_go(live: list[tuple[Group, Fleet]], process: int) -> None:
    """A sender that was dropped without a shutdown leaves no group behind on the engines."""
    if os.getpid() != process:
        return  # a fork's copy: the group is the parent's
    for group, fleet in live:
        group.give_up()
        leave(fleet, group)
