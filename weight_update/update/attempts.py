"""Attempts: an update is tried until every engine has it, or as many as the quorum wants."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from concurrent.futures import Future, wait

import torch

from weight_update.errors import (
    ConfigurationError,
    EngineRejected,
    EngineUnreachable,
    UpdateTimeout,
    WeightMismatchError,
    WeightUpdateError,
)
from weight_update.options import UpdateOptions
from weight_update.update.fleet import Fleet, Member, culprits
from weight_update.update.planner import Planned, Planner, warnings_of
from weight_update.update.procedure import Procedure
from weight_update.update.push import Run
from weight_update.update.reader import in_time, nobody_else
from weight_update.update.roster import Roster
from weight_update.update.rules import UpdateRules, own_manners
from weight_update.update.settle import RESUME_SECONDS, release
from weight_update.update.versions import next_version
from weight_update.update.wire import Wire
from weight_update.waiting import Deadline

# With the waits of the roster before and after it, less than a failed update may take.
_JUDGE_SECONDS = 0.8
_PLANNING_SHARE = 0.5
BEFORE_PAUSE = ("plan", "connect")
# What an engine can do to an attempt; everything else would fail without it as well.
_ENGINES_FAULT = (EngineRejected, EngineUnreachable, UpdateTimeout, WeightMismatchError)


class Attempts:
    """Looks at engines, meets those that started anew, plans, and runs the procedure.

    Args:
        roster: The engines.
        wire: What is sent over; made anew for other engines.
        options: What the user asked for.

    Attributes:
        planner: What plans the updates.
        num_gpus: Ranks of all engines together, if the user says so.
    """

    def __init__(self, roster: Roster, wire: Wire, options: UpdateOptions) -> None:
        self.planner = Planner(wire, options)
        self.num_gpus = options.num_gpus
        self._roster = roster
        self._wire = wire
        self._options = options

    def run(self, run: Run) -> None:
        """Attempts the update, with the engines that are left each time one has failed.

        Raises:
            WeightUpdateError: Too few are left.
        """
        while True:
            fleet = Fleet(member for member in self._roster.members if not member.left_out)
            try:
                self._check_quorum_left(len(fleet.members))
                return self._attempt(fleet, run)
            except _ENGINES_FAULT as error:
                self._go_on_without_culprits(error, fleet, run)
                if run.counted:
                    return None
            except Exception:
                self._note_the_dead(run)
                raise

    def meet(self, fleet: Fleet, device: torch.device, within: Deadline) -> None:
        """Inspects engines that started anew, and makes a group of the fleet.

        Args:
            fleet: Its engines were looked at.
            device: Where the weights are.
            within: Of which it may take half.

        Raises:
            WeightUpdateError: An engine cannot take updates, refused or did not come.
        """
        deadline = within.share(0.5)
        self._roster.meet(fleet, deadline)
        for member in fleet.members:
            mode = self._options.of(member.url).effective_pause_mode()
            objection = member.engine.objection(mode)
            if objection:
                raise ConfigurationError(objection, engine=member.url, phase="connect")
        everybody = len(fleet.members) == len(self._roster.members)
        self._wire.connect(fleet, device, self.num_gpus if everybody else None, deadline)

    def leave_out_the_incomplete(self, run: Run) -> None:
        """Under a quorum, a push of some weights passes by engines that need more than those."""
        if run.payload.whole:
            return
        names = {weight.spec.name for weight in run.payload.weights}
        for member in self._roster.members:
            others = sum(not m.left_out for m in self._roster.members) - 1
            if not member.left_out and member.lost - names and others >= self._needed:
                self._leave_out(member, "it needs a push of the whole model", run)

    def release(self, members: Iterable[Member], run: Run) -> None:
        """No further attempt comes: engines that waited for one continue."""
        release(Fleet(members), run.deadline.afresh(RESUME_SECONDS))

    # -- one attempt --------------------------------------------------------------------

    def _attempt(self, fleet: Fleet, run: Run) -> None:
        ahead = self._planning_ahead(fleet, run)
        try:
            with run.watch.running("plan"):
                self._look(fleet, run)
            if not self._wire.serves(fleet):  # somebody started anew
                Planned.let_go(ahead, run.deadline)
                with run.watch.running("connect"):
                    self.meet(fleet, run.payload.weights[0].device, run.deadline)
        except BaseException:
            Planned.let_go(ahead, run.deadline)
            raise
        run.warn_once(self._wire.warnings)
        procedure = self._procedure(fleet, run, ahead or [self._planning(fleet, run)])
        try:
            procedure.run()
        finally:
            run.warnings += procedure.warnings

    def _look(self, fleet: Fleet, run: Run) -> None:
        try:
            self._roster.look(fleet, run.deadline.share(0.5))
        except EngineRejected:
            # Its workers may wait in our group for what another trainer announced in an older one.
            self._wire.drop()
            raise

    def _planning_ahead(self, fleet: Fleet, run: Run) -> list[Future[Planned]]:
        """Plans, and packs the first bucket, while engines are looked at that are known already."""
        if not self._wire.serves(fleet) or run.payload.stream is not None:
            return []
        if self._options.check_finite or run.push.check_readers is not nobody_else:
            return []  # values would be read, perhaps by others too, for nothing
        return [self._planning(fleet, run, packs=True)]

    def _planning(self, fleet: Fleet, run: Run, *, packs: bool = False) -> Future[Planned]:
        run.warn_once(warnings_of(fleet.members))
        return self.planner.start(
            fleet,
            run.payload,
            run.push.check_readers,
            bucket_bytes=run.push.bucket_bytes,
            bucket_limit=run.push.bucket_limit,
            packs=packs,
        )

    def _procedure(self, fleet: Fleet, run: Run, planning: Sequence[Future[Planned]]) -> Procedure:
        group, packer = self._wire.ends()
        run.version = run.version or self._next_version(run)
        run.rules = self._rules(run)
        run.watch.phase = "plan"
        deadline = run.deadline.share(_PLANNING_SHARE)
        made = in_time(planning[0], "the weights", "plan", deadline, run.push.check_readers)
        run.planned = made
        run.watch.meter.plan(made.plan)
        return Procedure(
            fleet,
            group,
            packer,
            made.plan,
            run.rules,
            run.deadline,
            run.watch,
            reader=made.reader,
            way=self._wire.way,
        )

    def _rules(self, run: Run) -> UpdateRules:
        options = self._options

        def count() -> Sequence[str]:
            run.counted = True
            return run.push.counted(run.version)

        return UpdateRules(
            pause_mode=options.effective_pause_mode(),
            flush=options.flush_wanted(),
            on_failure=options.on_failure,
            whole=run.payload.whole,
            verify=options.verify,
            refuse_stale=options.stale_cache == "refuse",
            regroups=self._needed < len(self._roster.members),
            label=str(run.version),
            counted=count,
            own=own_manners(options, self._roster.urls),
        )

    def _next_version(self, run: Run) -> int:
        if self._options.initial_version is not None:
            return run.last_version + 1  # a resumed run's own count wins over the engines' labels
        return next_version(run.last_version, [m.label for m in self._roster.members])

    # -- the quorum ---------------------------------------------------------------------

    @property
    def _needed(self) -> int:
        quorum = self._options.quorum
        return len(self._roster.members) if isinstance(quorum, str) else quorum

    def _check_quorum_left(self, engines: int) -> None:
        if engines == 0 or engines < self._needed:
            lost = [member.url for member in self._roster.members if member.left_out]
            raise EngineUnreachable(
                f"{', '.join(lost)} did not come back, and quorum={self._options.quorum} needs "
                f"{self._needed} engine(s)",
                engine=lost[0],
                engines=lost,
                phase="connect",
            )

    def _go_on_without_culprits(self, error: WeightUpdateError, fleet: Fleet, run: Run) -> None:
        """Leaves out the engines that failed, or raises if too few would be left."""
        if run.watch.phase in BEFORE_PAUSE:
            # Nobody is judged while it answers: one that fails ends a step for all.
            wait(fleet.calls(), timeout=run.deadline.at_most(_JUDGE_SECONDS).remaining())
        self._note_the_dead(run)
        failed = culprits(error, fleet.members)
        left = len(fleet.members) - len(failed)
        read = run.payload.stream is not None and run.planned is not None  # cannot be read again
        if not failed or left == 0 or left < self._needed or run.deadline.expired() or read:
            raise error
        self.release(failed, run)
        for member in failed:
            member.lost |= frozenset(weight.spec.name for weight in run.payload.weights)
            self._leave_out(member, member.detail or error.message, run)

    def _note_the_dead(self, run: Run) -> None:
        if run.watch.phase in BEFORE_PAUSE:
            self._roster.note_the_dead()

    def _leave_out(self, member: Member, why: str, run: Run) -> None:
        member.left_out, member.detail = True, why
        run.warnings.append(f"{member.url} was left out: {why}")
