"""What speaks against an update: found out before anything is paused, as far as it can be known."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from weight_update.errors import ConfigurationError, WeightMismatchError
from weight_update.update.fleet import Attempt, Fleet, Member
from weight_update.update.protocols import Packer
from weight_update.update.rules import UpdateRules
from weight_update.update.verify import check_names, check_shapes, demand, first_few, learn
from weight_update.waiting import Deadline
from weight_update.weights.buckets import Bucket, Plan
from weight_update.weights.growing_plan import GrowingPlan


@dataclass(frozen=True)
class Objections:
    """Raises what speaks against bringing a plan to a fleet.

    A stream shows its names as it is read. What needs them is asked bucket by bucket, and what
    needs all of them at its end, while engines are paused; a push of a module or a mapping is
    never objected to then.
    """

    fleet: Fleet
    packer: Packer
    plan: Plan | GrowingPlan
    rules: UpdateRules

    def to_plan(self) -> None:
        """Raises ConfigurationError with every objection to a plan, and to its engines."""
        found = [(m.url, self._to_engine(m)) for m in self.fleet.members]
        texts = [f"{url}: {text}" for url, text in found if text]
        if self.plan.ended and self.rules.full and not self.rules.whole:
            names = frozenset(self.plan.names)
            texts += [text for m in self.fleet.members for text in _unhealed(m, names)]
        _refuse([*texts, *self._to_tensors(self.plan)])

    def of_engines(self, deadline: Deadline) -> None:
        """Raises what engines know against the names, and against the proof that is asked for."""
        rules = self.rules
        if rules.verify == "off" or not rules.full:
            return
        names, shapes = list(self.plan.names), self.plan.shapes

        def ask(member: Member, _: Attempt) -> None:
            check_shapes(member, shapes)
            check_names(member, names, whole=rules.whole and self.plan.ended, deadline=deadline)
            if rules.verify != "sample":
                learn(member, deadline)

        self.fleet.each("plan", ask, deadline)
        demand(self.fleet, names, rules.verify, deadline)

    def to_stream(self, first: Bucket) -> None:
        """Raises if a stream of some weights comes to an engine that needs them all."""
        if not self._streamed:
            return
        needy = [m for m in self.fleet.members if m.doubt or m.lost or m.found_paused]
        if needy and not self.rules.whole:
            raise ConfigurationError(
                "it needs a push of the whole model, and a stream may hold some weights only",
                engine=needy[0].url,
                phase="plan",
                remedy="push the module, or Stream(..., whole=True) of all its weights",
            )
        _refuse(self._to_tensors(Plan((first,))))

    def to_bucket(self, bucket: Bucket, deadline: Deadline) -> None:
        """Raises what speaks against a later bucket of a stream, before it is announced."""
        if not self._streamed:
            return
        _refuse(self._to_tensors(Plan((bucket,))))
        self._check({spec.name: spec.shape for spec in bucket.specs}, deadline, whole=False)

    def to_end(self, deadline: Deadline) -> None:
        """Raises if a stream of a whole model ended without what an engine needs."""
        if not self._streamed or not self.rules.whole:
            return
        names = frozenset(self.plan.names)
        for member in self.fleet.members:
            for text in _unhealed(member, names):
                member.attempt.suspicion = text
                raise WeightMismatchError(text, engine=member.url, phase="transfer")
        self._check(self.plan.shapes, deadline, whole=True)

    @property
    def _streamed(self) -> bool:
        return self.rules.full and isinstance(self.plan, GrowingPlan)

    def _check(
        self, shapes: Mapping[str, tuple[int, ...]], deadline: Deadline, *, whole: bool
    ) -> None:
        for member in self.fleet.members if self.rules.verify != "off" else ():
            try:
                check_shapes(member, shapes)
                check_names(member, list(shapes), whole=whole, deadline=deadline)
            except WeightMismatchError as error:
                member.attempt.suspicion = error.message
                error.phase = "transfer"
                raise

    def _to_engine(self, member: Member) -> str | None:
        rules, manners = self.rules, self.rules.manners(member.url)
        mode = manners.pause_mode
        if member.found_paused and rules.full and not rules.whole:
            return (
                "somebody else paused it (or a push of another process failed), and it may be "
                "half updated: it needs a push that is known to be a whole model, and a mapping "
                "may be some weights only; push the module, a Checkpoint, a SavedStateDict, or "
                "Stream(weights.items(), whole=True)"
            )
        stale = rules.full and manners.flush and not member.engine.can_flush(mode)
        if rules.refuse_stale and stale:
            return f"it cannot flush its prefix cache under pause_mode={mode!r}; use 'abort'"
        return member.engine.objection(mode)

    def _to_tensors(self, plan: Plan | GrowingPlan) -> list[str]:
        members = self.fleet.members if self.rules.full else ()
        misshapen = [text for member in members for text in _misshapen(member, plan)]
        return misshapen + self.packer.objections(plan)


def _refuse(texts: Sequence[str]) -> None:
    if texts:
        raise ConfigurationError("; ".join(texts), phase="plan")


def _unhealed(member: Member, names: frozenset[str]) -> Iterator[str]:
    """What an engine needs, and some names do not bring."""
    lacking = sorted((member.owed if member.doubt else member.lost) - names)
    if lacking:
        why = "holds mixed weights" if member.doubt else "restarted, or missed an update"
        yield (
            f"{member.url} {why}, and this push lacks {len(lacking)} of the tensors that heal it: "
            f"{lacking[0]!r}, ..."
        )


def _misshapen(member: Member, plan: Plan | GrowingPlan) -> Iterator[str]:
    """An engine takes no shape but its own, and may say yes to another and hold garbage."""
    if member.engine.intake.any_shape or member.shapes is plan.shapes:
        return
    wrong = [
        f"{name!r} is {shape} now and was {member.shapes[name]}"
        for name, shape in plan.shapes.items()
        if member.shapes.get(name, shape) != shape
    ]
    if wrong:
        yield (
            f"{len(wrong)} weight(s) have another shape than {member.url} took before: "
            f"{first_few(wrong)}"
        )
