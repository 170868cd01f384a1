"""The one thread that owns the model, the group and the batch, and obeys commands in order."""

from __future__ import annotations

import logging
import os
import queue
import sys
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from itertools import groupby, zip_longest
from pathlib import Path
from typing import Any, TypeVar

import torch

from weight_update.reference_engine import group as groups
from weight_update.reference_engine import weights
from weight_update.reference_engine.disk import read_folder
from weight_update.reference_engine.faults import Fault, without_dropped
from weight_update.reference_engine.generation import GenerateRequest, Generator
from weight_update.reference_engine.loading import Loader
from weight_update.reference_engine.occupation import Occupation
from weight_update.reference_engine.opening import open_tensors
from weight_update.reference_engine.ranks import Ranks
from weight_update.reference_engine.releases import Release

_log = logging.getLogger("reference_engine.scheduler")
_T = TypeVar("_T")

# Who waits for its result, the name of the scheduler's method, and the arguments.
_Command = tuple[Future[Any], str, tuple[Any, ...]]

_UPDATED = "Succeeded to update parameter online."
FLUSH_REFUSED = (
    "Weights were updated, but the cache was not flushed because requests are still running "
    "or queued. Retract or finish them, then call /flush_cache."
)


@dataclass(frozen=True)
class Outcome:
    """The answer to a control call."""

    success: bool
    message: str


class Scheduler(threading.Thread):
    """Runs commands first in, first out, and a decoding step between them.

    A command runs to its end before anything else happens: while one waits in a rendezvous or
    a broadcast, nothing is generated and nothing else is answered. A command that raises ends
    the process, as in the real server.

    Every rank has one, and all run the same commands between the same steps: rank 0 tells the
    others which. Only its results are seen by anybody.
    """

    def __init__(
        self,
        model: weights.Weights,
        generator: Generator,
        release: Release,
        ranks: Ranks,
        *,
        group_timeout: float = 1800.0,
        max_running: int = 64,
        memory_saver: bool = False,
    ) -> None:
        super().__init__(name="scheduler", daemon=True)
        self.weight_version = "default"
        self.load = {"running": 0, "waiting": 0, "tokens": 0}
        self._weights = model
        self._generator = generator
        self._release = release
        self._ranks = ranks
        self._group_timeout = timedelta(seconds=group_timeout)
        self._max_running = max_running
        self._commands: queue.SimpleQueue[_Command] = queue.SimpleQueue()
        self._waiting: list[GenerateRequest] = []
        self._running: list[GenerateRequest] = []
        self._inboxes: dict[str, weights.Inbox] = {}
        self._loader = Loader(model.model.device)
        self._memory = Occupation(memory_saver, model.fill_arbitrarily)
        self._paused = False
        self._session_open = False

    @property
    def model_config(self) -> Any:
        """The configuration of the model."""
        return self._weights.model.config

    # ---- the face to other threads

    def post(self, command: Callable[..., object], *args: Any) -> None:
        """Queue a command and do not wait for it."""
        self._commands.put((Future(), command.__name__, args))

    def call(self, command: Callable[..., _T], *args: Any) -> Future[_T]:
        """Queue a command and return the future of its result."""
        future: Future[_T] = Future()
        self._commands.put((future, command.__name__, args))
        return future

    def run(self) -> None:
        """Serve until the process ends."""
        try:
            self._serve()
        except BaseException:
            _log.exception("Scheduler hit an exception")
            logging.shutdown()
            sys.stderr.flush()
            os._exit(1)

    def _serve(self) -> None:
        if self._weights.model.device.type == "cuda":
            torch.cuda.set_device(self._weights.model.device)
        while True:
            self._obey()
            if not self._paused:
                self._loader.finish()
                self._step()
                self.load = self.measure()

    def _obey(self) -> None:
        """Run the commands that are queued at rank 0."""
        queued = [] if self._ranks.rank else self._queued()
        calls = self._ranks.agree([(name, args) for _, name, args in queued])
        for (name, args), command in zip_longest(calls, queued):
            if name != Scheduler.update.__name__:  # which alone may begin while weights are loaded
                self._loader.finish()
            result = getattr(self, name)(*args)
            if command is not None:
                command[0].set_result(result)
            self._loader.go()

    def _queued(self) -> list[_Command]:
        """Take all queued commands; wait for one if there is nothing else to do."""
        busy = (self._running or self._waiting) and not self._paused
        commands = [] if busy else [self._commands.get()]
        while not self._commands.empty():
            commands.append(self._commands.get())
        # Those that nobody waits for any more are left out.
        return [command for command in commands if command[0].set_running_or_notify_cancel()]

    # ---- generation

    def _step(self) -> None:
        while self._waiting and len(self._running) < self._max_running:
            request = self._waiting.pop(0)
            self._generator.admit(request)
            self._running.append(request)
        if self._running:
            self._memory.need("weights", "kv_cache")
        self._generator.step(self._running, self.weight_version)
        for request in [request for request in self._running if request.finish_reason()]:
            self._running.remove(request)
            self._generator.retire(request)
            self._finish(request)

    def submit(self, request: GenerateRequest) -> None:
        """Queue a generate request; one that wants no tokens has its answer at once."""
        if request.finish_reason():
            self._finish(request)
        else:
            self._waiting.append(request)

    def _finish(self, request: GenerateRequest) -> None:
        if request.answer.set_running_or_notify_cancel():
            meta = self._meta(request)
            answer = {"text": "", "output_ids": request.output, "meta_info": meta}
            request.answer.set_result(answer)

    def _meta(self, request: GenerateRequest) -> dict[str, Any]:
        meta: dict[str, Any] = {
            "id": request.rid,
            "finish_reason": request.finish_reason(),
            "prompt_tokens": request.prompt_length,
            "completion_tokens": len(request.versions),
            "cached_tokens": request.cached_tokens,
            "weight_version": self.weight_version,
        }
        if self._release.retractions_counted:
            meta["num_retractions"] = request.retractions
        if self._release.token_spans:
            meta["weight_versions"] = version_spans(request.versions)
            meta["weight_version"] = (request.versions or [self.weight_version])[-1]
        if request.aborted_waiting:  # the queue answers with less than the batch does
            for key in ("prompt_tokens", "cached_tokens", "num_retractions"):
                meta.pop(key, None)
        return meta

    def abort(self, rid: str, everything: bool) -> None:
        """End the request called ``rid`` and those whose ids start with it, or all.

        An id that is nobody's ends nothing, whatever starts with it. A waiting request ends at
        once. A running one ends with its next step, which never comes while the engine is
        paused.
        """
        known = self._waiting + self._running
        named = everything or any(request.rid == rid for request in known)
        hit = [r for r in known if named and (everything or r.rid.startswith(rid))]
        for request in hit:
            request.aborted = True
        for request in [request for request in hit if request in self._waiting]:
            self._waiting.remove(request)
            request.abort_waiting()
            self._finish(request)

    def pause(self, mode: str) -> None:
        """Stop generating; ``retract`` also gives up all keys and values in use."""
        self._paused = True
        if mode == "retract":
            for request in self._running:
                request.retract()
            self._waiting[:0] = self._running
            self._running.clear()

    def resume(self) -> None:
        """Generate again."""
        self._paused = False

    def flush(self, strict: bool = False) -> bool:
        """Empty the prefix cache, if the engine is idle; ``strict`` counts the queue always."""
        if not self._is_idle(strict):
            return False
        self._generator.cache.clear()
        return True

    def _is_idle(self, strict: bool = False) -> bool:
        lenient = self._paused and self._release.paused_flush_ignores_queue and not strict
        return not self._running and (lenient or not self._waiting)

    def release_memory(self, tags: Sequence[str]) -> None:
        """Free memory of an idle engine; the prefix cache goes with that of keys and values."""
        words = "release_memory_occupation should be called only when server is idle."
        assert self._is_idle(), words
        self._memory.release(tags)
        if not tags or "kv_cache" in tags:
            self._generator.cache.clear()

    def resume_memory(self, tags: Sequence[str]) -> None:
        """Take memory back; the weights in it are arbitrary if they were really freed."""
        self._memory.resume(tags)

    def measure(self) -> dict[str, int]:
        """Count requests and their tokens."""
        return {
            "running": len(self._running),
            "waiting": len(self._waiting),
            "tokens": sum(request.kv_length for request in self._running),
        }

    # ---- groups

    def join_group(self, address: groups.GroupAddress) -> Outcome:
        """Join the trainer's group; blocks the scheduler until all ranks are there."""
        assert address.name, "Group name cannot be empty"
        address = replace(address, rank=address.rank + self._ranks.rank)
        try:
            group = groups.join(address, self._group_timeout)
        except Exception as error:
            return Outcome(False, f"Failed to initialize custom process group: {error}.")
        self._inboxes[address.name] = weights.Inbox(group, self._weights.model.device)
        return Outcome(True, "Succeeded to initialize custom process group.")

    def leave_group(self, name: str) -> Outcome:
        """Destroy a group."""
        if name not in self._inboxes:
            return Outcome(False, "The group to be destroyed does not exist.")
        try:
            groups.leave(self._inboxes.pop(name).group)
        except Exception as error:
            return Outcome(False, f"Failed to destroy custom process group: {error}.")
        return Outcome(True, "Succeeded to destroy custom process group.")

    # ---- weights

    def begin_update(self) -> Outcome:
        """Open the session that updates need."""
        if self._session_open:
            return Outcome(
                False, "a weight-update session is already open; call end_weight_update() first"
            )
        self._session_open = True
        return Outcome(True, "Success")

    def end_update(self) -> Outcome:
        """Close the session."""
        if not self._session_open:
            return Outcome(
                False, "no weight-update session is open; call begin_weight_update() first"
            )
        self._session_open = False
        return Outcome(True, "Success")

    def update(
        self,
        group_name: str,
        announced: weights.Announcement,
        version: str | None,
        flush: bool,
        faults: Sequence[Fault],
    ) -> Outcome:
        """Receive and load one set of tensors."""
        faults = [fault for fault in faults if fault.rank in (None, self._ranks.rank)]
        if self._release.sessions and not self._session_open:
            return Outcome(
                False,
                "update_weights_from_distributed must run between "
                "begin_weight_update() and end_weight_update()",
            )
        self._memory.need("weights")
        if self._release.unknown_group_kills:
            self._inbox(group_name)
        try:
            inbox = self._inbox(group_name)
            arrivals = inbox.receive(announced, faults)
        except Exception as error:
            told = self._release.failed_receive_told
            return Outcome(False, f"Failed to receive weights: {error}" if told else _partly(error))
        if faults or not self._weights.fit(arrivals):
            self._loader.finish()
            return self._load(arrivals, version, flush, faults)
        # Nothing can go wrong any more, so the answer need not wait for the copies.
        inbox.buffers.read_by(self._loader.start(partial(self._weights.take, arrivals)))
        return self._updated(version, flush, _UPDATED)

    def update_from_tensor(
        self,
        entries: Sequence[str],
        load_format: str | None,
        version: str | None,
        flush: bool,
        faults: Sequence[Fault],
    ) -> Outcome:
        """Open what the trainer shares with this rank, copy it and close it.

        Whatever cannot be opened or loaded ends the process.
        """
        faults = [fault for fault in faults if fault.rank in (None, self._ranks.rank)]
        if self._release.sessions and not self._session_open:
            return Outcome(
                False,
                "update_weights_from_tensor must run between "
                "begin_weight_update() and end_weight_update()",
            )
        self._memory.need("weights")
        arrivals = open_tensors(entries[self._ranks.rank], load_format, faults)
        self._weights.load(without_dropped(faults, arrivals), faults)
        arrivals.clear()
        outcome = self._updated(version, flush, "Success")
        self._ranks.gather(None)
        return outcome

    def update_from_disk(
        self, path: str, version: str | None, flush: bool, faults: Sequence[Fault]
    ) -> Outcome:
        """Load a folder; needs no session.

        What fails half-way is loaded once more, from the same folder, and if that fails too, it
        ends the process.
        """
        self._memory.need("weights")
        faults = [fault for fault in faults if fault.rank in (None, self._ranks.rank)]
        try:
            arrivals = read_folder(Path(path))
        except Exception as error:
            return Outcome(False, f"Failed to get weights iterator: {error}.")
        try:
            self._weights.load(without_dropped(faults, arrivals), faults)
        except Exception as error:
            self._weights.load(arrivals)
            rolled = "Rolling back to original weights."
            return Outcome(False, f"Failed to update weights: {error}.\n{rolled}")
        return self._updated(version, flush, "Succeeded to update model weights.")

    def _inbox(self, name: str) -> weights.Inbox:
        if name not in self._inboxes:
            raise LookupError(
                f"Group {name} not in {list(self._inboxes)}. "
                "Please call `init_weights_update_group` first."
            )
        return self._inboxes[name]

    def _load(
        self,
        arrivals: Sequence[weights.Arrival],
        version: str | None,
        flush: bool,
        faults: Sequence[Fault],
    ) -> Outcome:
        try:
            self._weights.load(without_dropped(faults, arrivals), faults)
        except Exception as error:
            return Outcome(False, _partly(error))
        return self._updated(version, flush, _UPDATED)

    def _updated(self, version: str | None, flush: bool, message: str) -> Outcome:
        if version is not None:
            self.weight_version = version
        if flush and not self.flush():
            assert not self._release.refused_flush_kills, "Cache flush failed after update"
            return Outcome(False, FLUSH_REFUSED)
        return Outcome(True, message)

    def set_version(self, version: str) -> None:
        """Call the weights ``version`` from the next token on."""
        self.weight_version = version

    def first_rows(self, name: str, count: int) -> list[Any] | None:
        """Return the first rows of a parameter."""
        return self._weights.first_rows(name, count)

    def checksums(self) -> list[dict[str, Any]]:
        """Return a digest of each parameter and what it is of, for each rank."""
        return self._ranks.gather(self._weights.checksums())

    def look(self) -> list[dict[str, Any]]:
        """Return what each rank's parameters are, without moving them."""
        return self._ranks.gather(self._weights.look())


def _partly(error: Exception) -> str:
    return (
        f"Failed to update parameter online: {error}. The full weights of the "
        "ModelRunner are partially updated. Please discard the whole weights."
    )


def version_spans(versions: Sequence[str]) -> list[dict[str, Any]]:
    """Run-length encode the versions of a request's tokens."""
    spans: list[dict[str, Any]] = []
    for version, tokens in groupby(versions):
        start = spans[-1]["end"] if spans else 0
        spans.append({"version": version, "start": start, "end": start + len(list(tokens))})
    return spans
