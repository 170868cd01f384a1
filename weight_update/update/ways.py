"""The ways that bytes can take, and which one an update takes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from weight_update.errors import ConfigurationError
from weight_update.options import UpdateOptions, Way
from weight_update.update.fleet import Fleet
from weight_update.update.protocols import Group, Packer

GroupFactory = Callable[[Sequence[str], UpdateOptions, int, torch.device], Group]
PackerFactory = Callable[[torch.device], Packer]


@dataclass(frozen=True)
class Ends:
    """What a way needs.

    Attributes:
        open_group: Makes a group.
        open_packer: Makes the packer for a device.
    """

    open_group: GroupFactory
    open_packer: PackerFactory


def choose_way(
    fleet: Fleet, options: UpdateOptions, ways: Mapping[Way, Ends]
) -> tuple[Way, tuple[str, ...]]:
    """The way for a fleet of inspected engines, and why it was chosen.

    Raises:
        ConfigurationError: The way that was asked for cannot reach an engine.
    """
    offline = {m.url: m.engine.intake.offline for m in fleet.members if m.engine.intake.offline}
    asked = options.transport
    if asked == "auto" and offline and "disk" in ways:
        return "disk", tuple(f"disk: {url} {reason}" for url, reason in offline.items())
    way = next(iter(ways)) if asked == "auto" else asked
    if way not in ways:
        raise ConfigurationError(f"transport={way!r} is not there", phase="connect")
    for url, reason in offline.items() if way == "broadcast" else ():
        raise ConfigurationError(
            str(reason), engine=url, phase="connect", remedy="use transport='disk'"
        )
    return way, ()
