"""vLLM servers as a synchronizer's generation side."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Literal, Unpack, get_args

from weight_update.delivery.delivery import Delivery
from weight_update.delivery.vllm import VLLMDeployment
from weight_update.engines.vllm.client import VLLMClient
from weight_update.engines.vllm.engine import VLLMControls
from weight_update.engines.vllm.facts import instance_of
from weight_update.errors import ConfigurationError, EngineUnreachable
from weight_update.options import HttpOptions, PauseMode, Transport, parse_server_urls
from weight_update.report import EngineOutcome, EngineState
from weight_update.synchronizers.facades.served import (
    PARTS,
    Occupation,
    Part,
    ServedGeneration,
    ServerOptions,
    on_all,
    read_options,
)
from weight_update.waiting import Deadline

_log = logging.getLogger("weight_update")

SleepLevel = Literal[1, 2]


class VLLMGeneration(ServedGeneration):
    """vLLM servers that generate with a policy's weights.

    They are started with ``VLLM_SERVER_DEV_MODE=1`` and a weight transfer backend, or with the
    library's worker extension where they open the trainer's memory; see ``docs/vllm.md``.

    Args:
        urls: URL of a server, or a sequence of several.
        pause_generation_mode: What becomes of requests in flight during an update: ``"retract"``
            freezes them, and they are computed anew when they go on; ``"abort"`` ends them early.
        needs_offload: Whether the servers sleep in :meth:`finish_generation` and wake up in
            :meth:`prepare_for_generation`. It takes ``--enable-sleep-mode``; on a CPU a server
            keeps its memory, and all the same generates nothing until it is fully awake.
        sleep_level: 1 keeps the weights of a server that sleeps in memory of its host, so that an
            update that fails leaves the old ones. 2 forgets them: what it takes back is no model
            until an update brought one.
        options: As :class:`~weight_update.VLLMWeightSyncScheme` takes them.

    Attributes:
        backends: Names by which a synchronizer's factory knows such engines.

    Raises:
        ConfigurationError: An argument cannot work; it is a ``ValueError`` too.

    Example:
        >>> generation = VLLMGeneration(["http://a:8000", "http://b:8000"], timeout=60.0)
        >>> generation.urls, generation.pause_generation_mode
        (('http://a:8000', 'http://b:8000'), 'retract')
        >>> VLLMGeneration("http://a:8000", pause_generation_mode="in_place")
        Traceback (most recent call last):
        weight_update.errors.ConfigurationError: pause_generation_mode='in_place' would leave ...
    """

    backends: tuple[str, ...] = ("vllm",)

    def __init__(
        self,
        urls: str | Sequence[str],
        *,
        pause_generation_mode: PauseMode = "retract",
        needs_offload: bool = False,
        sleep_level: SleepLevel = 1,
        **options: Unpack[ServerOptions],
    ) -> None:
        if sleep_level not in get_args(SleepLevel):
            raise ConfigurationError(f"sleep_level={sleep_level!r} must be 1 or 2")
        _refuse_stale(pause_generation_mode)
        self.sleep_level = sleep_level
        self._delivery: Delivery | None = None
        self._clients: dict[str, VLLMClient] = {}
        super().__init__(
            parse_server_urls(urls),
            read_options(options, pause_mode=pause_generation_mode),
            lambda url: VLLMServed(self, self._open_client(url), sleep_level),
            needs_offload=needs_offload,
        )

    def delivery(self, *, colocated: bool, timeout_s: float | None, policy: object) -> Delivery:
        """What brings a policy's weights to these servers.

        Args:
            colocated: Whether trainer and servers share their devices: workers open memory that
                the trainer shares. Otherwise weights are broadcast.
            timeout_s: Seconds for a whole update; None takes the options'.
            policy: The trainer's side; nothing of it is needed here.

        Raises:
            ConfigurationError: The options ask for a transport that does not go with it.
        """
        options = self.options if timeout_s is None else replace(self.options, timeout=timeout_s)
        options = replace(options, transport=_transport(options.transport, colocated))
        self._delivery = Delivery(
            self.urls, options, lambda o, ranks: VLLMDeployment(o, ranks, self._open_client)
        )
        return self._delivery

    def get_inference_world_size(self) -> int:
        """How many workers all servers have together.

        Raises:
            EngineUnreachable: A server does not say.
        """
        deadline = Deadline(self.options.timeout)
        return sum(on_all(self._engines(), lambda engine, d: engine.ranks(d), deadline))

    def prepare_for_generation(self, *, tags: Sequence[str] | None = None) -> None:
        """Wakes the servers up, weights first; those that are awake are left alone.

        A server is not woken up fully while it holds mixed weights: fully awake, it generates.

        Args:
            tags: ``"weights"``, ``"kv_cache"`` or both; None for all.

        Raises:
            WeightUpdateError: A server did not do it.
        """
        if self.needs_offload:
            self._on_all(_sleep_on)
        super().prepare_for_generation(tags=tags)

    def outcome(self, url: str) -> EngineOutcome | None:
        """What the last delivery knows of a server; None before there is one."""
        known: Mapping[str, EngineOutcome] = {}
        return (known if self._delivery is None else self._delivery.engines).get(url)

    def _open_client(self, url: str) -> VLLMClient:
        # One for updates and memory: it knows whether it put the server to sleep.
        if url not in self._clients:
            self._clients[url] = self._make_client(url)
        return self._clients[url]

    def _make_client(self, url: str) -> VLLMClient:
        return VLLMClient(url, self.options.http)

    def _engines(self) -> list[VLLMServed]:
        return [_of(occupation) for occupation in self._served]


class VLLMServed:
    """One server, as the facade speaks to it outside of updates.

    Args:
        generation: Knows what updates left on it.
        client: Speaks to it.
        level: How deep it sleeps.
    """

    def __init__(self, generation: VLLMGeneration, client: VLLMClient, level: SleepLevel) -> None:
        self.url = client.url
        self._generation, self._client, self._level = generation, client, level
        self._controls = VLLMControls(client.url, HttpOptions(), client)
        self._start: str | None = None

    def ranks(self, deadline: Deadline) -> int:
        """How many workers it has."""
        ranks = self._client.ranks(deadline)
        if ranks is None:
            raise EngineUnreachable(
                "the server does not say how many workers it has", engine=self.url, phase="connect"
            )
        return ranks

    def start_of(self, deadline: Deadline) -> str | None:
        """What this start of the server has of its own; one that started anew is awake."""
        start = instance_of(self._client.server_info(deadline))
        self._client.asleep = self._client.asleep and start == self._start
        self._start = start
        return start

    @property
    def asleep(self) -> bool:
        """Whether some of its memory is freed; paused, it would say so of itself in any case."""
        return self._client.asleep

    def await_idle(self, deadline: Deadline) -> None:
        """Nothing: a server that is told to sleep ends its requests first."""

    def release(self, parts: Sequence[Part], deadline: Deadline) -> None:
        """Has it sleep, once its requests have ended; vLLM frees both parts or none."""
        self._client.sleep(self._level, deadline, mode="wait")

    def resume(self, part: Part, deadline: Deadline) -> None:
        """Takes a part back. The last one would make it generate, which mixed weights must not."""
        if part == PARTS[-1] and self._held():
            _log.warning("%s is held, and sleeps on: the next sync heals it", self.url)
            return
        self._client.wake_up(deadline, tags=[part])

    def _held(self) -> bool:
        """Whether an update left it paused, with weights that are not one model's."""
        outcome = self._generation.outcome(self.url)
        broken = (EngineState.MIXED, EngineState.UNREACHABLE)
        return outcome is not None and outcome.paused and outcome.state in broken

    def flush(self, deadline: Deadline) -> None:
        """Drops the prefix cache; requests that run are computed anew."""
        self._controls.flush(deadline)

    def close(self) -> None:
        """Closes connections."""
        self._client.close()


def _sleep_on(occupation: Occupation, deadline: Deadline) -> None:
    """One that was not woken up fully, since its weights were mixed, is to be woken up yet."""
    if not occupation.freed and _of(occupation).asleep:
        occupation.find_freed(deadline)


def _of(occupation: Occupation) -> VLLMServed:
    engine = occupation.engine
    assert isinstance(engine, VLLMServed)
    return engine


def _transport(given: Transport, colocated: bool) -> Transport:
    wanted: Transport = "ipc" if colocated else "broadcast"
    if given not in ("auto", wanted):
        raise ConfigurationError(
            f"transport={given!r} does not go with colocated={colocated}, which takes {wanted!r}",
            remedy="leave transport='auto'",
        )
    return wanted


def _refuse_stale(mode: PauseMode) -> None:
    if mode == "in_place":
        raise ConfigurationError(
            "pause_generation_mode='in_place' would leave requests on a KV cache of older weights",
            remedy="use 'retract', which freezes requests and computes them anew, or 'abort'",
        )
