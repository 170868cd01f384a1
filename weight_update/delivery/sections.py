"""A fleet of several kinds of engines: what all share, and what each kind has of its own."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Literal

from weight_update.errors import ConfigurationError
from weight_update.options import (
    DIRECTORY_VARIABLE,
    HttpOptions,
    PauseMode,
    UpdateOptions,
    read_text,
)

EngineKind = Literal["sglang", "vllm"]

OWN = frozenset(
    {
        *("master_address", "master_port", "num_gpus", "directory"),
        *("pause_mode", "flush_cache_on_update", "reads_variables", "http"),
    }
)
"""Options that may differ from one kind of engine to another; one update has one of each other."""
_OWN_ARGUMENTS = ", ".join(
    (
        *sorted(OWN - {"http", "reads_variables", "directory"}),
        *(f.name for f in fields(HttpOptions)),
    )
)
# What becomes of requests that run, the hardest first.
_HARDEST: tuple[PauseMode, ...] = ("abort", "retract", "in_place")


@dataclass(frozen=True)
class Section:
    """Engines of one kind, and how they are spoken to.

    Attributes:
        kind: What they are.
        urls: Where they are.
        options: Theirs.
    """

    kind: EngineKind
    urls: tuple[str, ...]
    options: UpdateOptions


@dataclass(frozen=True)
class FleetOptions(UpdateOptions):
    """Options of a fleet: those that its sections share, and the sections with their own.

    Attributes:
        sections: The kinds of engines.
        homes: By URL, the number of an engine's section. It grows with the fleet, so that a copy in
            another process knows engines that were added.
    """

    sections: tuple[Section, ...] = ()
    homes: dict[str, int] = field(default_factory=dict, compare=False)

    def of(self, url: str) -> UpdateOptions:
        """Those of the section that an engine belongs to."""
        home = self.homes.get(url)
        return self if home is None else self.sections[home].options

    def effective_pause_mode(self) -> PauseMode:
        """Of the modes of all sections the hardest on requests that run."""
        modes = {section.options.effective_pause_mode() for section in self.sections}
        return min(modes, key=_HARDEST.index, default="retract")

    def flush_wanted(self) -> bool:
        """Whether a section's caches should be flushed."""
        return any(section.options.flush_wanted() for section in self.sections)


def fleet_options(sections: Sequence[Section]) -> FleetOptions:
    """What sections make together.

    Raises:
        ConfigurationError: They differ where a fleet has one setting, or cannot go together.

    Example:
        >>> fleet_options([
        ...     Section("sglang", ("http://a:1",), UpdateOptions(timeout=60.0)),
        ...     Section("vllm", ("http://b:1",), UpdateOptions(timeout=90.0))])
        Traceback (most recent call last):
        weight_update.errors.ConfigurationError: timeout=60.0 for http://a:1 (sglang), timeout=90...
    """
    if not sections:
        raise ConfigurationError("a fleet needs at least one scheme with servers")
    first = sections[0].options
    shared = {f.name: getattr(first, f.name) for f in fields(UpdateOptions) if f.name not in OWN}
    for section in sections:
        _refuse_what_one_kind_cannot(section.options)
    _refuse_folders(sections)
    for name in shared:
        _agree(name, sections)
    _refuse_one_port(sections)
    gpus = [section.options.num_gpus for section in sections]
    known = [number for number in gpus if number is not None]
    return FleetOptions(
        **shared,
        num_gpus=sum(known) if len(known) == len(gpus) else None,
        master_address=_only(section.options.master_address for section in sections),
        sections=tuple(sections),
        homes={url: i for i, section in enumerate(sections) for url in section.urls},
    )


def _agree(name: str, sections: Sequence[Section]) -> None:
    values = [getattr(section.options, name) for section in sections]
    if all(value == values[0] for value in values):
        return
    told = ", ".join(
        f"{name}={value!r} for {section.urls[0]} ({section.kind})"
        for value, section in zip(values, sections, strict=True)
    )
    raise ConfigurationError(
        f"{told}: all servers of a fleet take part in the same updates",
        remedy=f"give every scheme the same {name}=; what may differ: {_OWN_ARGUMENTS}",
    )


def _refuse_what_one_kind_cannot(options: UpdateOptions) -> None:
    """Raises for what carries weights to one kind of engine, and not to all."""
    refusals = {
        f"transport={options.transport!r}": options.transport not in ("auto", "broadcast"),
        "trainer_ranks='node'": options.trainer_ranks == "node",
        "lora='adapter'": options.lora == "adapter",
    }
    for what, refused in refusals.items():
        if refused:
            raise ConfigurationError(
                f"{what} does not go with a fleet, whose servers get whole weights by a broadcast",
                remedy="leave it out, or give each kind of server a sender of its own",
            )


def _refuse_folders(sections: Sequence[Section]) -> None:
    """Raises for a folder that was named: that of the environment is for others."""
    for directory in (section.options.directory for section in sections):
        if directory not in (None, read_text(DIRECTORY_VARIABLE)):
            raise ConfigurationError(
                f"directory={directory!r} is for updates by disk, and a fleet gets weights by a "
                "broadcast",
                remedy="leave it out",
            )


def _refuse_one_port(sections: Sequence[Section]) -> None:
    ports = [s.options.master_port for s in sections if s.options.master_port is not None]
    if len(ports) != len(set(ports)):
        raise ConfigurationError(
            f"master_port={ports[0]} is given twice, and each kind of server meets the trainer at "
            "a port of its own",
            remedy="give other ports, or leave master_port=None",
        )


def _only(values: Iterable[Any]) -> Any:
    """The value, if there is one only."""
    found = set(values)
    return found.pop() if len(found) == 1 else None
