"""How one update behaves towards requests in flight, caches and failures."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from weight_update.options import OnFailure, PauseMode, UpdateOptions, Verify


@dataclass(frozen=True)
class Manners:
    """How one engine treats its requests.

    Attributes:
        pause_mode: What happens to those in flight.
        flush: Whether its prefix cache is flushed where it can.
    """

    pause_mode: PauseMode
    flush: bool

    @classmethod
    def read(cls, options: UpdateOptions) -> Manners:
        """Those of options, the environment included, as they are now."""
        return cls(options.effective_pause_mode(), options.flush_wanted())


def own_manners(options: UpdateOptions, urls: Iterable[str]) -> dict[str, Manners]:
    """Of engines that have options of their own."""
    return {url: Manners.read(own) for url in urls if (own := options.of(url)) is not options}


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
        own: By URL, manners of engines that have others than ``pause_mode`` and ``flush``.

    Example:
        >>> own = {"http://b:1": Manners("abort", False)}
        >>> rules = UpdateRules("retract", flush=True, on_failure="hold", own=own)
        >>> rules.manners("http://a:1").pause_mode, rules.manners("http://b:1").pause_mode
        ('retract', 'abort')
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
    own: Mapping[str, Manners] = field(default_factory=dict)

    def manners(self, url: str) -> Manners:
        """Those of the engine at a URL."""
        return self.own.get(url) or Manners(self.pause_mode, self.flush)
