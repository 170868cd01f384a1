"""The updater: one fleet, one group, one update at a time, and a version that counts them."""

from __future__ import annotations

import logging
import os
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch

from weight_update.errors import (
    ConfigurationError,
    EngineRejected,
    EngineUnreachable,
    UpdateTimeout,
    WeightUpdateError,
    wrapped,
)
from weight_update.options import PauseMode, UpdateOptions, check_device_exists, parse_device
from weight_update.report import EngineOutcome, EngineState, ProgressHook, UpdateReport
from weight_update.update.connect import assign_ranks, join, leave
from weight_update.update.fleet import Attempt, Fleet, Member
from weight_update.update.procedure import Procedure, Stopwatch
from weight_update.update.progress import Meter
from weight_update.update.protocols import Engine, Group, Packer
from weight_update.update.rules import UpdateRules
from weight_update.update.versions import next_version
from weight_update.waiting import Deadline
from weight_update.weights.buckets import (
    DEFAULT_BUCKET_BYTES,
    Plan,
    plan_buckets,
)
from weight_update.weights.specs import TensorSpec, Weight

_log = logging.getLogger("weight_update")

_FLUSH_SECONDS = 30.0
_PROBE_SECONDS = 0.3

GroupFactory = Callable[[Sequence[str], UpdateOptions, int, torch.device], Group]
PackerFactory = Callable[[torch.device], Packer]


class Updater:
    """Brings weights to a fleet of engines, again and again.

    1. :meth:`connect` (or the first :meth:`update`) inspects the engines and makes the group.
    2. :meth:`update` runs the procedure; a failed one gives the group up if it must, and the
       next makes a new one.
    3. :meth:`shutdown` gives the group up on both ends.

    Args:
        engines: The fleet.
        open_group: Makes the group that bytes travel in.
        open_packer: Makes the packer for a device.
        options: Everything that shapes an update.

    Attributes:
        version: The last version that every engine confirmed; 0 before the first.
        world_size: 1 + the ranks of all engines, once they were asked.
    """

    def __init__(
        self,
        engines: Sequence[Engine],
        open_group: GroupFactory,
        open_packer: PackerFactory,
        options: UpdateOptions,
    ) -> None:
        self.version = 0
        self.options = options
        self._fleet = Fleet(engines)
        self._open_group = open_group
        self._open_packer = open_packer
        self._group: Group | None = None
        self._packer: Packer | None = None
        self._busy = threading.Lock()
        self._owner: int | None = None
        self._warned: set[str] = set()
        self._closings = 0
        self._live: list[Group] = []
        weakref.finalize(self, _let_go, self._fleet, self._live, os.getpid())
        self.world_size: int | None = None

    @property
    def connected(self) -> bool:
        """Whether a usable group exists."""
        return self._group is not None and not self._group.given_up

    @property
    def engines(self) -> dict[str, EngineOutcome]:
        """What is known of each engine, by URL."""
        return self._fleet.outcomes()

    @property
    def group(self) -> Group | None:
        """The group, once made."""
        return self._group

    def connect(self, device: torch.device) -> None:
        """Inspects the engines and makes a new group; one that exists is given up.

        Args:
            device: Where the weights live; the options' device wins.

        Raises:
            WeightUpdateError: An engine cannot take updates, refused or did not come.
        """
        deadline = Deadline(self.options.timeout)
        watch = Stopwatch()
        with self._reporting(watch), self._exclusively(deadline):
            self._drop_group()
            self._connect(device, deadline, watch)

    def update(
        self,
        read: Callable[[], Sequence[Weight]],
        *,
        counted: Callable[[int], Sequence[str]],
        whole: bool = True,
        progress: ProgressHook | None = None,
    ) -> UpdateReport:
        """Runs one update.

        Args:
            read: Returns what to send, in order.
            counted: Called with the new version once every engine has everything and before
                any continues; returns warnings.
            whole: Whether the weights are a whole model's.
            progress: Told of each phase and of each confirmed bucket.

        Returns:
            The report; every engine is ``new``.

        Raises:
            WeightUpdateError: With ``report``, ``phase`` and ``engine`` set.
        """
        deadline = Deadline(self.options.timeout)
        watch = Stopwatch(Meter(progress))
        with self._reporting(watch) as attempt, self._exclusively(deadline):
            for member in self._fleet.members:
                member.start(Attempt())
            with watch.running("plan"):
                weights = read()
                _refuse_meta(weights)
                self._observe(deadline)
            self._connect(weights[0].device, deadline, watch)
            procedure = self._procedure(weights, counted, deadline, watch, whole=whole)
            attempt.append(procedure)
            procedure.run()
            self._warn(procedure.warnings)
            return procedure.report(self.version)

    def plan(self, weights: Sequence[Weight]) -> Plan:
        """What an update of ``weights`` would send, in which requests; asks no engine."""
        device = self._wire_device(weights[0].device)
        return self._plan(weights, device, self._packer or self._open_packer(device))

    def flush_cache(self) -> bool:
        """Flushes every prefix cache once; False if one was not, and the log says why."""
        deadline = Deadline(min(_FLUSH_SECONDS, self.options.timeout))

        def flush(member: Member, _: Attempt) -> None:
            if not member.engine.flush_once(deadline):
                raise EngineRejected("the cache was not flushed", engine=member.url, phase="flush")

        try:
            with self._exclusively(deadline):
                self._fleet.each("flush", flush, deadline)
        except WeightUpdateError as error:
            _log.warning(error)
            return False
        return True

    def shutdown(self) -> None:
        """Gives the group up on both ends; safe to call at any time, repeatedly."""
        self._closings += 1
        self._drop_group()
        for member in self._fleet.members:
            member.engine.close()

    # -- steps --------------------------------------------------------------------------

    def _connect(self, device: torch.device, deadline: Deadline, watch: Stopwatch) -> None:
        if self.connected:
            return
        self._drop_group()
        with watch.running("connect"):
            device = self._wire_device(device)
            check_device_exists(device)
            self._fleet.each("connect", lambda m, _: m.engine.inspect(deadline), deadline)
            for member in self._fleet.members:
                _refuse_mode(member, self.options.effective_pause_mode())
            self.world_size = world_size = assign_ranks(self._fleet, self.options.num_gpus)
            urls = [member.url for member in self._fleet.members]
            closings = self._closings
            packer = self._open_packer(device)
            group = join(
                self._fleet,
                lambda: self._open_group(urls, self.options, world_size, device),
                world_size,
                deadline,
            )
            self._group, self._packer = group, packer
            self._live.append(group)
            if closings != self._closings:
                self._drop_group()
                raise WeightUpdateError("shut down while it connected", phase="connect")
            if device.type == "cuda":
                self._warm_up(device, deadline)

    def _drop_group(self) -> None:
        group, self._group, self._packer = self._group, None, None
        self._live.clear()
        if group is not None:
            group.give_up()
            leave(self._fleet, group)

    def _warm_up(self, device: torch.device, deadline: Deadline) -> None:
        """Builds the NCCL communicator before the first update, in a short pause of its own.

        It is built by the first broadcast, in 0.4-0.8 s; engines join one only inside an
        update, so this is an update of one number that no loader keeps.
        """
        group, packer = self._wire()
        name = self._fleet.members[0].engine.harmless_name
        value = torch.ones(1, device=device)
        weight = Weight(TensorSpec(name, torch.float32, (1,)), device, lambda: value)
        rules = UpdateRules(
            self.options.effective_pause_mode(),
            flush=False,
            on_failure=self.options.on_failure,
            full=False,
        )
        plan = plan_buckets([weight], 1)
        Procedure(self._fleet, group, packer, plan, rules, deadline).run()

    def _wire_device(self, device: torch.device) -> torch.device:
        device = parse_device(self.options.device) or device
        if self.options.backend == "gloo" or (
            self.options.backend == "auto" and device.type != "cuda"
        ):
            return torch.device("cpu")
        return device if device.type == "cuda" else torch.device("cuda", 0)

    def _observe(self, deadline: Deadline) -> None:
        """Reads every engine's label: one that went back tells of a restart."""
        labels: dict[str, str | None] = {}

        def look(member: Member, _: Attempt) -> None:
            labels[member.url] = member.engine.label(deadline)

        try:
            self._fleet.each("plan", look, deadline)
        finally:
            self._take_note(dict(labels))

    def _take_note(self, labels: Mapping[str, str | None]) -> None:
        seen = [member for member in self._fleet.members if member.url in labels]
        restarted = [m for m in seen if m.label not in (None, labels[m.url])]
        for member in restarted:
            member.forget()
        for member in seen:
            member.label = labels[member.url]
        if restarted:
            self._drop_group()

    def _procedure(
        self,
        weights: Sequence[Weight],
        counted: Callable[[int], Sequence[str]],
        deadline: Deadline,
        watch: Stopwatch,
        *,
        whole: bool,
    ) -> Procedure:
        group, packer = self._wire()
        version = next_version(self.version, [m.label for m in self._fleet.members])

        def count() -> Sequence[str]:
            self.version = version
            return counted(version)

        rules = UpdateRules(
            pause_mode=self.options.effective_pause_mode(),
            flush=self.options.flush_wanted(),
            on_failure=self.options.on_failure,
            whole=whole,
            label=str(version),
            counted=count,
        )
        plan = self._plan(weights, group.device, packer)
        watch.meter.plan(plan)
        return Procedure(self._fleet, group, packer, plan, rules, deadline, watch)

    def _plan(self, weights: Sequence[Weight], device: torch.device, packer: Packer) -> Plan:
        asked = self.options.bucket_bytes
        size = asked or DEFAULT_BUCKET_BYTES[device.type]
        return plan_buckets(weights, size, packer.packs, even=asked is None)

    def _wire(self) -> tuple[Group, Packer]:
        if self._group is None or self._packer is None:
            raise WeightUpdateError("Communication group not initialized")
        return self._group, self._packer

    # -- bookkeeping --------------------------------------------------------------------

    @contextmanager
    def _exclusively(self, deadline: Deadline) -> Iterator[None]:
        if self._owner == threading.get_ident():
            raise ConfigurationError(
                "a hook of a running update called its sender",
                phase="plan",
                remedy="call it once the update has returned",
            )
        if not self._busy.acquire(timeout=deadline.remaining()):
            raise UpdateTimeout(
                f"another update was still running after {deadline.seconds:.1f} s", phase="plan"
            )
        self._owner = threading.get_ident()
        try:
            yield
        finally:
            self._owner = None
            self._busy.release()

    @contextmanager
    def _reporting(self, watch: Stopwatch) -> Iterator[list[Procedure]]:
        """Every failure leaves as a WeightUpdateError that carries the report."""
        attempt: list[Procedure] = []
        try:
            yield attempt
        except Exception as error:  # noqa: BLE001 - re-raised with its report
            failure = wrapped(error, watch.phase)
            if watch.phase in ("plan", "connect"):
                _note_the_dead(self._fleet)
            if failure.phase == "configure":
                failure.phase = watch.phase
            failure.report = self._report_of(attempt, watch)
            raise failure from failure.__cause__
        except BaseException as interrupt:
            lines = self._report_of(attempt, watch).engine_lines()
            interrupt.add_note("the weight update was interrupted; " + "; ".join(lines))
            raise

    def _report_of(self, attempt: list[Procedure], watch: Stopwatch) -> UpdateReport:
        if attempt:
            return attempt[0].report(self.version)
        return UpdateReport(
            version=self.version,
            bytes=0,
            tensors=0,
            buckets=0,
            seconds=watch.finish(),
            engines=self.engines,
        )

    def _warn(self, warnings: Sequence[str]) -> None:
        for warning in warnings:
            if warning not in self._warned:
                self._warned.add(warning)
                _log.warning(warning)


def _let_go(fleet: Fleet, live: list[Group], process: int) -> None:
    """A sender that was dropped without a shutdown leaves no group behind on the engines."""
    if os.getpid() != process:
        return  # a fork's copy: the group is the parent's
    for group in live:
        group.give_up()
        leave(fleet, group)


def _note_the_dead(fleet: Fleet) -> None:
    for member in fleet.members:
        call = member.call
        error = call.exception() if call is not None and call.done() else None
        if isinstance(error, EngineUnreachable) and not _answers(member):
            member.state, member.detail = EngineState.UNREACHABLE, error.message


def _answers(member: Member) -> bool:
    try:
        member.engine.label(Deadline(_PROBE_SECONDS))
    except EngineUnreachable:
        return False
    except WeightUpdateError:
        return True
    return True


def _refuse_mode(member: Member, mode: PauseMode) -> None:
    objection = member.engine.objection(mode)
    if objection:
        raise ConfigurationError(objection, engine=member.url, phase="connect")


def _refuse_meta(weights: Sequence[Weight]) -> None:
    meta = [weight.spec.name for weight in weights if weight.device.type == "meta"]
    if meta:
        raise ConfigurationError(
            f"{len(meta)} weight(s) are on the meta device and have no values: {meta[0]!r}, ...",
            phase="plan",
            remedy="register the model that holds the trained values",
        )
