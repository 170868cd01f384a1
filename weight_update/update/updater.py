"""The updater: one fleet, one wire, one update at a time, and a version that counts them."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace

import torch

from weight_update.errors import EngineRejected, UpdateTimeout, WeightUpdateError, wrapped
from weight_update.options import UpdateOptions, Way, check_quorum
from weight_update.report import EngineOutcome, EngineState, Route, UpdateReport
from weight_update.update.attempts import BEFORE_PAUSE, Attempts
from weight_update.update.connect import leave
from weight_update.update.fleet import Attempt, Fleet, Member
from weight_update.update.planning import Payload
from weight_update.update.progress import Meter, Stopwatch
from weight_update.update.protocols import Engine, Group
from weight_update.update.push import Push, Run
from weight_update.update.reader import callers_stream, in_time, nobody_else
from weight_update.update.rehearsal import Rehearsal, refuse_large
from weight_update.update.roster import Roster
from weight_update.update.signals import orderly_end
from weight_update.update.turns import one_at_a_time, turn
from weight_update.update.ways import Ends
from weight_update.update.wire import Wire
from weight_update.waiting import Clock, Deadline, spawn
from weight_update.weights.buckets import Plan
from weight_update.weights.specs import Weight

_log = logging.getLogger("weight_update")

_FLUSH_SECONDS = 30.0
_RECOVERY_POLL_SECONDS = 0.5
# Who does not answer is met again when engines are inspected, with the others.
_DISCOVERY_SHARE = 0.25
_LAST_WORDS_SECONDS = 1.0


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
        self._attempts = Attempts(self.roster, self._wire, options)
        self._busy = threading.Lock()
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
        run = self._run(Push())
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
                self._attempts.meet(fleet, device, run.deadline)

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
                    self._attempts.run(run)
                except BaseException:
                    self._attempts.release(self.roster.members, run)
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
        run = self._run(Push())
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
                    self._attempts.release(fleet.members, run)
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
        return self._attempts.planner.plan(weights, self.roster.members)

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
            self._attempts.num_gpus = None  # it was the number of the fleet as it was

    def remove_engine(self, url: str) -> None:
        """Takes an engine out; it drops the group."""
        with self._exclusively(Deadline(self.options.timeout, self._clock)):
            gone = self.roster.remove(url)
            self._attempts.num_gpus = None
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
        self._attempts.planner.forget()
        for member in self.roster.members:
            member.engine.close()

    # -- before the attempts ------------------------------------------------------------

    def _prepare(self, run: Run) -> None:
        """What all attempts share: the fleet, and the weights."""
        run.last_version = self.version
        for member in self.roster.members:
            member.start(Attempt())
        with run.watch.running("plan"):
            run.payload = self._read(run)
            self._attempts.planner.refuse_meta(run.payload.weights)
            if not self.roster.complete:
                self.roster.discover(run.deadline.share(_DISCOVERY_SHARE))
                self.roster.look_for_the_lost(run.deadline)
                run.warnings += [f"{m.url} {m.detail}" for m in self.roster.members if m.left_out]
            check_quorum(self.options.quorum, len(self.roster.members))
            self._attempts.leave_out_the_incomplete(run)

    def _read(self, run: Run) -> Payload:
        """The weights; whoever makes them may hang, and may change the thread it runs in."""

        def read(stream: AbstractContextManager[object]) -> Payload:
            with stream:
                return run.push.read().begun()

        # Ranks that do not come are waited for until the deadline, and named then.
        deadline = run.deadline.afresh(run.deadline.remaining() + _LAST_WORDS_SECONDS)
        reading = spawn(read, callers_stream())
        return in_time(reading, "the weights", "plan", deadline, nobody_else)

    # -- bookkeeping --------------------------------------------------------------------

    def _turn(self, run: Run) -> AbstractContextManager[None]:
        return turn(self.roster.urls, self.options.when_busy, run.deadline)

    def _run(self, push: Push) -> Run:
        def counted(version: int) -> Sequence[str]:
            self.version = version
            return push.counted(version)

        return Run(
            replace(push, counted=counted),
            Deadline(self.options.timeout, self._clock),
            Stopwatch(Meter(push.progress)),
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
    def _reporting(self, run: Run) -> Iterator[None]:
        """Every failure leaves as a WeightUpdateError that carries the report."""
        try:
            yield
        except Exception as error:  # noqa: BLE001 - re-raised with its report
            phase = run.watch.phase
            failure = wrapped(error, phase)
            if phase in BEFORE_PAUSE:
                self.roster.note_the_dead()
            if failure.phase == "configure":
                failure.phase = phase
            failure.report = self._report(run)
            raise failure from failure.__cause__
        except BaseException as interrupt:
            words = "; ".join(self._report(run).engine_lines())
            interrupt.add_note(f"the weight update was interrupted; {words}")
            _log.warning("the weight update was interrupted; %s", words)
            raise

    def _report(self, run: Run) -> UpdateReport:
        plan = run.planned.plan if run.planned else Plan(())
        return UpdateReport(
            version=self.version,
            bytes=plan.nbytes,
            tensors=plan.tensors,
            buckets=plan.requests,
            seconds=run.watch.finish(),
            engines=self._outcomes(run),
            warnings=tuple(run.warnings),
            route=self._route(run),
        )

    def _outcomes(self, run: Run) -> dict[str, EngineOutcome]:
        if run.rules is None:
            return self.engines
        modes = {url: run.rules.manners(url).pause_mode for url in self.engines}
        return {url: replace(o, pause_mode=modes[url]) for url, o in self.engines.items()}

    def _route(self, run: Run) -> Route | None:
        group = self._wire.group
        if group is None or run.planned is None:
            return None
        chosen = run.planned.format
        reasons = (*self._wire.reasons, *filter(None, [chosen.reason]))
        return Route(self._wire.way, group.backend, chosen.bucket_bytes, reasons)

    def _warn(self, warnings: Sequence[str]) -> None:
        for warning in warnings:
            if warning not in self._warned:
                self._warned.add(warning)
                _log.warning(warning)
