"""A rehearsal: numbers that no loader keeps travel as weights do, in a pause of their own.

Nothing is flushed, stamped or counted, and an engine that was found paused stays so.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from itertools import pairwise
from statistics import median

from weight_update.errors import ConfigurationError
from weight_update.facts import Intake
from weight_update.options import UpdateOptions, Way
from weight_update.update.fleet import Fleet
from weight_update.update.procedure import Procedure
from weight_update.update.progress import Meter, Stopwatch
from weight_update.update.protocols import Group, Packer
from weight_update.update.reader import Reader
from weight_update.update.rules import UpdateRules, own_manners
from weight_update.waiting import Deadline
from weight_update.weights.buckets import Bucket, Plan


@dataclass(frozen=True)
class Rehearsal:
    """How long it took.

    Attributes:
        backend: What carried the bytes.
        reasons: Why the way in use was chosen.
        seconds: Wall seconds by phase; ``paused`` is how long engines stood still.
        request_seconds: The median time between two requests that were confirmed; None where
            there was only one.
    """

    backend: str
    reasons: tuple[str, ...]
    seconds: Mapping[str, float]
    request_seconds: float | None


@dataclass(frozen=True)
class Stage:
    """Where rehearsals take place."""

    fleet: Fleet
    group: Group
    packer: Packer
    way: Way
    reasons: tuple[str, ...]
    options: UpdateOptions
    check_readers: Callable[[], None]

    def rehearse(self, plan: Plan, deadline: Deadline) -> Rehearsal:
        """Brings a plan of harmless names to the fleet.

        Raises:
            WeightUpdateError: A step failed; every engine was settled.
        """
        options = self.options
        own = own_manners(options, [member.url for member in self.fleet.members])
        rules = UpdateRules(
            options.effective_pause_mode(),
            flush=False,
            on_failure=options.on_failure,
            full=False,
            own={url: replace(manners, flush=False) for url, manners in own.items()},
        )
        beats = _Beats()
        watch = Stopwatch(beats)
        Procedure(
            self.fleet,
            self.group,
            self.packer,
            plan,
            rules,
            deadline,
            watch,
            reader=Reader(self.packer, plan, self.check_readers),
            way=self.way,
        ).run()
        backend = self.group.backend
        return Rehearsal(backend, self.reasons, watch.finish(), beats.interval())


def refuse_large(plan: Plan, intakes: Mapping[str, Intake]) -> None:
    """Raises ConfigurationError if an engine, by URL, has not the memory for a request.

    Example:
        >>> refuse_large(Plan(()), {"http://a:1": Intake(free_bytes=0)})
    """
    largest = max((bucket.nbytes for bucket in plan.buckets), default=0)
    for url, intake in intakes.items():
        if intake.free_bytes is not None and largest > intake.free_bytes:
            raise ConfigurationError(
                f"a request of {largest / 1e9:.2f} GB does not fit into the "
                f"{intake.free_bytes / 1e9:.2f} GB that it had free when it had started",
                engine=url,
                phase="plan",
            )


class _Beats(Meter):
    """Notes when buckets are confirmed."""

    def __init__(self) -> None:
        super().__init__()
        self._times: list[float] = []

    def confirm(self, _: Bucket) -> None:
        self._times.append(time.perf_counter())

    def interval(self) -> float | None:
        """The median time between two; None when there are not two."""
        gaps = [after - before for before, after in pairwise(self._times)]
        return median(gaps) if gaps else None
