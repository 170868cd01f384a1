"""The deployment that brings whole weights to a fleet of several kinds of engines, in one update.

Each kind has a group of its own, in which it meets the trainer in its own way. A bucket is packed
once, and leaves for all groups at once; the procedure sees one group and one fleet.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate
from typing import Any, Protocol, cast
from weakref import WeakValueDictionary

import torch

from weight_update.delivery.deployment import WholeModel
from weight_update.delivery.ranks import Ranks
from weight_update.delivery.sections import EngineKind, FleetOptions, Section
from weight_update.delivery.sglang import SGLangDeployment
from weight_update.delivery.vllm import VLLMDeployment
from weight_update.engines.probing import Service
from weight_update.engines.recognition import recognise
from weight_update.errors import ConfigurationError, EngineUnreachable, WeightUpdateError
from weight_update.options import LoadFormat, PauseMode, UpdateOptions, Way
from weight_update.transports.broadcast import BucketPacker
from weight_update.transports.process_group import UpdateGroup
from weight_update.transports.several_groups import Seat, SeveralGroups
from weight_update.update.protocols import Engine
from weight_update.update.updater import Updater
from weight_update.update.ways import Ends
from weight_update.waiting import Deadline

# An engine that is to be added is asked what it is.
_ASK_SECONDS = 5.0
_CHECK_URL = "check that the server runs and that its address is right"
# A router's workers are found by updates of SGLang.
_KINDS: dict[Service, EngineKind] = {"sglang": "sglang", "router": "sglang", "vllm": "vllm"}


class Housing(Protocol):
    """What a deployment of one kind lends to a fleet of several."""

    def open_engine(self, url: str) -> Engine:
        """The engine at a URL; it is asked nothing yet."""

    @property
    def open_group(self) -> Callable[..., UpdateGroup]:
        """Opens a group that engines of this kind can join."""

    def close(self) -> None:
        """Removes what was made for engines."""


_HOUSING: dict[EngineKind, Callable[[UpdateOptions, Ranks], Housing]] = {
    "sglang": SGLangDeployment,
    "vllm": VLLMDeployment,
}


class MixedDeployment(WholeModel):
    """Whole weights to engines of several kinds, by a broadcast to all of them at once.

    Args:
        options: Those of the fleet and of its sections.
        ranks: The trainer's other ranks; they may hold parts of a model, and join no group.
    """

    def __init__(self, options: UpdateOptions, ranks: Ranks) -> None:
        super().__init__()
        assert isinstance(options, FleetOptions), "made by fleet_options()"
        self._options = options
        self._housings = [_HOUSING[s.kind](s.options, ranks) for s in options.sections]
        self._engines: dict[str, Engine] = {}
        self._groups: WeakValueDictionary[str, SeveralGroups] = WeakValueDictionary()

    def updater(self, urls: Sequence[str]) -> Updater:
        """The one updater of all engines."""
        ways: dict[Way, Ends] = {"broadcast": Ends(self._open_group, self._open_packer)}
        return Updater(urls, self._open_engine, ways, self._options)

    def counted(self, urls: Sequence[str]) -> None:
        """Nothing was kept for an update."""

    def close(self) -> None:
        """Gives up what each kind holds; the groups are given up by their owner."""
        for housing in self._housings:
            housing.close()

    # -- engines --------------------------------------------------------------------------

    def _open_engine(self, url: str) -> Engine:
        """The engine at a URL; one that nobody named is asked what it is.

        Raises:
            ConfigurationError: It is of no kind that the fleet has.
            WeightUpdateError: It does not answer.
        """
        if url not in self._options.homes:
            self._options.homes[url] = self._recognise(url)
        home = self._options.homes[url]

        def adopt(workers: Iterable[str]) -> None:
            self._options.homes.update(dict.fromkeys(workers, home))

        engine = SeatedEngine(self._housings[home].open_engine(url), self._groups.get, adopt)
        self._engines[url] = cast("Engine", engine)
        return self._engines[url]

    def _recognise(self, url: str) -> int:
        """The number of the section that a server belongs to, by what it says it is."""
        deadline = Deadline(min(_ASK_SECONDS, self._options.timeout))
        why = ""
        for number, section in enumerate(self._options.sections):
            found = recognise(url, section.options.http, deadline.remaining())
            if found.service is None:
                why = why or found.why
            elif _KINDS.get(found.service) == section.kind:
                return number
        if why:
            raise EngineUnreachable(why, engine=url, phase="connect", remedy=_CHECK_URL)
        kinds = ", ".join(dict.fromkeys(section.kind for section in self._options.sections))
        raise ConfigurationError(
            f"what answers here is none of the kinds that the fleet has ({kinds})",
            engine=url,
            phase="connect",
            remedy="give the server's root URL (without /v1), or make a fleet with its kind",
        )

    # -- groups ---------------------------------------------------------------------------

    def _open_group(
        self, urls: Sequence[str], _: UpdateOptions, __: int, device: torch.device
    ) -> SeveralGroups:
        """A group for each kind, under one name.

        Raises:
            ConfigurationError: An engine does not say how many ranks it has, or cannot be reached.
        """
        counts = [self._ranks_of(url) for url in urls]
        first = dict(zip(urls, accumulate([1, *counts]), strict=False))
        groups: list[UpdateGroup] = []
        seats: dict[int, Seat] = {}
        try:
            for number, section in enumerate(self._options.sections):
                mine = [url for url in urls if self._options.homes[url] == number]
                ranks = [first[u] + rank for u in mine for rank in range(self._ranks_of(u))]
                if ranks:
                    _check_number(section, mine, len(ranks))
                    groups.append(self._open_one(number, mine, 1 + len(ranks), device, groups[:1]))
                    seats |= {rank: Seat(groups[-1], 1 + i) for i, rank in enumerate(ranks)}
        except BaseException:
            for group in groups:
                group.give_up()
            raise
        several = SeveralGroups(groups, seats)
        self._groups[several.name] = several
        return several

    def _open_one(
        self,
        number: int,
        urls: Sequence[str],
        world_size: int,
        device: torch.device,
        before: Sequence[UpdateGroup],
    ) -> UpdateGroup:
        options = self._options.sections[number].options
        name = before[0].name if before else None
        return self._housings[number].open_group(urls, options, world_size, device, name=name)

    def _ranks_of(self, url: str) -> int:
        ranks = self._engines[url].ranks
        if ranks is None:
            raise ConfigurationError(
                "it does not say how many ranks it runs, which each server of a mixed fleet must",
                engine=url,
                phase="connect",
                remedy="update it by a sender of its own, with num_gpus=",
            )
        return ranks

    def _open_packer(self, device: torch.device) -> BucketPacker:
        return BucketPacker(device, self._load_format)

    @property
    def _load_format(self) -> LoadFormat:
        """Servers of vLLM are told once whether weights are packed: all buckets are, or none."""
        asked = self._options.load_format
        fixed = any(section.kind == "vllm" for section in self._options.sections)
        return "flattened_bucket" if fixed and asked == "auto" else asked


class SeatedEngine:
    """An engine among others of other kinds: it joins the group of its own kind.

    Whatever is not said here is its own.

    Args:
        engine: The engine.
        groups: The groups of a name.
        adopt: Told of the workers behind it, which are of its kind.
    """

    def __init__(
        self,
        engine: Engine,
        groups: Callable[[str], SeveralGroups | None],
        adopt: Callable[[Iterable[str]], None],
    ) -> None:
        self._engine, self._groups, self._adopt = engine, groups, adopt

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def workers(self, deadline: Deadline) -> tuple[str, ...]:
        """URLs of the engines behind this one, if it is a router; none for an engine."""
        found = self._engine.workers(deadline)
        self._adopt(found)
        return found

    def objection(self, mode: PauseMode) -> str | None:
        """Why this engine cannot be updated under a pause mode; None when it can."""
        offline = self._engine.intake.offline
        if offline is not None:
            return f"it {offline}, and a mixed fleet gets weights by no other way: update it alone"
        return self._engine.objection(mode)

    def join(self, *, rank_offset: int, group_name: str, **told: Any) -> None:
        """Joins the group of its kind; returns when all ranks of the engine have.

        Raises:
            WeightUpdateError: The group was given up.
        """
        groups = self._groups(group_name)
        if groups is None:
            raise WeightUpdateError("the group was given up", engine=self.url, phase="connect")
        seat = groups.seat(rank_offset)
        place = {"address": seat.group.address, "port": seat.group.port}
        size = {"rank_offset": seat.rank, "world_size": seat.group.world_size}
        self._engine.join(**{**told, **place, **size, "group_name": group_name})


def _check_number(section: Section, urls: Sequence[str], ranks: int) -> None:
    """Raises if a section that is whole has another number of ranks than its scheme was told."""
    told = section.options.num_gpus
    if told not in (None, ranks) and set(urls) == set(section.urls):
        raise ConfigurationError(
            f"num_gpus={told}, but the {section.kind} servers run {ranks} rank(s)",
            phase="connect",
            remedy="leave num_gpus=None to ask the servers",
        )
