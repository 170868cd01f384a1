"""The session that the update requests of one update run in."""

from __future__ import annotations

from typing import Any

from weight_update.engines.sglang.client import SGLangClient, update_request
from weight_update.engines.sglang.payload import tensor_request
from weight_update.errors import EngineRejected
from weight_update.waiting import Deadline
from weight_update.weights.buckets import Bucket
from weight_update.weights.cargo import Cargo


class SGLangSession:
    """One update of one server: open, apply buckets, close; or recover.

    Args:
        client: The server.
        needed: Whether the release has sessions; without, opening and closing do nothing.
        drafts: Whether the server runs a draft model. It may have layers of the same names,
            and left to its default, a release with sessions loads the weights of the model
            that is served into both. Older releases load them into that one only.
        ranks: The server's tensor parallel ranks, each of which opens shared memory by itself.
        first_rank: The trainer's rank that shares a GPU with the first of them.
    """

    def __init__(
        self,
        client: SGLangClient,
        *,
        needed: bool,
        drafts: bool = False,
        ranks: int = 1,
        first_rank: int = 0,
    ) -> None:
        self._client = client
        self._needed = needed
        self._drafts = drafts
        self._trainers_ranks = range(first_rank, first_rank + ranks)
        self._selector = "target" if needed and drafts else None

    def open(self, deadline: Deadline) -> bool:
        """Begins the update; returns whether another one was open.

        A trainer that died leaves its session open, and with it weights that may be partly
        its own: it is closed, and the caller must not take the weights for clean.
        """
        if not self._needed:
            return False
        try:
            self._client.begin(deadline, self._selector)
            return False
        except EngineRejected as error:
            if "already open" not in error.message:
                raise
        self._client.end(deadline)
        self._client.begin(deadline, self._selector)
        return True

    def apply(
        self, bucket: Bucket, cargo: Cargo, *, group_name: str, flush: bool, deadline: Deadline
    ) -> None:
        """Announces a bucket and returns when the server has loaded it.

        Args:
            bucket: What it brings.
            cargo: What was packed for it: shared memory to open, or what is broadcast meanwhile.
            group_name: The group it is broadcast in.
            flush: Whether the server flushes its cache after loading.
            deadline: Bound of the call.

        Raises:
            EngineRejected: Refused; its ``applied`` says how much was loaded all the same.
        """
        if cargo.shared:
            self._client.open_tensors(self._opening(bucket, cargo, flush=flush), deadline)
            return
        body = update_request(bucket, group_name=group_name, flush=flush, selector=self._selector)
        self._client.update(body, deadline)

    def _opening(self, bucket: Bucket, cargo: Cargo, *, flush: bool) -> dict[str, Any]:
        shared = [cargo.shared_by(rank) for rank in self._trainers_ranks]
        body = tensor_request(bucket, shared, flush=flush)
        if self._selector is not None:
            body["selector"] = self._selector
        elif self._drafts:  # releases before sessions load these into both models
            body["disable_draft_model"] = True
        return body

    def close(self, deadline: Deadline) -> None:
        """Ends the update."""
        if self._needed:
            self._client.end(deadline)

    def recover(self, deadline: Deadline) -> None:
        """After a failure: leaves no session open, so that the server may continue."""
        if not self._needed:
            return
        try:
            self._client.end(deadline)
        except EngineRejected as error:
            if "no weight-update session" not in error.message:
                raise
