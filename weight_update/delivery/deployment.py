"""A deployment: which engines there are, which ways bytes take to them, and what is sent."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from weight_update.delivery.ranks import Ranks
from weight_update.engines.sglang.engine import SGLangEngine
from weight_update.errors import ConfigurationError
from weight_update.options import UpdateOptions, Way
from weight_update.transports.broadcast import BucketPacker
from weight_update.transports.disk import DiskPacker, open_no_group
from weight_update.transports.folders import VersionFolders
from weight_update.transports.process_group import open_group
from weight_update.transports.shared_memory import SharedMemoryWay
from weight_update.update.protocols import Engine
from weight_update.update.updater import Updater
from weight_update.update.ways import Ends
from weight_update.weights.checkpoint import Checkpoint
from weight_update.weights.extraction_cache import ExtractionCache
from weight_update.weights.saved_state_dict import SavedStateDict
from weight_update.weights.specs import Weight
from weight_update.weights.stream import Stream


class Deployment(Protocol):
    """What differs from one deployment to the next; a delivery does the rest.

    Attributes:
        merges: Whether whole weights are sent, which metadata and a name map tell of.
    """

    merges: bool

    def updater(self, urls: Sequence[str]) -> Updater:
        """The one updater, over the ways that lead to these engines."""

    def extract(self, source: Any) -> tuple[Weight, ...]:
        """What a source sends."""

    def snapshot(self, source: Any) -> Any:
        """A copy of what a source sends, which training does not change."""

    def counted(self) -> None:
        """Every engine has the weights: what was kept for them may go."""

    def close(self) -> None:
        """Removes what was written or shared for engines."""


OpenDeployment = Callable[[UpdateOptions, Ranks], Deployment]
"""Makes a deployment; it is pickled with a sender, and called again where that arrives."""


class WholeModel:
    """The part of a deployment that is the same wherever whole weights are sent."""

    merges = True

    def __init__(self) -> None:
        self._extraction = ExtractionCache()

    def extract(self, source: Any) -> tuple[Weight, ...]:
        """The weights of a mapping, a TensorDict, a module or a checkpoint."""
        return self._extraction.extract(source)

    def snapshot(self, source: Any) -> Any:
        """A copy of the weights on their device; a checkpoint on disk is returned as it is.

        Raises:
            ConfigurationError: It is read while it is sent.
        """
        if isinstance(source, (Checkpoint, SavedStateDict)):
            return source
        if isinstance(source, Stream):
            raise ConfigurationError(
                "a stream is read while it is sent, and cannot be copied beforehand",
                phase="plan",
                remedy="pass snapshot=False, and weights that do not change meanwhile",
            )
        return {weight.spec.name: weight.read().clone() for weight in self.extract(source)}


class SGLangDeployment(WholeModel):
    """Whole weights to SGLang servers: by broadcast, in memory that they open, or by files.

    Args:
        options: Everything that shapes an update.
        ranks: The trainer's other ranks, which may join the group.
        open_engine: Makes the engine at a URL; None opens SGLang's over HTTP.
    """

    def __init__(
        self,
        options: UpdateOptions,
        ranks: Ranks,
        open_engine: Callable[[str], Engine] | None = None,
    ) -> None:
        super().__init__()
        self._options, self._ranks = options, ranks
        self._open_engine = open_engine or (lambda url: SGLangEngine(url, options.http))
        directory = options.directory
        self._shared = SharedMemoryWay(options.load_format)
        self._folders = VersionFolders(None if directory is None else Path(directory))

    def updater(self, urls: Sequence[str]) -> Updater:
        """The one updater, with all ways that lead to SGLang."""
        return Updater(urls, self._open_engine, self._ways(), self._options)

    def _ways(self) -> Mapping[Way, Ends]:
        load_format = self._options.load_format
        return {
            "broadcast": self._ranks.ends(
                Ends(open_group, lambda device: BucketPacker(device, load_format))
            ),
            "ipc": Ends(
                lambda urls, _, __, device: self._shared.open_group(urls, device),
                self._shared.open_packer,
            ),
            "disk": Ends(
                lambda urls, options, *_: open_no_group(urls, options),
                lambda _: DiskPacker(self._folders),
            ),
        }

    def counted(self) -> None:
        """Only the newest folders are kept."""
        self._folders.keep_newest()

    def close(self) -> None:
        """Removes folders, and gives up shared memory."""
        self._folders.close()
        self._shared.close()
