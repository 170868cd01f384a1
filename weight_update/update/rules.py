"""How one update behaves towards requests in flight, caches and failures."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from weight_update.options import OnFailure, PauseMode, Verify


@dataclass(frozen=True)
class UpdateRules:
    """How one update behaves.

    Attributes:
        pause_mode: What happens to requests in flight.
        flush: Whether the prefix cache is flushed where the engine can.
        on_failure: Whether an engine with mixed weights is held or resumed.
        full: Whether the plan holds every weight, so that it heals a mixed engine; a warm-up
            changes none and heals nothing.
        whole: Whether the weights are a whole model's, and not those of a mapping that may
            hold some only.
        verify: How the engines prove that they hold what was sent.
        refuse_stale: Whether an engine that cannot flush is refused, and not only warned of.
        regroups: Whether the engines that are left try again when one fails.
        label: The version label to write, or None to write none.
        counted: Called once every engine has everything, before any continues; returns
            warnings.
    """

    pause_mode: PauseMode
    flush: bool
    on_failure: OnFailure
    full: bool = True
    whole: bool = True
    verify: Verify = "off"
    refuse_stale: bool = False
    regroups: bool = False
    label: str | None = None
    counted: Callable[[], Sequence[str]] = tuple
