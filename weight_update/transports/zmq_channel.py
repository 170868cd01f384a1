"""The trainer's end of the sockets over which vLLM's workers are told of shared memory.

A REQ socket a worker. Every message is answered before the next one leaves, so a buffer is
written again only when its bucket was taken. The other end lists the messages
(``weight_update/vllm_worker/shared_update.py``).
"""

from __future__ import annotations

import json
import shutil
import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from weight_update.errors import (
    ConfigurationError,
    EngineUnreachable,
    Phase,
    UpdateTimeout,
    WeightUpdateError,
)
from weight_update.waiting import Deadline
from weight_update.weights.buckets import Bucket
from weight_update.weights.cargo import SharedMemory, SharedTensor

Answer = Mapping[str, Any]
Check = Callable[[], None]
Addresses = Mapping[str, str]

_WATCH_MILLISECONDS = 20
# How long a check is given to say why a worker's end is gone: its words come by another way.
_WORDS_SECONDS = 2.0
# A socket's path must fit into 107 bytes.
_PATH_BYTES = 107


def check_zmq() -> None:
    """Raises ConfigurationError if pyzmq is not installed."""
    try:
        import zmq  # noqa: F401
    except ImportError as error:
        raise ConfigurationError(
            "transport='ipc' talks to vLLM's workers by ZMQ, and pyzmq is not installed",
            phase="connect",
            remedy="run: pip install pyzmq",
        ) from error


class ZmqChannel:
    """The sockets of one update of one engine; close it whatever happens.

    Several threads may send: each message is answered by all workers before the next one leaves.

    Args:
        engine: URL of the engine, for errors.
        over: A ZMQ address to bind instead of files in a folder of this user, such as
            ``tcp://127.0.0.1:*``. Whoever can connect there is told of the weights.
    """

    def __init__(self, engine: str, over: str | None = None) -> None:
        check_zmq()
        import zmq

        self._engine, self._over = engine, over
        self._zmq: Any = zmq
        self._context: Any = zmq.Context()
        self._ends: dict[str, _End] = {}
        self._folder: Path | None = None
        self._turn = threading.Lock()
        self._closing = threading.Event()
        self._tensors = 0

    # -- the messages -------------------------------------------------------------------

    def bind(self, workers: Sequence[str]) -> Addresses:
        """Makes a socket a worker; returns their addresses."""
        for worker in workers:
            self._ends[worker] = _End(self._zmq, self._context, self._place(worker))
        return {worker: end.address for worker, end in self._ends.items()}

    def begin(self, deadline: Deadline, check: Check) -> list[Answer]:
        """Has all workers open the update.

        Args:
            deadline: Bound of this message, and of the time until the next one.
            check: Raises when the workers cannot answer any more.
        """
        answers = self._ask([_head("begin", deadline)], "begin", deadline, check)
        self._remove_folder()  # all are connected; a trainer that is killed leaves nothing behind
        return answers

    def bring(
        self, bucket: Bucket, shared: Sequence[SharedTensor], deadline: Deadline, check: Check
    ) -> list[Answer]:
        """Tells all workers of a bucket; they have loaded it when they answer."""
        self._tensors += len(bucket.specs)
        head = _head("bucket", deadline, **located(bucket, shared))
        return self._ask([head, bucket.announcement.encode()], "transfer", deadline, check)

    def complete(self, deadline: Deadline, check: Check) -> list[Answer]:
        """Has all workers close the update; weights are ready for use when they answer."""
        head = _head("complete", deadline, tensors=self._tensors)
        return self._ask([head], "end", deadline, check)

    def close(self) -> None:
        """Closes the sockets; workers whose update is not complete give it up."""
        self._closing.set()
        with self._turn:
            for end in self._ends.values():
                end.close()
            self._ends.clear()
            self._context.destroy(linger=0)
        self._remove_folder()

    # -- how they travel ----------------------------------------------------------------

    def _place(self, worker: str) -> str:
        if self._over is not None:
            return self._over
        if self._folder is None:
            self._folder = _own_folder(worker)
        return f"ipc://{self._folder / worker}"

    def _remove_folder(self) -> None:
        folder, self._folder = self._folder, None
        if folder is not None:
            shutil.rmtree(folder, ignore_errors=True)

    def _ask(
        self, message: list[bytes], phase: Phase, deadline: Deadline, check: Check
    ) -> list[Answer]:
        with self._turn:
            for end in self._ends.values():
                end.owes(message)
            while waiting := [end for end in self._ends.values() if end.answer is None]:
                if self._closing.is_set():
                    raise WeightUpdateError("given up", engine=self._engine, phase=phase)
                if deadline.expired():
                    raise self._silent(phase, deadline)
                self._poll(waiting)
                check()
                self._look_for_lost(phase, deadline, check)
            return [end.answer or {} for end in self._ends.values()]

    def _poll(self, waiting: Sequence[_End]) -> None:
        """Sends and receives what can be; soon returns."""
        poller = self._zmq.Poller()
        for end in waiting:
            end.watched_by(poller)
        found = dict(poller.poll(_WATCH_MILLISECONDS))
        for end in waiting:
            end.step(found)

    def _look_for_lost(self, phase: Phase, deadline: Deadline, check: Check) -> None:
        """Raises if a worker went away without an answer; best with the engine's own words."""
        lost = [w for w, end in self._ends.items() if end.lost and end.answer is None]
        if not lost:
            return
        words = deadline.at_most(_WORDS_SECONDS)
        while not words.expired() and not self._closing.is_set():
            check()
            words.sleep(_WATCH_MILLISECONDS / 1000)
        raise EngineUnreachable(
            f"worker {', '.join(lost)} is gone", engine=self._engine, phase=phase
        )

    def _silent(self, phase: Phase, deadline: Deadline) -> UpdateTimeout:
        silent = ", ".join(worker for worker, end in self._ends.items() if end.answer is None)
        return UpdateTimeout(
            f"no answer from worker {silent} within {deadline.seconds:.1f} s",
            engine=self._engine,
            phase=phase,
        )


class _End:
    """A REQ socket to one worker.

    Attributes:
        address: Where the worker connects.
        answer: To the message that was sent last; None until it comes.
        lost: The worker was there, and is gone.
    """

    def __init__(self, zmq: Any, context: Any, address: str) -> None:
        self._zmq = zmq
        self._socket = context.socket(zmq.REQ)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._gone = self._socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        self._socket.bind(address)
        self.address = str(self._socket.getsockopt(zmq.LAST_ENDPOINT).decode().rstrip("\0"))
        self._unsent: list[bytes] = []
        self.answer: Answer | None = None
        self.lost = False

    def owes(self, message: list[bytes]) -> None:
        """Has it send a message."""
        self._unsent, self.answer = message, None

    def watched_by(self, poller: Any) -> None:
        """Has a poller wait for what comes next."""
        poller.register(self._socket, self._zmq.POLLOUT if self._unsent else self._zmq.POLLIN)
        poller.register(self._gone, self._zmq.POLLIN)

    def step(self, found: Mapping[Any, int]) -> None:
        """Does what a poller found can be done."""
        if self._socket in found and self._unsent:
            self._socket.send_multipart(self._unsent)
            self._unsent = []
        elif self._socket in found:
            self.answer = json.loads(self._socket.recv())
        elif self._gone in found:
            self.lost = True

    def close(self) -> None:
        """Closes it."""
        self._socket.disable_monitor()
        self._socket.close()


def located(bucket: Bucket, shared: Sequence[SharedTensor]) -> dict[str, Any]:
    """Where the weights of a bucket lie: the memories, and for each weight which one and where.

    Example:
        >>> import torch
        >>> from weight_update.weights.extract import extract_weights
        >>> memory = SharedMemory("", (b"a", 1), 8)
        >>> buffer = SharedTensor(memory, torch.uint8, (8,))
        >>> weights = extract_weights({"x": torch.ones(1), "y": torch.ones(())})
        >>> located(Bucket(weights), [buffer])
        {'memories': [{'device': '', 'opening': [{'hex': '61'}, 1]}], 'places': [(0, 0), (0, 4)]}
    """
    memories: dict[SharedMemory, int] = {}
    places: list[tuple[int, int]] = []
    start = shared[0].offset if bucket.flat else 0
    for index, spec in enumerate(bucket.specs):
        tensor = shared[0] if bucket.flat else shared[index]
        number = memories.setdefault(tensor.memory, len(memories))
        places.append((number, start if bucket.flat else tensor.offset))
        start += spec.nbytes
    told = [{"device": memory.device, "opening": memory.plain_opening} for memory in memories]
    return {"memories": told, "places": places}


def _head(kind: str, deadline: Deadline, **more: Any) -> bytes:
    return json.dumps({"kind": kind, "seconds": deadline.remaining(), **more}).encode()


def _own_folder(worker: str) -> Path:
    """A folder that this user alone can open, with room in its path for a socket's name."""
    for parent in (None, "/tmp"):
        folder = Path(tempfile.mkdtemp(prefix="weight_update-", dir=parent))
        if len(str(folder / worker).encode()) <= _PATH_BYTES:
            return folder
        folder.rmdir()
    raise ConfigurationError(f"no path to a socket is short enough for {worker!r}", phase="begin")
