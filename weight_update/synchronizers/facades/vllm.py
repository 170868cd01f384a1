"""vLLM servers as a synchronizer's generation side."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Unpack, get_args

from weight_update.delivery.ranks import Ranks
from weight_update.delivery.vllm import VLLMDeployment
from weight_update.engines.vllm.client import SleepLevel, VLLMClient
from weight_update.engines.vllm.engine import VLLMControls
from weight_update.engines.vllm.facts import instance_of, keeps_memory
from weight_update.errors import ConfigurationError, EngineUnreachable
from weight_update.options import (
    PauseMode,
    Transport,
    UpdateOptions,
    check_choice,
    parse_server_urls,
)
from weight_update.report import EngineOutcome, EngineState
from weight_update.synchronizers.facades.served import (
    PARTS,
    Occupation,
    Part,
    ServedGeneration,
    ServerOptions,
    options_of,
)
from weight_update.waiting import Deadline

_log = logging.getLogger("weight_update")


class VLLMGeneration(ServedGeneration["VLLMServed"]):
    """vLLM servers that generate with a policy's weights.

    They are started with ``VLLM_SERVER_DEV_MODE=1`` and a weight transfer backend, or with the
    library's worker extension where they open the trainer's memory; see ``docs/vllm.md``.

    Args:
        urls: URL of a server, or a sequence of several.
        pause_generation_mode: What becomes of requests in flight during an update: ``"retract"``
            freezes them, and they are computed anew when they go on; ``"abort"`` ends them early.
        needs_offload: Whether the servers sleep in :meth:`finish_generation` and wake up in
            :meth:`prepare_for_generation`. It takes ``--enable-sleep-mode``, which vLLM has
            on GPUs only; without it a server keeps its memory, which is warned of, and all the
            same generates nothing until it is fully awake.
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
        check_choice("pause_generation_mode", pause_generation_mode, PauseMode)
        _refuse_stale(pause_generation_mode)
        self.sleep_level = sleep_level
        self._clients: dict[str, VLLMClient] = {}
        super().__init__(
            parse_server_urls(urls),
            options_of(options, pause_mode=pause_generation_mode, reads_variables=False),
            lambda url: VLLMServed(self._open_client(url), sleep_level, self._outcome),
            needs_offload=needs_offload,
        )

    def get_inference_world_size(self) -> int:
        """How many workers all servers have together.

        Raises:
            EngineUnreachable: A server does not say.
        """
        return sum(self._on_all(lambda o, d: o.engine.ranks(d)))

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

    def _transport(self, *, colocated: bool) -> Transport:
        given = self.options.transport
        wanted: Transport = "ipc" if colocated else "broadcast"
        if given not in ("auto", wanted):
            raise ConfigurationError(
                f"transport={given!r} does not go with colocated={colocated}, which takes "
                f"{wanted!r}",
                remedy="leave transport='auto'",
            )
        return wanted

    def _deployment(self, options: UpdateOptions, ranks: Ranks) -> VLLMDeployment:
        return VLLMDeployment(options, ranks, self._open_client)

    def _outcome(self, url: str) -> EngineOutcome | None:
        return None if self._delivery is None else self._delivery.engines.get(url)

    def _open_client(self, url: str) -> VLLMClient:
        # One for updates and memory: it knows whether it put the server to sleep.
        if url not in self._clients:
            self._clients[url] = self._make_client(url)
        return self._clients[url]

    def _make_client(self, url: str) -> VLLMClient:
        return VLLMClient(url, self.options.http)


class VLLMServed:
    """One server, as the facade speaks to it outside of updates.

    Args:
        client: Speaks to it.
        level: How deep it sleeps.
        outcome: Tells by URL what updates left on it; None before there was one.
    """

    def __init__(
        self,
        client: VLLMClient,
        level: SleepLevel,
        outcome: Callable[[str], EngineOutcome | None],
    ) -> None:
        self.url = client.url
        self._client, self._level, self._outcome = client, level, outcome
        self._controls = VLLMControls(client)
        self._start: str | None = None
        self._keeps_memory = False
        self._found_paused = False

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
        info = self._client.server_info(deadline)
        start, self._keeps_memory = instance_of(info), keeps_memory(info)
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
        if self._keeps_memory:
            _log.warning(
                "%s sleeps and keeps its memory: start it with --enable-sleep-mode, which vLLM "
                "has on GPUs only, or leave needs_offload=False",
                self.url,
            )
        if not self._client.asleep:  # asleep, it is paused by this facade
            self._found_paused = self._client.paused(deadline) is True
        self._client.sleep(self._level, deadline, mode="wait")

    def resume(self, part: Part, deadline: Deadline) -> None:
        """Takes a part back. The last one would make it generate, which mixed weights must not."""
        if part == PARTS[-1] and self._held():
            _log.warning("%s is held, and sleeps on: the next sync heals it", self.url)
            return
        self._client.wake_up(deadline, tags=[part])

    def _held(self) -> bool:
        """Whether an update, maybe another trainer's, left it paused with mixed weights."""
        outcome = self._outcome(self.url)
        if outcome is None or outcome.state is EngineState.OLD:
            return self._found_paused
        return outcome.paused and outcome.state is not EngineState.NEW

    def flush(self, deadline: Deadline) -> None:
        """Drops the prefix cache; requests that run are computed anew."""
        self._controls.flush(deadline)

    def close(self) -> None:
        """Closes connections."""
        self._client.close()


def _sleep_on(occupation: Occupation[VLLMServed], deadline: Deadline) -> None:
    """One that was not woken up fully, since its weights were mixed, is to be woken up yet."""
    if not occupation.freed and occupation.engine.asleep:
        occupation.find_freed(deadline)


def _refuse_stale(mode: PauseMode) -> None:
    if mode == "in_place":
        raise ConfigurationError(
            "pause_generation_mode='in_place' would leave requests on a KV cache of older weights",
            remedy="use 'retract', which freezes requests and computes them anew, or 'abort'",
        )
