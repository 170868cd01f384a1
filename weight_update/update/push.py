"""A push: what one update is to bring, and how far it got over all its attempts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from weight_update.report import ProgressHook
from weight_update.update.planner import Planned
from weight_update.update.planning import Payload
from weight_update.update.progress import Stopwatch
from weight_update.update.reader import nobody_else
from weight_update.update.rules import UpdateRules
from weight_update.waiting import Deadline


def _nothing(_: int) -> Sequence[str]:
    return ()


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

    read: Callable[[], Payload] = Payload
    counted: Callable[[int], Sequence[str]] = _nothing
    progress: ProgressHook | None = None
    check_readers: Callable[[], None] = nobody_else
    bucket_bytes: int | None = None
    bucket_limit: int | None = None


@dataclass
class Run:
    """One update, over all its attempts.

    Attributes:
        push: What it is to bring.
        deadline: Of all of it.
        watch: Its phases.
        last_version: The version that was counted last when its turn came.
        payload: The weights, once they were found.
        version: That which it brings, once that is known; 0 before.
        counted: Whether it was counted.
        planned: What the last attempt sends, and how.
        rules: How the last attempt behaves.
        warnings: For the report.
    """

    push: Push
    deadline: Deadline
    watch: Stopwatch
    last_version: int = 0
    payload: Payload = field(default_factory=Payload)
    version: int = 0
    counted: bool = False
    planned: Planned | None = None
    rules: UpdateRules | None = None
    warnings: list[str] = field(default_factory=list)

    def warn_once(self, warnings: Sequence[str]) -> None:
        """Adds those that are not there yet: each attempt finds some of them again."""
        self.warnings += [text for text in warnings if text not in self.warnings]
