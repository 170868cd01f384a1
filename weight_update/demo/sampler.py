"""Sampling from a live engine, with requests in flight at all times."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from itertools import cycle
from types import TracebackType
from typing import Any

import requests

from weight_update.demo.task import OUTPUT_TOKENS, PROMPTS
from weight_update.rollouts import Span, versions_of

GROUP = 4
"""Requests of one HTTP call, all for the same prompt."""
GROUPS_IN_FLIGHT = 14
REQUESTS_IN_FLIGHT = GROUP * GROUPS_IN_FLIGHT
MOST_LOST = 10 * GROUP
_CALL_SECONDS = 60.0


class DemoError(RuntimeError):
    """The demo cannot go on."""


@dataclass(frozen=True)
class Sample:
    """One finished request.

    Attributes:
        prompt: Its tokens.
        output: The tokens that the engine sampled.
        logprobs: The engine's log-probability of each.
        spans: Which version of the weights made which of them.
        asked_under: The engine's version when the request was sent.
    """

    prompt: tuple[int, ...]
    output: tuple[int, ...]
    logprobs: tuple[float, ...]
    spans: tuple[Span, ...]
    asked_under: str

    @property
    def carried(self) -> bool:
        """Whether the request was running across an update."""
        return len(self.spans) > 1


class EngineClient:
    """What the demo asks an engine besides weight updates.

    Args:
        url: Where the engine listens.
    """

    def __init__(self, url: str) -> None:
        self.url = url
        self._session = requests.Session()
        self._session.trust_env = False  # a proxy cannot reach an engine on this host
        adapter = requests.adapters.HTTPAdapter(pool_maxsize=GROUPS_IN_FLIGHT)
        self._session.mount("http://", adapter)

    def version(self) -> str:
        """The label of the weights that the engine serves."""
        return str(self._call("GET", "/model_info")["weight_version"])

    def release(self) -> str:
        """The engine's release."""
        return str(self._call("GET", "/server_info")["version"])

    def greedy(self, prompt: Sequence[int]) -> tuple[int, ...]:
        """What the engine says after a prompt, greedily."""
        return tuple(self.generate([prompt], temperature=0.0)[0]["output_ids"])

    def generate(
        self, prompts: Sequence[Sequence[int]], *, temperature: float = 1.0
    ) -> list[dict[str, Any]]:
        """Answers to several prompts, each a request of its own to the engine."""
        sampling = {
            "max_new_tokens": OUTPUT_TOKENS,
            "temperature": temperature,
            "ignore_eos": True,
        }
        body = {
            "input_ids": [list(prompt) for prompt in prompts],
            "sampling_params": sampling,
            "return_logprob": True,
        }
        answers: list[dict[str, Any]] = self._call("POST", "/generate", body)
        return answers

    def _call(self, method: str, path: str, body: object = None) -> Any:
        url = self.url + path
        try:
            answer = self._session.request(method, url, json=body, timeout=_CALL_SECONDS)
        except requests.RequestException as error:
            raise DemoError(f"{method} {path} got no answer: {error}") from error
        if not answer.ok:
            raise DemoError(f"{method} {path} answered {answer.status_code}: {answer.text}")
        return answer.json()


def read_sample(prompt: Sequence[int], answer: dict[str, Any], asked_under: str) -> Sample | None:
    """The sample of an answer; None if the engine did not finish the request."""
    meta = answer["meta_info"]
    output = tuple(answer["output_ids"])
    logprobs = tuple(float(entry[0]) for entry in meta["output_token_logprobs"])
    finished = meta["finish_reason"]["type"] == "length"
    if not finished or not len(output) == len(logprobs) == OUTPUT_TOKENS:
        return None
    return Sample(tuple(prompt), output, logprobs, versions_of(answer).spans, asked_under)


class Sampler:
    """Keeps requests in flight: whenever a group of them is taken, another is sent.

    It never waits for an update and is not told of one, so that updates find requests running.

    Args:
        client: The engine to sample from.
        version: The version that it serves.
    """

    def __init__(self, client: EngineClient, version: str) -> None:
        self.asked = 0
        self.returned = 0
        self.lost = 0
        self._client = client
        self._prompts: Iterator[tuple[int, ...]] = cycle(PROMPTS)
        self._pool = ThreadPoolExecutor(GROUPS_IN_FLIGHT, thread_name_prefix="sampler")
        self._flying: set[Future[list[Sample]]] = set()
        for _ in range(GROUPS_IN_FLIGHT):
            self._send(version)

    def take(self, groups: int, version: str) -> list[Sample]:
        """Wait for the next groups to finish, and send as many new ones.

        Args:
            groups: How many groups of samples are wanted.
            version: The version that the engine serves now.

        Raises:
            DemoError: The engine keeps losing requests.
        """
        samples: list[Sample] = []
        for _ in range(groups):
            samples += self._land()
            self._send(version)
        return samples

    def drain(self) -> list[Sample]:
        """Wait for all that is in flight, and send nothing new."""
        samples: list[Sample] = []
        while self._flying:
            samples += self._land()
        return samples

    def __enter__(self) -> Sampler:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._pool.shutdown(wait=kind is None, cancel_futures=True)

    def _send(self, version: str) -> None:
        self.asked += GROUP
        self._flying.add(self._pool.submit(self._ask, next(self._prompts), version))

    def _ask(self, prompt: tuple[int, ...], version: str) -> list[Sample]:
        answers = self._client.generate([prompt] * GROUP)
        samples = [read_sample(prompt, answer, version) for answer in answers]
        return [sample for sample in samples if sample is not None]

    def _land(self) -> list[Sample]:
        """Take one group that has finished; what of it did not come back is lost."""
        done, _ = wait(self._flying, return_when=FIRST_COMPLETED)
        group = done.pop()
        self._flying.remove(group)
        error = group.exception()
        samples = [] if error is not None else group.result()
        self.returned += len(samples)
        self.lost += GROUP - len(samples)
        if self.lost > MOST_LOST:
            raise DemoError(f"the engine lost {self.lost} of {self.asked} requests") from error
        return samples
