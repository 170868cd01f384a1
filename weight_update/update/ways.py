"""The ways that bytes can take, which one an update takes, and another where one fails."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch

from weight_update.errors import ConfigurationError, UpdateTimeout, WeightUpdateError
from weight_update.facts import Intake
from weight_update.options import UpdateOptions, Way
from weight_update.update.fleet import Fleet
from weight_update.update.protocols import Group, Packer

GroupFactory = Callable[[Sequence[str], UpdateOptions, int, torch.device], Group]
PackerFactory = Callable[[torch.device], Packer]

NCCL_REMEDY = (
    "set NCCL_P2P_DISABLE and NCCL_SHM_DISABLE on both sides alike, best on neither; do not hide "
    "GPUs of one side from the other (CUDA_VISIBLE_DEVICES); let containers share /dev/shm and the "
    "IPC namespace"
)
# What decides how NCCL connects two processes; the two ends must agree.
_SETTINGS = re.compile(
    r"NCCL_(P2P|SHM|IB|NET|NVLS|CUMEM|MNNVL|SOCKET|ALGO|PROTO|HOSTID|CROSS)\w*|CUDA_VISIBLE_DEVICES"
)
_QUOTED_CHARACTERS = 200


class Others(Protocol):
    """Other ranks of the trainer that join a group: as its ranks 1, 2, ..., before the engines."""

    @property
    def ranks(self) -> tuple[int, ...]:
        """Who they are among the trainer's ranks."""

    @property
    def reasons(self) -> tuple[str, ...]:
        """What the report says of them."""

    def check(self) -> None:
        """Raises if one of them failed."""


class NoOthers:
    """The trainer is one rank of the group."""

    ranks: tuple[int, ...] = ()
    reasons: tuple[str, ...] = ()

    def check(self) -> None:
        """Nobody can fail."""


@dataclass(frozen=True)
class Ends:
    """What a way needs.

    Attributes:
        open_group: Makes a group; raises ConfigurationError if it cannot reach the engines.
        open_packer: Makes the packer for a device; called before the group is made.
        others: Who else of the trainer joins the group.
    """

    open_group: GroupFactory
    open_packer: PackerFactory
    others: Others = field(default_factory=NoOthers)


@dataclass(frozen=True)
class Course:
    """Which way is taken, from which device, and why.

    Attributes:
        way: The way.
        device: Where the bytes leave.
        reasons: Why, for the report; empty where nothing had to be chosen.
        warnings: What is wrong with it, for the report.
    """

    way: Way
    device: torch.device
    reasons: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()

    @property
    def is_tried(self) -> bool:
        """Whether a tiny transfer must show that it works, before an update relies on it."""
        return self.way == "ipc" or (self.way == "broadcast" and self.device.type == "cuda")


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
    for url, reason in offline.items() if way != "disk" else ():
        raise ConfigurationError(
            f"it {reason}",
            engine=url,
            phase="connect",
            remedy="use transport='disk', or start one server a replica, with tensor parallelism "
            "only, and name the URL of each",
        )
    return way, ()


def detours(
    course: Course,
    failure: WeightUpdateError,
    options: UpdateOptions,
    ways: Mapping[Way, Ends],
    settings: str = "",
) -> list[Course]:
    """Courses that may work where NCCL did not, the fastest first; none for other failures.

    Args:
        course: What was tried.
        failure: Why it failed.
        options: What the user asked for: ``backend="nccl"`` and ``transport=`` are kept to.
        ways: What there is.
        settings: The NCCL settings of both ends, in words.
    """
    kept = options.backend != "auto" or course.way != "broadcast"
    if kept or not (course.is_tried and is_nccls(failure)):
        return []
    words, found = words_of(failure), []
    if "Duplicate GPU" in str(failure) and options.transport == "auto" and "ipc" in ways:
        reason = f"ipc, since trainer and engine share a GPU, which NCCL refuses: {words}"
        found.append(Course("ipc", course.device, (*course.reasons, reason)))
    reason = f"gloo, since NCCL failed: {words}"
    warning = (
        f"the bytes go through the host's memory, which is many times slower, since NCCL "
        f"failed ({words}){settings and f'; {settings}'}; to have it back, {NCCL_REMEDY}"
    )
    reasons = (*course.reasons, reason)
    found.append(Course("broadcast", torch.device("cpu"), reasons, (warning,)))
    return found


def is_nccls(failure: WeightUpdateError) -> bool:
    """Whether NCCL could not connect the ends, although both are there.

    Example:
        >>> is_nccls(WeightUpdateError("NCCL error: Duplicate GPU detected", phase="transfer"))
        True
        >>> is_nccls(WeightUpdateError("CUDA out of memory", phase="transfer"))
        False
    """
    said = re.search("nccl|the communicator was not built", failure.message, re.IGNORECASE)
    return failure.phase == "transfer" and (said is not None or isinstance(failure, UpdateTimeout))


def words_of(failure: WeightUpdateError) -> str:
    """What NCCL said last, which says more than what stands before it.

    Example:
        >>> words_of(WeightUpdateError("NCCL error: invalid usage Last error: Duplicate GPU"))
        'Duplicate GPU'
    """
    _, found, last = failure.message.rpartition("Last error:")
    return " ".join((last if found else failure.message).split())[:_QUOTED_CHARACTERS]


def nccl_settings(environment: Mapping[str, str]) -> dict[str, str]:
    """The settings of an environment that decide how NCCL connects.

    Example:
        >>> nccl_settings({"NCCL_P2P_DISABLE": "1", "NCCL_DEBUG": "INFO", "HOME": "/"})
        {'NCCL_P2P_DISABLE': '1'}
    """
    return {k: v for k, v in sorted(environment.items()) if _SETTINGS.fullmatch(k)}


def compared_settings(ours: Mapping[str, str], engines: Iterable[Intake]) -> str:
    """The NCCL settings of both ends, in words, as far as they are known.

    Example:
        >>> compared_settings({}, [Intake(nccl={"NCCL_CUMEM_ENABLE": "0"})])
        'NCCL settings: none here; engines set NCCL_CUMEM_ENABLE=0 unless their environment does'
    """
    theirs = {f"{name}={value}" for engine in engines for name, value in engine.nccl.items()}
    here = ", ".join(f"{name}={value}" for name, value in ours.items()) or "none"
    there = f"engines set {', '.join(sorted(theirs))} unless their environment does"
    return f"NCCL settings: {here} here" + (f"; {there}" if theirs else "")
