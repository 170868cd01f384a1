"""The updater: one fleet, one wire, one update at a time, and a version that counts them."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field

import torch

from weight_update.errors import (
    ConfigurationError,
    EngineRejected,
    EngineUnreachable,
    UpdateTimeout,
    WeightMismatchError,
    WeightUpdateError,
    wrapped,
)
from weight_update.options import UpdateOptions, Way, check_quorum
from weight_update.report import EngineOutcome, EngineState, ProgressHook, Route, UpdateReport
from weight_update.update.connect import leave
from weight_update.update.fleet import Attempt, Fleet, Member, culprits
from weight_update.update.planning import Payload, PlanMemory, fitted_plan, planned
from weight_update.update.procedure import Procedure
from weight_update.update.progress import Meter, Stopwatch
from weight_update.update.protocols import Engine, Group
from weight_update.update.reader import Reader, callers_stream, in_time, nobody_else
from weight_update.update.rehearsal import Rehearsal, refuse_large
from weight_update.update.roster import Roster
from weight_update.update.rules import UpdateRules, own_manners
from weight_update.update.settle import RESUME_SECONDS, release
from weight_update.update.signals import orderly_end
from weight_update.update.turns import one_at_a_time, turn
from weight_update.update.versions import next_version
from weight_update.update.ways import Ends
from weight_update.update.wire import Wire, refuse_meta
from weight_update.waiting import Clock, Deadline, hand_over, spawn
from weight_update.weights.buckets import Plan
from weight_update.weights.cargo import Format, Formats, Terms
from weight_update.weights.fitting import with_dtype
from weight_update.weights.growing_plan import GrowingPlan
from weight_update.weights.specs import Weight

_log = logging.getLogger("weight_update")

_FLUSH_SECONDS = 30.0
_RECOVERY_POLL_SECONDS = 0.5
_JUDGE_SECONDS = 1.0
# Who does not answer is met again when engines are inspected, with the others.
_DISCOVERY_SHARE = 0.25
_PLANNING_SHARE = 0.5
_LAST_WORDS_SECONDS = 1.0
_UNREAD = (
    "the folder of its model cannot be read here, so it is not known whether its checkpoint is "
    "quantised (fp8 blocks would take these weights without an error, and compute garbage)"
)
# What an engine can do to an attempt; everything else would fail without it as well.
_ENGINES_FAULT = (EngineRejected, EngineUnreachable, UpdateTimeout, WeightMismatchError)


@dataclass(frozen=True)
class Push:
    """What one update is to bring.

    Attributes:
        read: Returns the weights.
        counted: Called with the new version once every engine has everything and before any
            continues; returns warnings.
        progress: Told of each phase and of each confirmed bucket.
        check_readers: Raises when somebody else who takes part in the reading failed.
        bucket_bytes: The size of a bucket of this update; None leaves it to the options.
        bucket_limit: What no bucket of several tensors is larger than, whatever is chosen.
    """

    read: Callable[[], Payload]
    counted: Callable[[int], Sequence[str]]
    progress: ProgressHook | None = None
    check_readers: Callable[[], None] = nobody_else
    bucket_bytes: int | None = None
    bucket_limit: int | None = None


@dataclass
class _Run:
    """One update, over all its attempts."""

    push: Push
    deadline: Deadline
    watch: Stopwatch
    payload: Payload = field(default_factory=Payload)
    version: int = 0
    counted: bool = False
    plan: Plan | GrowingPlan | None = None
    format: Format | None = None
    pause_mode: str = "retract"
    warnings: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class _PlanAndReader:
    """A plan, and who reads it."""

    plan: Plan | GrowingPlan
    reader: Reader


class Updater:
    """Brings weights to a fleet of engines, again and again.

    1. :meth:`connect` (or the first :meth:`update`) inspects the engines and makes the group.
    2. :meth:`update` runs the procedure; a failed one gives the group up if it must, and the
       next makes a new one. With a quorum, the engines that are left try again at once.
    3. :meth:`shutdown` gives the group up on both ends.

    Args:
        urls: The fleet.
        open_engine: Makes the engine at a URL.
        ways: What each way for bytes needs; the first is taken where nothing speaks against it.
        options: Everything that shapes an update.
        clock: Where time comes from.

    Attributes:
        version: The last version that was counted; at first ``initial_version``, or 0.
        roster: Who belongs to the fleet.
    """

    def __init__(
        self,
        urls: Sequence[str],
        open_engine: Callable[[str], Engine],
        ways: Mapping[Way, Ends],
        options: UpdateOptions,
        clock: Clock | None = None,
    ) -> None:
        self.version = options.initial_version or 0
        self.options = options
        self.roster = Roster(urls, open_engine)
        self._wire = Wire(ways, options)
        self._num_gpus = options.num_gpus
        self._busy = threading.Lock()
        self._planned = PlanMemory()
        self._warned: set[str] = set()
        self._clock = clock or Clock()

    @property
    def connected(self) -> bool:
        """Whether a usable group exists."""
        return self._wire.usable

    @property
    def engines(self) -> dict[str, EngineOutcome]:
        """What is known of each engine, by URL."""
        return self.roster.outcomes()

    @property
    def group(self) -> Group | None:
        """The group, once made."""
        return self._wire.group

    @property
    def world_size(self) -> int | None:
        """1 + the ranks of all engines, once they were asked."""
        return self._wire.world_size

    def connect(self, device: torch.device) -> None:
        """Inspects the engines and makes a new group; one that exists is given up.

        Args:
            device: Where the weights live; the options' device wins.

        Raises:
            WeightUpdateError: An engine cannot take updates, refused or did not come.
        """
        run = self._run(Push(Payload, _nothing))
        with self._reporting(run), self._exclusively(run.deadline):
            self._wire.drop()
            with run.watch.running("connect"):
                self.roster.discover(run.deadline.share(_DISCOVERY_SHARE))
            # Some servers have one group, so that a new one ends an update that runs in the old.
            with self._turn(run), run.watch.running("connect"):
                for member in self.roster.members:
                    member.met = False
                fleet = Fleet(self.roster.members)
                self.roster.look(fleet, run.deadline.share(0.5))
                self._meet(fleet, device, run)

    def update(self, push: Push) -> UpdateReport:
        """Runs one update.

        Returns:
            The report; every engine of the quorum is ``new``.

        Raises:
            WeightUpdateError: With ``report``, ``phase`` and ``engine`` set.
        """
        run = self._run(push)
        with self._reporting(run), self._exclusively(run.deadline), orderly_end():
            self._prepare(run)
            with self._turn(run):
                try:
                    self._attempts(run)
                except BaseException as error:
                    if isinstance(error, Exception):
                        self._note_the_dead(run)
                    self._release(Fleet(self.roster.members), run)
                    raise
                finally:
                    run.payload.end()
                    for member in self.roster.members:
                        member.call = None  # its error, once raised, would keep the weights
            self._warn(run.warnings)
            return self._report(run)

    def rehearse(self, plan: Plan) -> Rehearsal:
        """Sends harmless names to all engines of the group that :meth:`connect` made.

        Raises:
            ConfigurationError: An engine has not the memory for a request.
            WeightUpdateError: There is no group, or a step failed; every engine was settled.
        """
        run = self._run(Push(Payload, _nothing))
        fleet = Fleet(self.roster.members)
        with self._reporting(run), self._exclusively(run.deadline), orderly_end():
            if not self._wire.serves(fleet):
                raise WeightUpdateError("Communication group not initialized", phase="plan")
            refuse_large(plan, {m.url: m.engine.intake for m in fleet.members})
            with self._turn(run):
                try:
                    self.roster.look(fleet, run.deadline.share(0.5))
                    return self._wire.rehearse(fleet, plan, run.deadline)
                except BaseException:
                    self._release(fleet, run)
                    raise

    def await_return(self) -> None:
        """Waits for engines that do not answer, for half the time that an update may take."""
        deadline = Deadline(self.options.timeout / 2, self._clock)
        with self._exclusively(deadline):
            for member in self.roster.members:
                member.left_out = True
            while any(member.left_out for member in self.roster.members):
                self.roster.look_for_the_lost(deadline)
                if deadline.expired():
                    return
                if any(member.left_out for member in self.roster.members):
                    deadline.sleep(min(_RECOVERY_POLL_SECONDS, deadline.remaining()))

    def plan(self, weights: Sequence[Weight]) -> Plan:
        """What an update of ``weights`` would send, in which requests; asks no engine."""
        device, dtype = self._wire.device_for(weights[0].device), self.options.dtype
        sent = [weight if dtype == "engine" else with_dtype(weight, dtype) for weight in weights]
        return planned(sent, self.options, self._formats(device, self.roster.members))

    def flush_cache(self) -> bool:
        """Flushes every prefix cache once; False if one was not, and the log says why."""
        deadline = Deadline(min(_FLUSH_SECONDS, self.options.timeout), self._clock)

        def flush(member: Member, _: Attempt) -> None:
            if not member.engine.flush_once(deadline):
                raise EngineRejected("the cache was not flushed", engine=member.url, phase="flush")

        try:
            with self._exclusively(deadline):
                Fleet(self.roster.members).each("flush", flush, deadline)
        except WeightUpdateError as error:
            _log.warning(error)
            return False
        return True

    def add_engine(self, url: str) -> None:
        """Adds an engine, or a router with its workers, from the next update on."""
        with self._exclusively(Deadline(self.options.timeout, self._clock)):
            self.roster.add(url)
            self._num_gpus = None  # it was the number of the fleet as it was

    def remove_engine(self, url: str) -> None:
        """Takes an engine out; it drops the group."""
        with self._exclusively(Deadline(self.options.timeout, self._clock)):
            gone = self.roster.remove(url)
            self._num_gpus = None
            group = self._wire.group
            if group is not None:
                leave(Fleet(gone), group)
            for member in gone:
                member.engine.close()

    def doubt(self, url: str, why: str) -> None:
        """Notes, between updates, that an engine lost what it was given; a full push heals it."""
        for member in self.roster.members:
            if member.url == url:
                member.state, member.doubt = EngineState.MIXED, member.doubt or why

    def shutdown(self) -> None:
        """Gives the group up on both ends; safe to call at any time, repeatedly."""
        self._wire.close()
        self._planned.attend(False)  # a format knows the packer, and that has the buffers
        for member in self.roster.members:
            member.engine.close()

    # -- attempts -----------------------------------------------------------------------

    def _prepare(self, run: _Run) -> None:
        """What all attempts share: the fleet, and the weights."""
        for member in self.roster.members:
            member.start(Attempt())
        with run.watch.running("plan"):
            run.payload = self._read(run)
            refuse_meta(run.payload.weights)
            if not self.roster.complete:
                self.roster.discover(run.deadline.share(_DISCOVERY_SHARE))
                self.roster.look_for_the_lost(run.deadline)
                run.warnings += [f"{m.url} {m.detail}" for m in self.roster.members if m.left_out]
            check_quorum(self.options.quorum, len(self.roster.members))
            self._leave_out_the_incomplete(run)

    def _read(self, run: _Run) -> Payload:
        """The weights; whoever makes them may hang, and may change the thread it runs in."""

        def read(stream: AbstractContextManager[object]) -> Payload:
            with stream:
                return run.push.read().begun()

        # Ranks that do not come are waited for until the deadline, and named then.
        deadline = run.deadline.afresh(run.deadline.remaining() + _LAST_WORDS_SECONDS)
        reading = spawn(read, callers_stream())
        return in_time(reading, "the weights", "plan", deadline, nobody_else)

    def _leave_out_the_incomplete(self, run: _Run) -> None:
        """Under a quorum, a push of some weights passes by engines that need more than those."""
        if run.payload.whole:
            return
        names = {weight.spec.name for weight in run.payload.weights}
        for member in self.roster.members:
            others = sum(not m.left_out for m in self.roster.members) - 1
            if not member.left_out and member.lost - names and others >= self._needed:
                member.left_out, member.detail = True, "it needs a push of the whole model"
                run.warnings.append(f"{member.url} was left out: {member.detail}")

    def _attempts(self, run: _Run) -> None:
        """Attempts the update, with the engines that are left each time one has failed."""
        while True:
            fleet = Fleet(member for member in self.roster.members if not member.left_out)
            try:
                self._check_quorum_left(len(fleet.members))
                return self._attempt(fleet, run)
            except _ENGINES_FAULT as error:
                self._go_on_without_culprits(error, fleet, run)
                if run.counted:
                    return None

    def _attempt(self, fleet: Fleet, run: _Run) -> None:
        ahead = self._planning_ahead(fleet, run)
        try:
            with run.watch.running("plan"):
                self._look(fleet, run)
            if not self._wire.serves(fleet):  # somebody started anew
                _let_go(ahead, run.deadline)
                with run.watch.running("connect"):
                    self._meet(fleet, run.payload.weights[0].device, run)
        except BaseException:
            _let_go(ahead, run.deadline)
            raise
        run.warnings += [text for text in self._wire.warnings if text not in run.warnings]
        procedure = self._procedure(fleet, run, ahead or [self._planning(fleet, run)])
        try:
            procedure.run()
        finally:
            run.warnings += procedure.warnings

    def _look(self, fleet: Fleet, run: _Run) -> None:
        try:
            self.roster.look(fleet, run.deadline.share(0.5))
        except EngineRejected:
            # Its workers may wait in our group for what another trainer announced in an older one.
            self._wire.drop()
            raise

    def _planning_ahead(self, fleet: Fleet, run: _Run) -> list[Future[_PlanAndReader]]:
        """Plans, and packs the first bucket, while engines are looked at that are known already."""
        if not self._wire.serves(fleet) or run.payload.stream is not None:
            return []
        if self.options.check_finite or run.push.check_readers is not nobody_else:
            return []  # values would be read, perhaps by others too, for nothing
        return [self._planning(fleet, run, packs=True)]

    def _meet(self, fleet: Fleet, device: torch.device, run: _Run) -> None:
        deadline = run.deadline.share(0.5)
        self.roster.meet(fleet, deadline)
        for member in fleet.members:
            mode = self.options.of(member.url).effective_pause_mode()
            objection = member.engine.objection(mode)
            if objection:
                raise ConfigurationError(objection, engine=member.url, phase="connect")
        everybody = len(fleet.members) == len(self.roster.members)
        self._wire.connect(fleet, device, self._num_gpus if everybody else None, deadline)

    def _check_quorum_left(self, engines: int) -> None:
        if engines == 0 or engines < self._needed:
            lost = [member.url for member in self.roster.members if member.left_out]
            raise EngineUnreachable(
                f"{', '.join(lost)} did not come back, and quorum={self.options.quorum} needs "
                f"{self._needed} engine(s)",
                engine=lost[0],
                engines=lost,
                phase="connect",
            )

    @property
    def _needed(self) -> int:
        quorum = self.options.quorum
        return len(self.roster.members) if isinstance(quorum, str) else quorum

    def _go_on_without_culprits(self, error: WeightUpdateError, fleet: Fleet, run: _Run) -> None:
        """Leaves out the engines that failed, or raises if too few would be left."""
        if run.watch.phase in ("plan", "connect"):
            # Nobody is judged while it answers: one that fails ends a step for all.
            wait(fleet.calls(), timeout=run.deadline.at_most(_JUDGE_SECONDS).remaining())
            self.roster.note_the_dead()
        failed = culprits(error, fleet.members)
        left = len(fleet.members) - len(failed)
        read = run.payload.stream is not None and run.plan is not None  # it cannot be read again
        if not failed or left == 0 or left < self._needed or run.deadline.expired() or read:
            raise error
        self._release(Fleet(failed), run)
        for member in failed:
            member.left_out = True
            member.lost |= frozenset(weight.spec.name for weight in run.payload.weights)
            member.detail = member.detail or error.message
            run.warnings.append(f"{member.url} was left out: {member.detail}")

    def _release(self, fleet: Fleet, run: _Run) -> None:
        """No further attempt comes: engines that waited for one continue."""
        release(fleet, run.deadline.afresh(RESUME_SECONDS))

    def _procedure(
        self, fleet: Fleet, run: _Run, planning: Sequence[Future[_PlanAndReader]]
    ) -> Procedure:
        group, packer = self._wire.ends()
        run.version = run.version or self._next_version()

        def count() -> Sequence[str]:
            self.version, run.counted = run.version, True
            return run.push.counted(run.version)

        rules = self._rules(run, count)
        run.watch.phase = "plan"
        deadline = run.deadline.share(_PLANNING_SHARE)
        made = in_time(planning[0], "the weights", "plan", deadline, run.push.check_readers)
        run.plan = made.plan
        run.watch.meter.plan(run.plan)
        return Procedure(
            fleet,
            group,
            packer,
            run.plan,
            rules,
            run.deadline,
            run.watch,
            reader=made.reader,
            way=self._wire.way,
        )

    def _formats(
        self, device: torch.device, members: Sequence[Member], run: _Run | None = None
    ) -> Formats:
        """Chooses how weights are divided, and notes why."""
        free = [member.engine.intake.free_bytes for member in members]
        known = [size for size in free if size is not None]
        engine_bytes = min(known) if known and len(known) == len(free) else None
        memory = PlanMemory() if run is None else self._planned

        def choose(weights: Sequence[Weight] | None) -> Format:
            asked = None if run is None else run.push.bucket_bytes
            terms = Terms(
                asked or self.options.bucket_bytes,
                engine_bytes,
                self._wire.request_seconds,
                in_place=device.type == "cuda"
                and memory.once(
                    "in place", (weights, device), lambda: _all_at_hand(weights or (), device)
                ),
                ranks=max((member.ranks for member in members), default=1),
                intakes={member.url: member.engine.intake for member in members},
                bucket_limit=None if run is None else run.push.bucket_limit,
            )
            specs = (
                None
                if weights is None
                else memory.once("specs", weights, lambda: [w.spec for w in weights])
            )
            chosen = terms.limited(self._wire.packer_for(device).format(specs, terms))
            if run is not None:
                run.format = chosen
            return chosen

        return choose

    def _rules(self, run: _Run, count: Callable[[], Sequence[str]]) -> UpdateRules:
        options = self.options
        return UpdateRules(
            pause_mode=options.effective_pause_mode(),
            flush=options.flush_wanted(),
            on_failure=options.on_failure,
            whole=run.payload.whole,
            verify=options.verify,
            refuse_stale=options.stale_cache == "refuse",
            regroups=self._needed < len(self.roster.members),
            label=str(run.version),
            counted=count,
            own=own_manners(options, self.roster.urls),
        )

    def _next_version(self) -> int:
        if self.options.initial_version is not None:
            return self.version + 1  # a resumed run's own count wins over the engines' labels
        return next_version(self.version, [m.label for m in self.roster.members])

    def _planning(self, fleet: Fleet, run: _Run, *, packs: bool = False) -> Future[_PlanAndReader]:
        """Finds out which weights travel together, as the engines of the fleet take them."""
        intakes = {member.url: member.engine.intake for member in fleet.members}
        known = {name for member in fleet.members for name in _known_names(member)}
        unread = [f"{url}: {_UNREAD}" for url, intake in intakes.items() if intake.unread]
        run.warnings += [text for text in unread if text not in run.warnings]
        group, packer = self._wire.ends()
        format_of = self._formats(group.device, fleet.members, run)

        def plan(stream: AbstractContextManager[object]) -> _PlanAndReader:
            with stream:
                made = fitted_plan(
                    run.payload, intakes, known, self.options, format_of, self._planned
                )
                reader = Reader(packer, made, run.push.check_readers)
                if packs:
                    reader.begin()
                return _PlanAndReader(made, reader)

        return hand_over(plan, callers_stream())  # to check the values reads them all

    # -- bookkeeping --------------------------------------------------------------------

    def _turn(self, run: _Run) -> AbstractContextManager[None]:
        return turn(self.roster.urls, self.options.when_busy, run.deadline)

    def _run(self, push: Push) -> _Run:
        return _Run(
            push,
            Deadline(self.options.timeout, self._clock),
            Stopwatch(Meter(push.progress)),
            pause_mode=self.options.effective_pause_mode(),
        )

    @contextmanager
    def _exclusively(self, deadline: Deadline) -> Iterator[None]:
        with one_at_a_time(id(self)):
            patience = deadline.remaining() if self.options.when_busy == "wait" else 0.0
            if not self._busy.acquire(timeout=patience):
                raise self._still_busy(deadline)
            try:
                yield
            finally:
                self._busy.release()

    def _still_busy(self, deadline: Deadline) -> WeightUpdateError:
        if self.options.when_busy == "refuse":
            return WeightUpdateError("busy: another update of this sender is running", phase="plan")
        text = f"another update was still running after {deadline.seconds:.1f} s"
        return UpdateTimeout(text, phase="plan")

    @contextmanager
    def _reporting(self, run: _Run) -> Iterator[None]:
        """Every failure leaves as a WeightUpdateError that carries the report."""
        try:
            yield
        except Exception as error:  # noqa: BLE001 - re-raised with its report
            phase = run.watch.phase
            failure = wrapped(error, phase)
            self._note_the_dead(run)
            if failure.phase == "configure":
                failure.phase = phase
            failure.report = self._report(run)
            raise failure from failure.__cause__
        except BaseException as interrupt:
            words = "; ".join(self._report(run).engine_lines())
            interrupt.add_note(f"the weight update was interrupted; {words}")
            _log.warning("the weight update was interrupted; %s", words)
            raise

    def _note_the_dead(self, run: _Run) -> None:
        if run.watch.phase in ("plan", "connect"):
            self.roster.note_the_dead()

    def _report(self, run: _Run) -> UpdateReport:
        return UpdateReport(
            version=self.version,
            bytes=run.plan.nbytes if run.plan else 0,
            tensors=run.plan.tensors if run.plan else 0,
            buckets=run.plan.requests if run.plan else 0,
            seconds=run.watch.finish(),
            engines=self.engines,
            pause_mode=run.pause_mode,
            warnings=tuple(run.warnings),
            route=self._route(run),
        )

    def _route(self, run: _Run) -> Route | None:
        group, chosen = self._wire.group, run.format
        if group is None or chosen is None:
            return None
        reasons = (*self._wire.reasons, *filter(None, [chosen.reason]))
        return Route(self._wire.way, group.backend, chosen.bucket_bytes, reasons)

    def _warn(self, warnings: Sequence[str]) -> None:
        for warning in warnings:
            if warning not in self._warned:
                self._warned.add(warning)
                _log.warning(warning)


def _known_names(member: Member) -> Iterable[str]:
    """Names of the whole model: those that an engine took, or else those in its model's folder."""
    intake = member.engine.intake
    return member.shapes or (intake.shapes if intake.whole_layers else ())


def _let_go(ahead: list[Future[_PlanAndReader]], deadline: Deadline) -> None:
    """Ends what was planned for engines that are not there any more."""
    wait(ahead, timeout=deadline.remaining())
    for planning in ahead:
        if planning.done() and planning.exception() is None:
            planning.result().reader.let_go()
    ahead.clear()


def _all_at_hand(weights: Sequence[Weight], device: torch.device) -> bool:
    return all(weight.device == device and weight.at_hand for weight in weights)


def _nothing(_: int) -> Sequence[str]:
    return ()
