"""The session of an update that a server reads from a folder."""

from __future__ import annotations

from typing import Any

from weight_update.engines.model_folder import link_rest
from weight_update.engines.sglang.client import SGLangClient
from weight_update.errors import ConfigurationError, EngineRejected
from weight_update.waiting import Deadline
from weight_update.weights.buckets import Bucket
from weight_update.weights.cargo import Cargo


class SGLangDiskSession:
    """One update of one server: a request tells it to load a folder.

    The server restores and processes quantised weights itself around each load, so this opens
    no session: an own one would process them twice. A request that was given up is finished by
    the server all the same, and a second one may only follow once it was: the next update asks
    the server what it is, which it answers after that.

    Args:
        client: The server.
        model_path: The folder of the model that it showed, for what stands there beside weights:
            whoever looks at the path of its model later finds a whole checkpoint.
    """

    def __init__(self, client: SGLangClient, model_path: Any) -> None:
        self._client = client
        self._model_path = model_path

    def open(self, deadline: Deadline) -> bool:
        """Nothing: loading a folder needs no session."""
        return False

    def apply(
        self, bucket: Bucket, cargo: Cargo, *, group_name: str, flush: bool, deadline: Deadline
    ) -> None:
        """Has the server load what was written for a bucket; returns when it has.

        Args:
            bucket: What was written.
            cargo: Where.
            group_name: There is none.
            flush: Whether the server flushes its cache after loading.
            deadline: Bound of the call.

        Raises:
            EngineRejected: Refused; its ``applied`` says how much was loaded all the same.
        """
        if cargo.folder is None:
            raise ConfigurationError("nothing was written", phase="transfer")
        link_rest(self._model_path, cargo.folder)
        try:
            with cargo.reading(self._client.url):
                self._client.load(str(cargo.folder), deadline, flush=flush)
        except EngineRejected as error:
            if error.applied == "nothing":
                error.remedy = error.remedy or (
                    f"the server must see {cargo.folder} under this path: in another container, "
                    "or as another user, it may not; set directory="
                )
            raise

    def close(self, deadline: Deadline) -> None:
        """Nothing: a load is whole when it is answered."""

    def recover(self, deadline: Deadline) -> None:
        """Nothing is open."""
