"""The deployment that brings whole weights to SGLang servers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from weight_update.delivery.deployment import WholeModel
from weight_update.delivery.places import Places
from weight_update.delivery.ranks import Ranks
from weight_update.engines.sglang.actor import ActorCalls
from weight_update.engines.sglang.engine import SGLangEngine
from weight_update.options import UpdateOptions, Way
from weight_update.transports.broadcast import BucketPacker
from weight_update.transports.disk import DiskPacker, open_no_group
from weight_update.transports.folders import VersionFolders
from weight_update.transports.process_group import open_group
from weight_update.transports.shared_memory import SharedMemoryWay
from weight_update.update.protocols import Engine
from weight_update.update.updater import Updater
from weight_update.update.ways import Ends


class SGLangDeployment(WholeModel):
    """Whole weights to SGLang servers: by broadcast, in memory that they open, or by files.

    Args:
        options: Everything that shapes an update.
        ranks: The trainer's other ranks, which may join the group.
        actors: By the name that stands for its URL, engines that are Ray actors.
        offsets: By URL, the trainer's rank that shares a GPU with the engine's first; without,
            engines fill the trainer's GPUs one after the other.
    """

    open_group = staticmethod(open_group)

    def __init__(
        self,
        options: UpdateOptions,
        ranks: Ranks,
        *,
        actors: Mapping[str, Any] | None = None,
        offsets: Mapping[str, int] | None = None,
    ) -> None:
        super().__init__()
        self._options, self._ranks = options, ranks
        self._actors, self._places = dict(actors or {}), Places(offsets)
        directory = options.directory
        self._shared = SharedMemoryWay(options.load_format)
        self._folders = VersionFolders(None if directory is None else Path(directory))

    def updater(self, urls: Sequence[str]) -> Updater:
        """The one updater, with all ways that lead to SGLang."""
        return Updater(urls, self.open_engine, self._ways(), self._options)

    def open_engine(self, url: str) -> Engine:
        """The engine at a URL; it is asked nothing yet."""
        actor, http = self._actors.get(url), self._options.http
        calls = None if actor is None else ActorCalls(actor)
        engine = SGLangEngine(url, http, calls, first_rank=lambda: self._places.first(url))
        self._places.add(url, engine)
        return engine

    def _ways(self) -> Mapping[Way, Ends]:
        load_format = self._options.load_format
        return {
            "broadcast": self._ranks.ends(
                Ends(open_group, lambda device: BucketPacker(device, load_format))
            ),
            "ipc": self._ranks.shared_ends(
                Ends(
                    lambda urls, _, __, device: self._shared.open_group(urls, device),
                    self._shared.open_packer,
                ),
                self._options,
                self._places.ranks,
            ),
            "disk": Ends(
                lambda urls, options, *_: open_no_group(urls, options),
                lambda _: DiskPacker(self._folders),
            ),
        }

    def counted(self, urls: Sequence[str]) -> None:
        """Only the newest folders are kept, and those that engines of the fleet still read."""
        self._folders.forget_all_but(urls)
        self._folders.keep_newest()

    def close(self) -> None:
        """Removes folders, and gives up shared memory."""
        self._folders.close()
        self._shared.close()
