"""A deployment: which engines there are, which ways bytes take to them, and what is sent."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from weight_update.delivery.ranks import Ranks
from weight_update.errors import ConfigurationError
from weight_update.options import UpdateOptions
from weight_update.update.updater import Updater
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

    def counted(self, urls: Sequence[str]) -> None:
        """These engines, the whole fleet, have the weights: what was kept may go."""

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
