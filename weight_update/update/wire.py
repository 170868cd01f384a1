"""The wire: the group and the packer in use, made for one fleet and remade when it changes."""

from __future__ import annotations

import os
import weakref
from collections.abc import Mapping, Sequence

import torch

from weight_update.errors import ConfigurationError, UpdateTimeout, WeightUpdateError
from weight_update.options import UpdateOptions, Way, check_device_exists, parse_device
from weight_update.update.connect import assign_ranks, join, leave
from weight_update.update.fleet import Fleet
from weight_update.update.procedure import Procedure
from weight_update.update.protocols import Group, Packer
from weight_update.update.rules import UpdateRules
from weight_update.update.ways import Ends, choose_way
from weight_update.waiting import Deadline, spawn
from weight_update.weights.buckets import plan_buckets
from weight_update.weights.specs import TensorSpec, Weight


class Wire:
    """Owns the group that bytes travel in.

    Args:
        ways: What each way needs.
        options: Device, backend, address and number of ranks, as far as they are given.

    Attributes:
        way: The way in use, or to be used first.
        reasons: Why it is in use, for the report.
        group: The group in use, if any.
        world_size: 1 + the ranks of all engines, once they were asked.
        request_seconds: What an update request costs whatever its size, once it was measured.
    """

    def __init__(self, ways: Mapping[Way, Ends], options: UpdateOptions) -> None:
        self.group: Group | None = None
        self.world_size: int | None = None
        self.request_seconds: float | None = None
        self.way: Way = next(iter(ways))
        self.reasons: tuple[str, ...] = ()
        self._ways = ways
        self._options = options
        self._packer: Packer | None = None
        self._fleet = Fleet(())
        self._serves: tuple[tuple[str, int], ...] = ()
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

        Raises:
            WeightUpdateError: An engine refused or did not come.
        """
        if self.serves(fleet):
            return
        self.drop()
        self.way, self.reasons = choose_way(fleet, self._options, self._ways)
        device = self.device_for(device)
        check_device_exists(device)
        self.world_size = world_size = assign_ranks(fleet, num_gpus)
        closings = self._closings
        packer = self._ways[self.way].open_packer(device)
        self.group = self._join(fleet, world_size, device, deadline)
        self._packer, self._fleet, self._serves = packer, fleet, fleet.identity
        self._live.append((self.group, fleet))
        if closings != self._closings:
            self.drop()
            raise WeightUpdateError("shut down while it connected", phase="connect")
        if device.type == "cuda":
            self._warm_up(fleet, device, deadline)

    def _join(
        self, fleet: Fleet, world_size: int, device: torch.device, deadline: Deadline
    ) -> Group:
        urls = [member.url for member in fleet.members]

        def open_group() -> Group:
            # Finding the address asks the resolver, which may take its time.
            opening = spawn(
                self._ways[self.way].open_group, urls, self._options, world_size, device
            )
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

    def _warm_up(self, fleet: Fleet, device: torch.device, deadline: Deadline) -> None:
        """Builds the NCCL communicator before the first update, in a short pause of its own.

        It is built by the first broadcast, in 0.4-0.8 s; engines join one only inside an
        update, so this is an update of one number that no loader keeps.
        """
        group, packer = self.ends()
        name = fleet.members[0].engine.harmless_name
        value = torch.ones(1, device=device)
        weight = Weight(TensorSpec(name, torch.float32, (1,)), device, lambda: value)
        rules = UpdateRules(
            self._options.effective_pause_mode(),
            flush=False,
            on_failure=self._options.on_failure,
            full=False,
        )
        plan = plan_buckets([weight], 1)
        Procedure(fleet, group, packer, plan, rules, deadline, way=self.way).run()


def refuse_meta(weights: Sequence[Weight]) -> None:
    """Raises ConfigurationError if some weights have no values."""
    meta = [weight.spec.name for weight in weights if weight.device.type == "meta"]
    if meta:
        raise ConfigurationError(
            f"{len(meta)} weight(s) are on the meta device and have no values: {meta[0]!r}, ...",
            phase="plan",
            remedy="register the model that holds the trained values",
        )


def _let_go(live: list[tuple[Group, Fleet]], process: int) -> None:
    """A sender that was dropped without a shutdown leaves no group behind on the engines."""
    if os.getpid() != process:
        return  # a fork's copy: the group is the parent's
    for group, fleet in live:
        group.give_up()
        leave(fleet, group)
