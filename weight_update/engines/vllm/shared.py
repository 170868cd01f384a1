"""The session of a vLLM server whose workers open the trainer's memory by themselves.

One call of a worker extension lasts as long as the update, and is told of each bucket over a
channel of its own. The extension brackets what it loads, and undoes what is not completed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, wait
from typing import Any, Protocol

from weight_update.engines.vllm.client import VLLMClient, lacks_method
from weight_update.engines.vllm.session import Bracket
from weight_update.errors import (
    ConfigurationError,
    EngineRejected,
    Phase,
    UpdateTimeout,
    WeightUpdateError,
)
from weight_update.waiting import Deadline, spawn
from weight_update.weights.buckets import Bucket
from weight_update.weights.cargo import Cargo, SharedTensor

Answer = Mapping[str, Any]
Check = Callable[[], None]

EXTENSION = "weight_update.vllm_worker.WorkerExtension"
# The call ends when the channel closes; this bounds one whose server is gone without a word.
_CALL_SECONDS = 24 * 3600.0


class Channel(Protocol):
    """How workers are told of memory; every message waits for all of them."""

    def bind(self, workers: Sequence[str]) -> Mapping[str, str]:
        """Makes an address for each worker."""

    def begin(self, deadline: Deadline, check: Check) -> list[Answer]:
        """Has workers open the update; ``check`` raises when they cannot answer any more."""

    def bring(
        self, bucket: Bucket, shared: Sequence[SharedTensor], deadline: Deadline, check: Check
    ) -> list[Answer]:
        """Has workers load a bucket."""

    def complete(self, deadline: Deadline, check: Check) -> list[Answer]:
        """Has workers close the update."""

    def close(self) -> None:
        """Ends the update on all workers, complete or not; may be repeated."""


OpenChannel = Callable[[str], Channel]
"""Opens the channel of one update of the engine at a URL."""


class VLLMSharedSession:
    """One update of one server: open, apply buckets, close; or recover.

    Args:
        client: The server.
        bracket: Knows whether it may generate.
        open_channel: Opens the channel.
        ranks: Workers that the server has; None when it does not say.
    """

    def __init__(
        self, client: VLLMClient, bracket: Bracket, open_channel: OpenChannel, ranks: int | None
    ) -> None:
        self._client, self._bracket, self._ranks = client, bracket, ranks
        self._open_channel = open_channel
        self._channel: Channel | None = None
        self._call: Future[list[Answer]] | None = None
        self._completing = False

    def open(self, deadline: Deadline) -> bool:
        """Begins the update; returns whether the one before was never completed.

        Raises:
            ConfigurationError: The server has no worker extension, or data parallel workers.
        """
        workers = workers_of(self._client, self._ranks, deadline, "begin")
        channel = self._channel = self._open_channel(self._client.url)
        addresses = channel.bind(list(workers))
        by_rank = {rank: addresses[worker] for worker, rank in workers.items()}
        told = {"addresses": by_rank, "seconds": deadline.remaining()}
        self._bracket.open = True
        self._call = spawn(self._receive, told, deadline.afresh(_CALL_SECONDS))
        answers = channel.begin(deadline, self._check)
        self._refuse(answers, "begin")
        return any(answer["unfinished"] for answer in answers)

    def apply(
        self, bucket: Bucket, cargo: Cargo, *, group_name: str, flush: bool, deadline: Deadline
    ) -> None:
        """Tells the workers of a bucket, and returns when they have loaded it.

        Raises:
            EngineRejected: A worker refused it; ``applied`` is ``"unknown"`` unless all weights
                are the old ones.
        """
        answers = self._begun.bring(bucket, cargo.shared, deadline, self._check)
        self._refuse(answers, "transfer")

    def close(self, deadline: Deadline) -> None:
        """Completes the update; returns when weights are as kernels want them."""
        self._completing = True
        self._refuse(self._begun.complete(deadline, self._check), "end")
        self._refuse(self._results(deadline), "end")
        self._bracket.end_others(deadline)
        self._begun.close()

    def recover(self, deadline: Deadline) -> None:
        """Has the workers give up an update that is not complete.

        Raises:
            EngineRejected: Some could not complete it, could not put old weights back, or are
                still busy.
        """
        if self._channel is not None:
            self._channel.close()
        try:
            results = self._results(deadline)
        except WeightUpdateError as error:
            # Of a server that only is silent it would be believed that nothing was applied.
            raise self._rejection(f"not undone: {error.message}", "end", changed=True) from error
        failed = [answer for answer in results if "error" in answer]
        broken = [answer for answer in failed if not answer["restored"]]
        self._bracket.open = self._bracket.open and bool(broken)
        if broken or (failed and self._completing):
            raise self._rejection(failed[0]["error"], "end", changed=True)

    @property
    def _begun(self) -> Channel:
        if self._channel is None:
            raise WeightUpdateError("no update was begun", engine=self._client.url, phase="begin")
        return self._channel

    def _receive(self, told: Mapping[str, Any], deadline: Deadline) -> list[Answer]:
        try:
            return self._client.rpc("weight_update_from_memory", deadline, kwargs=told)
        except EngineRejected as error:
            error.applied = "unknown"
            raise

    def _check(self) -> None:
        """Raises when the call ended other than well: then no worker answers any more."""
        if self._call is not None and self._call.done():
            self._refuse(self._call.result(), "transfer")

    def _results(self, deadline: Deadline) -> list[Answer]:
        """What the call returned; waits until it did."""
        call = self._call
        if call is None:
            return []
        if not wait([call], timeout=deadline.remaining()).done:
            raise UpdateTimeout(
                f"its workers did not end the update within {deadline.seconds:.1f} s",
                engine=self._client.url,
                phase="end",
            )
        return call.result()

    def _refuse(self, answers: Sequence[Answer], phase: Phase) -> None:
        """Raises if a worker failed; what the others have loaded meanwhile stays."""
        failed = [answer for answer in answers if "error" in answer]
        if failed:
            loaded = phase == "transfer" and len(failed) < len(answers)
            changed = loaded or any(answer["changed"] for answer in failed)
            raise self._rejection(failed[0]["error"], phase, changed=changed)

    def _rejection(self, words: str, phase: Phase, *, changed: bool) -> EngineRejected:
        error = EngineRejected(words, engine=self._client.url, phase=phase)
        error.applied = "unknown" if changed else "nothing"
        return error


def workers_of(
    client: VLLMClient, ranks: int | None, deadline: Deadline, phase: Phase
) -> dict[str, str]:
    """Names of a server's workers, each after its GPU, and their ranks.

    Args:
        client: The server.
        ranks: Workers that it has; None when it does not say.
        deadline: Bound of the call.
        phase: Of errors.

    Raises:
        ConfigurationError: The server has no worker extension, or data parallel workers.
    """
    try:
        places = client.rpc("weight_update_place", deadline, phase=phase)
    except EngineRejected as error:
        if not lacks_method(error):
            raise
        raise ConfigurationError(
            f"its workers cannot open memory: {error.message}",
            engine=client.url,
            phase=phase,
            remedy=f"start vLLM with --worker-extension-cls {EXTENSION}, and the folder that "
            "holds weight_update on PYTHONPATH",
        ) from error
    if not places or ranks not in (None, len(places)):
        raise ConfigurationError(
            f"{len(places)} of its {ranks} workers can be called",
            engine=client.url,
            phase=phase,
            remedy="use tensor parallelism only, or transport='broadcast'",
        )
    return {f"{p['rank']}-{p['device'] or 'cpu'}": str(p["rank"]) for p in places}
