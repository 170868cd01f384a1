"""Constant traffic for the soak: a process of its own whose clients ask without a pause.

``python -m weight_update.bench.soak.traffic JOB`` is started by :class:`Traffic`. It is told of
each new version on standard input, writes a line an answer on standard output, and ends, once
all that was asked is answered, when standard input does.
"""

from __future__ import annotations

import json
import random
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from queue import Empty, SimpleQueue
from types import TracebackType
from typing import Any, Self

import requests

from weight_update.rollouts import is_aborted, retry_aborted, salted, versions_of

TOKENS = 24
_ATTEMPTS = 1000
_ANSWER_SECONDS = 120.0
# How long an engine that was killed may stay away.
_RETURN_SECONDS = 240.0
_BETWEEN_SECONDS = 0.02
_END_SECONDS = 120.0


@dataclass(frozen=True)
class TrafficJob:
    """What is asked of whom.

    Args:
        urls: The engines.
        clients: How many clients each has.
        prompts: What they ask.
        seed: What makes their choices repeat.
    """

    urls: Sequence[str]
    clients: int
    prompts: Sequence[Sequence[int]]
    seed: int = 0


@dataclass(frozen=True)
class Answer:
    """One completion, however often it had to be asked for.

    Attributes:
        engine: Who gave it.
        prompt: Which prompt.
        salt: The version that the client knew, the key of its prefixes.
        output: The tokens.
        spans: Version, start and end of each stretch of tokens.
        aborts: How often it was aborted and asked for again.
        drops: How often the connection broke and it was asked for again.
        trouble: Why there is none; empty if there is.
    """

    engine: str
    prompt: int
    salt: str
    output: Sequence[int] = ()
    spans: Sequence[tuple[str, int, int]] = ()
    aborts: int = 0
    drops: int = 0
    trouble: str = ""


# -- the process ---------------------------------------------------------------------------


class _Client(threading.Thread):
    """Asks one engine, again and again."""

    def __init__(self, job: TrafficJob, url: str, number: int, world: _World) -> None:
        super().__init__(daemon=True)
        self._prompts, self._url, self._world = job.prompts, url, world
        self._random = random.Random(f"{job.seed} {url} {number}")
        self._session = requests.Session()
        self._session.trust_env = False  # a proxy cannot reach an engine on this host
        self._drops = self._aborts = 0

    def run(self) -> None:
        while not self._world.over.is_set():
            self._world.count()
            self._world.tell(self._ask())
            time.sleep(_BETWEEN_SECONDS)

    def _ask(self) -> Answer:
        prompt, salt = self._random.randrange(len(self._prompts)), self._world.version
        self._drops = self._aborts = 0
        sampling = {"max_new_tokens": TOKENS, "temperature": 0.0, "ignore_eos": True}
        plain = {"input_ids": list(self._prompts[prompt]), "sampling_params": sampling}
        keep = self._random.random() < 0.5
        try:
            request = salted(plain, salt)
            found = retry_aborted(self._generate, request, attempts=_ATTEMPTS, keep=keep)
        except (RuntimeError, OSError) as error:
            return Answer(self._url, prompt, salt, trouble=f"{type(error).__name__}: {error}")
        spans = [(span.version, span.start, span.end) for span in versions_of(found).spans]
        ids = found["output_ids"]
        return Answer(self._url, prompt, salt, ids, spans, self._aborts, self._drops)

    def _generate(self, request: dict[str, Any]) -> Any:
        """One answer; an engine whose process ended is asked again once it is back."""
        patience = time.monotonic() + _RETURN_SECONDS
        while True:
            try:
                answer = self._post(request)
            except requests.ConnectionError:
                if time.monotonic() > patience:
                    raise
                self._drops += 1
                time.sleep(0.2)
                continue
            self._aborts += is_aborted(answer)
            return answer

    def _post(self, request: dict[str, Any]) -> Any:
        answer = self._session.post(f"{self._url}/generate", json=request, timeout=_ANSWER_SECONDS)
        if not answer.ok:
            raise RuntimeError(f"/generate answered {answer.status_code}: {answer.text[:200]}")
        return answer.json()


@dataclass
class _World:
    """What all clients share."""

    version: str = "default"
    asked: int = 0
    over: threading.Event = field(default_factory=threading.Event)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def count(self) -> None:
        with self._lock:
            self.asked += 1

    def tell(self, answer: Answer) -> None:
        with self._lock:
            print(json.dumps(asdict(answer)), flush=True)


def serve(job: TrafficJob, orders: Iterable[str]) -> None:
    """Asks until there are no more orders; each order is a version that engines have now."""
    world = _World()
    clients = [_Client(job, url, n, world) for url in job.urls for n in range(job.clients)]
    for client in clients:
        client.start()
    for order in orders:
        world.version = order.strip()
    world.over.set()
    for client in clients:
        client.join()
    print(json.dumps({"asked": world.asked}), flush=True)


# -- the side of the soak ------------------------------------------------------------------


class Traffic:
    """Runs the process, and gives what it was answered.

    Args:
        job: What is asked.

    Attributes:
        asked: How many completions were asked for; known at the end.
    """

    def __init__(self, job: TrafficJob) -> None:
        self.asked: int | None = None
        self._answers: SimpleQueue[Answer] = SimpleQueue()
        command = [sys.executable, "-m", "weight_update.bench.soak.traffic"]
        self._process = subprocess.Popen(
            [*command, json.dumps(asdict(job))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,  # Ctrl-C is for this process, whose end closes its input
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def tell(self, version: int) -> None:
        """Says which version is served now.

        Raises:
            RuntimeError: The process ended.
        """
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(f"{version}\n")
            self._process.stdin.flush()
        except BrokenPipeError as error:
            raise RuntimeError("the clients' process ended") from error

    def take(self) -> list[Answer]:
        """What was answered since it was last asked for."""
        found = []
        while True:
            try:
                found.append(self._answers.get_nowait())
            except Empty:
                return found

    def finish(self) -> list[Answer]:
        """Asks nothing new, and waits for the answers that are still out."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._reader.join(_END_SECONDS)
        return self.take()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            told = json.loads(line)
            if "asked" in told:
                self.asked = told["asked"]
            else:
                self._answers.put(Answer(**told))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._process.kill()
        self._process.wait()
        self._reader.join()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()


if __name__ == "__main__":
    serve(TrafficJob(**json.loads(sys.argv[1])), sys.stdin)
