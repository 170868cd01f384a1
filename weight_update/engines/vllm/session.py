"""Where a vLLM server stands between the start and the finish of an update, and its session.

Started, its layers wait for their weights: whatever generates then ends the server. So does what
generates after an update request that failed, although the server has closed the update by
itself: only an empty update puts back what did not come.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from weight_update.engines.vllm.client import VLLMClient, lacks_method, update_request
from weight_update.errors import EngineRejected, WeightUpdateError
from weight_update.waiting import Deadline
from weight_update.weights.buckets import Bucket
from weight_update.weights.cargo import Cargo

_OPEN_ALREADY = "already active"


class Bracket:
    """Opens and closes updates of one server, and knows whether it may generate.

    Args:
        client: The server.
        extended: Whether its workers may have the library's extension.

    Attributes:
        open: Layers may wait for their weights: nothing may be generated.
        suspect: An update failed there, or may have: it is undone before the next one starts.
    """

    def __init__(self, client: VLLMClient, *, extended: bool = False) -> None:
        self._client, self._extended = client, extended
        self.open = False
        self.suspect = False

    def start(self, deadline: Deadline) -> bool:
        """Opens an update; returns whether one was open that had to be closed."""
        was_open = self.restore(deadline) if self.suspect else False
        if self._starts(deadline):
            return was_open
        self.finish(deadline)
        self.open = True
        self._client.start_update(deadline)
        return True

    def finish(self, deadline: Deadline) -> None:
        """Closes the update."""
        self._client.finish_update(deadline)
        self.open = self.suspect = False

    def end_others(self, deadline: Deadline) -> None:
        """Ends what another way may have left open; all layers are whole, and stay so."""
        if self.suspect:
            with suppress(EngineRejected):  # none was open, or it has no weight transfer
                self._client.finish_update(deadline)
        self.open = self.suspect = False

    def restore(self, deadline: Deadline) -> bool:
        """Closes whatever is open by an empty update: weights that did not come are as they were.

        Those that came stay, so that only a full update makes the server whole.

        Returns:
            Whether the server had an update open.
        """
        self.open = True
        if self._extended:
            self._put_back(deadline)
        started = self._starts(deadline)
        self.finish(deadline)
        return not started

    def _put_back(self, deadline: Deadline) -> None:
        """An empty update would make a layer of what came for it, were it only a part, or wrong."""
        try:
            self._client.rpc("weight_update_put_back", deadline, phase="end")
        except EngineRejected as error:
            if not lacks_method(error):  # another extension
                raise

    def _starts(self, deadline: Deadline) -> bool:
        """Opens an update, unless one is open."""
        self.open = True  # before the call leaves: a lost answer may have opened it
        try:
            self._client.start_update(deadline)
        except EngineRejected as error:
            if _OPEN_ALREADY not in error.message:
                raise
            return False
        return True


class VLLMSession:
    """One update of one server, over its weight transfer.

    Args:
        client: The server.
        bracket: Opens and closes updates.
        packing: What the release wants to be told of packing with every request.
    """

    def __init__(
        self, client: VLLMClient, bracket: Bracket, packing: Mapping[str, Any] | None = None
    ) -> None:
        self._client, self._bracket = client, bracket
        self._packing = packing or {}

    def open(self, deadline: Deadline) -> bool:
        """Opens the update; returns whether another trainer's was open and had to be closed."""
        return self._bracket.start(deadline)

    def apply(
        self, bucket: Bucket, cargo: Cargo, *, group_name: str, flush: bool, deadline: Deadline
    ) -> None:
        """Announces a bucket; returns when all workers have received and loaded it.

        Raises:
            EngineRejected: Its ``applied`` says whether anything may have been loaded.
        """
        try:
            self._client.update(update_request(bucket, self._packing), deadline)
        except WeightUpdateError:
            self._bracket.suspect = True
            raise

    def close(self, deadline: Deadline) -> None:
        """Ends the update."""
        self._bracket.finish(deadline)

    def recover(self, deadline: Deadline) -> None:
        """Undoes what did not come, so that the server can generate again.

        Raises:
            EngineRejected: It could not be done, and whatever generates ends the server.
        """
        if not (self._bracket.open or self._bracket.suspect):
            return
        try:
            self._bracket.restore(deadline)
        except WeightUpdateError as error:
            # Of a server that only is silent it would be believed that nothing was applied.
            raise EngineRejected(
                f"its layers wait for weights, and the update could not be undone: {error.message}",
                engine=self._client.url,
                phase=error.phase,
                remedy="push a whole model; if that fails too, restart the server",
            ) from error
