"""SGLang as an engine: what it can do, what it says of itself, and what it is told."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import replace
from typing import Any

from weight_update.engines.calls import Calls
from weight_update.engines.intake import intake_of
from weight_update.engines.model_folder import folder_of, read_config, read_scaled, read_shapes
from weight_update.engines.sglang.capabilities import (
    PROBED_ROUTES,
    WHICH_URL,
    SGLangCapabilities,
    SGLangLayout,
    read_capabilities,
    read_layout,
    running_requests,
)
from weight_update.engines.sglang.client import SGLangClient, flushed
from weight_update.engines.sglang.disk import SGLangDiskSession
from weight_update.engines.sglang.facts import (
    SGLangModel,
    digests_of,
    first_row_of,
    instance_of,
    label_of,
    model_of,
)
from weight_update.engines.sglang.names import (
    RuntimeNames,
    check_names,
    runtime_names,
    sign_of_quantisation,
    without_scales,
)
from weight_update.engines.sglang.session import SGLangSession
from weight_update.errors import ConfigurationError, EngineRejected, Phase, UpdateTimeout
from weight_update.facts import Digests, Intake, NameCheck, Sighting
from weight_update.options import HttpOptions, PauseMode, Way
from weight_update.waiting import Deadline, hand_over, retry_pauses, spawn

_POLL_SECONDS = 0.02
_FROZEN_POLLS = 10


class SGLangEngine:
    """One SGLang server, release 0.5.6 or later.

    What it can do is asked once, by :meth:`inspect`, and never after a pause.

    Args:
        url: Base URL.
        options: Keys, TLS and proxies.
        calls: Calls the routes, where that is not by HTTP: those of a Ray actor, say.
        first_rank: The trainer's rank that shares a GPU with this server's first rank; the
            others follow in order.
    """

    flush_skipped = "Skipping the SGLang radix-cache flush"
    # Every SGLang loader skips rotary tables: it computes them itself.
    harmless_name = "model.layers.0.self_attn.rotary_emb.inv_freq"

    def __init__(
        self,
        url: str,
        options: HttpOptions,
        calls: Calls | None = None,
        *,
        first_rank: Callable[[], int] = lambda: 0,
    ) -> None:
        self.url = url
        self._client = SGLangClient(url, options, calls)
        self._first_rank = first_rank
        self._capabilities: SGLangCapabilities | None = None
        self._layout = SGLangLayout(ranks=None, disaggregated=False)
        self._model = SGLangModel()
        self._intake = Intake()
        self._folder: Any = None
        self._runtime: RuntimeNames | None = None
        self._stands_still = False
        self._saves_memory, self._backs_weights_up = True, False

    def inspect(self, deadline: Deadline) -> None:
        """Learns release, routes and layout; the only place where capabilities are decided.

        Raises:
            ConfigurationError: The release cannot take online updates.
            EngineRejected: The server wants another key.
        """
        asked, probed = spawn(self._client.model_info, deadline, "connect"), self._probe(deadline)
        info = self._client.server_info(deadline)
        model = asked.result()
        self._refuse_strangers(info, model)
        routes = {route: there for half in probed for route, there in half.result().items()}
        release = info.get("version")
        self._layout = read_layout(info)
        self._saves_memory = info.get("enable_memory_saver") is not False
        self._backs_weights_up = info.get("enable_weights_cpu_backup") is True
        self._capabilities = read_capabilities(
            release if isinstance(release, str) else "", routes, url=self.url
        )
        self._model, self._runtime = model_of(info, model), None
        self._intake = replace(self._intake_of(info, model), offline=self._layout.offline)

    @property
    def capabilities(self) -> SGLangCapabilities:
        """What :meth:`inspect` found."""
        if self._capabilities is None:
            raise ConfigurationError("the engine was not inspected yet", engine=self.url)
        return self._capabilities

    @property
    def ranks(self) -> int | None:
        """Ranks that join the group, or None when the server does not say."""
        return self._layout.ranks

    @property
    def layout(self) -> str | None:
        """Equal for servers that hold equal weights in equal parts; None when it is unknown."""
        return self._model.layout

    @property
    def intake(self) -> Intake:
        """How the server takes weights, as :meth:`inspect` found it."""
        return self._intake

    def workers(self, deadline: Deadline) -> tuple[str, ...]:
        """URLs of the servers behind this one, if it is a router; none for a server.

        Raises:
            ConfigurationError: A router that does not list workers that are all healthy.
        """
        return self._client.workers(deadline)

    def observe(self, deadline: Deadline, *, readiness: bool = True) -> Sighting:
        """Label, readiness and instance as the server shows them now; all asked for at once.

        Args:
            deadline: Bound of the calls.
            readiness: Whether to ask for it.

        Raises:
            UpdateTimeout: The scheduler does not answer; it may be stuck in a group.
        """
        tells = self._capabilities is None or self._capabilities.tells_readiness
        info = hand_over(self._client.server_info, deadline, "plan")
        ready = hand_over(self._client.ready, deadline) if tells and readiness else None
        label = self.label(deadline)
        told = None if ready is None else ready.result()
        return Sighting(label, told, instance_of(info.result()))

    def label(self, deadline: Deadline) -> str | None:
        """The version label that the server shows now; None when it shows none."""
        return label_of(self._client.model_info(deadline))

    def check_names(self, names: Sequence[str], deadline: Deadline) -> NameCheck:
        """Compares names with those that the server can load, where its loader is known.

        The names that a server shows for its weights never change, so they are asked for once.

        Raises:
            ConfigurationError: They are those of quantised weights, which it had not told.
        """
        if self._runtime is None and self._model.names_known:
            digests = self._digests(deadline, "plan")
            self._runtime = None if digests is None else runtime_names(digests)
        if self._runtime is None:
            return NameCheck()
        sign = sign_of_quantisation(self._runtime.names)
        if sign and not sign_of_quantisation(names):
            raise self._quantised(sign)
        runtime = self._runtime
        if self._intake.block is not None:
            names = without_scales(names)
            runtime = RuntimeNames(frozenset(without_scales(runtime.names)), runtime.tied)
        return check_names(names, runtime, self._model.architectures)

    def digests(self, deadline: Deadline) -> Digests | None:
        """Digests of all weights by rank; None where the release or its device has none."""
        return self._digests(deadline, "verify")

    def first_values(self, name: str, deadline: Deadline) -> tuple[float, ...] | None:
        """The start of a weight's first row, or None when the server cannot be trusted with it."""
        if not self._model.plain or self._intake.quantization is not None:
            return None
        return first_row_of(self._client.first_row(name, deadline), self._layout.replicas)

    def objection(self, mode: PauseMode) -> str | None:
        """Why this server cannot be updated under a pause mode; None when it can."""
        return self._layout.objection(mode)

    def join(
        self,
        *,
        address: str,
        port: int,
        rank_offset: int,
        world_size: int,
        group_name: str,
        backend: str,
        deadline: Deadline,
    ) -> None:
        """Has the server's ranks join a group; returns when they have."""
        bracketed = ":" in address and self.capabilities.brackets_ipv6
        body = {
            "master_address": f"[{address}]" if bracketed else address,
            "master_port": port,
            "rank_offset": rank_offset,
            "world_size": world_size,
            "group_name": group_name,
            "backend": backend,
        }
        try:
            self._client.init_group(body, deadline)
        except EngineRejected as error:
            error.remedy = error.remedy or f"the trainer joins by backend {backend!r}"
            raise

    def leave(self, group_name: str, deadline: Deadline) -> None:
        """Has the server drop a group; one that it does not know is no error."""
        self._client.destroy_group(group_name, deadline)

    def pause(self, mode: PauseMode, deadline: Deadline, *, again: bool) -> None:
        """Pauses generation; requests in flight are aborted, retracted or frozen.

        Args:
            mode: What becomes of requests in flight.
            deadline: Bound of the call.
            again: It may be paused already. Frozen requests never end when they are aborted,
                and the server would wait for them for ever: they are retracted first.
        """
        self._stands_still = again and mode == "abort"
        if self._stands_still:
            self._client.pause("retract", deadline)
        self._client.pause(mode, deadline)

    def drain(self, mode: PauseMode, deadline: Deadline) -> None:
        """Waits until no request runs, where waiting tells anything.

        Frozen requests never end, so ``in_place`` waits for nothing. Under ``retract``, a
        release with sessions shows a snapshot that stands still, and command order does the
        rest; older ones are waited for as long as their count moves. So is one that was retracted
        before it was told to abort.

        Raises:
            UpdateTimeout: Requests still run at the deadline.
        """
        route = self.capabilities.loads_route
        if mode == "in_place" or route is None:
            return
        if mode == "abort":
            patience = _FROZEN_POLLS if self._stands_still else None
            self._wait_until_idle(route, patience, deadline)
        elif self.capabilities.live_loads:
            self._wait_until_idle(route, _FROZEN_POLLS, deadline)

    def resume(self, deadline: Deadline) -> None:
        """Continues generation; harmless when it was not paused."""
        self._client.resume(deadline)

    @property
    def ends_without_group(self) -> bool:
        """Releases without sessions assert the group where nothing catches it (up to 0.5.20)."""
        return not self.capabilities.sessions

    @property
    def salts_prefixes(self) -> bool:
        """Whether a request may bring a cache key that no older prefix matches."""
        return self.capabilities.salts_prefixes

    def can_flush(self, mode: PauseMode) -> bool:
        """Whether the prefix cache can be flushed while paused by ``mode``."""
        return mode == "abort" or (mode == "retract" and self.capabilities.flush_under_retract)

    def flushes_with_update(self, mode: PauseMode) -> bool:
        """Whether the last update request may carry the flush.

        Releases before 0.5.22 end the whole server over a flush that is refused inside an update.
        A rank that fails by itself would keep its prefixes while the others drop theirs, and ranks
        that hold other prefixes break each other's batches: several ranks flush by a call.
        """
        if self.ranks != 1:
            return False
        told = self.capabilities.tells_refused_flush
        return told if mode == "retract" else mode == "abort" and self.capabilities.sessions

    def flush(self, deadline: Deadline) -> None:
        """Flushes the prefix cache; a busy engine is asked again with growing pauses.

        Raises:
            UpdateTimeout: Still refused at the deadline; the text has the last answer.
        """
        for pause in retry_pauses():
            response = self._client.flush(deadline)
            if flushed(response):
                return
            if response.status_code in (401, 403, 404):
                raise self._client.rejection(response, "flush")
            if not deadline.outlasts(pause):
                raise UpdateTimeout(
                    f"/flush_cache was refused until the deadline: {self._client.words(response)}",
                    engine=self.url,
                    phase="flush",
                )

    def flush_once(self, deadline: Deadline) -> bool:
        """Asks for one flush; whether it was done."""
        return flushed(self._client.flush(deadline))

    @property
    def saves_memory(self) -> bool:
        """Whether memory that is released is freed, as far as the server says."""
        return self._saves_memory

    @property
    def forgets_weights(self) -> bool:
        """Whether weights that were released are arbitrary when they are taken back."""
        return self._saves_memory and not self._backs_weights_up

    def release_memory(self, tags: Sequence[str], deadline: Deadline) -> None:
        """Frees ``weights``, ``kv_cache`` or ``cuda_graph``; ends the server unless it is idle."""
        self._client.release_memory(tags, deadline)

    def resume_memory(self, tags: Sequence[str], deadline: Deadline) -> None:
        """Takes back what was freed; ends the server where it was not."""
        self._client.resume_memory(tags, deadline)

    def stamp(self, label: str, deadline: Deadline) -> None:
        """Writes the version label, without aborting requests."""
        self._client.stamp(label, deadline)

    def session(self, way: Way) -> SGLangSession | SGLangDiskSession:
        """A session for one update, whose bytes come by a way."""
        if way == "disk":
            return SGLangDiskSession(self._client, self._folder)
        return SGLangSession(
            self._client,
            needed=self.capabilities.sessions,
            drafts=self._intake.drafts,
            ranks=self._layout.ranks or 1,
            first_rank=self._first_rank(),
        )

    def close(self) -> None:
        """Closes the connections."""
        self._client.close()

    def _probe(self, deadline: Deadline) -> list[Future[dict[str, bool | None]]]:
        """Starts to look for routes, in two halves side by side: more would need connections."""

        def look(routes: Sequence[str]) -> dict[str, bool | None]:
            return {route: self._client.has(route, deadline) for route in routes}

        return [spawn(look, PROBED_ROUTES[start::2]) for start in (0, 1)]

    def _refuse_strangers(self, info: dict[str, Any], model: dict[str, Any]) -> None:
        if not info and not model:
            raise ConfigurationError(
                "no SGLang server answers here: /server_info and /model_info are missing",
                engine=self.url,
                phase="connect",
                remedy=WHICH_URL,
            )

    def _quantised(self, sign: str) -> ConfigurationError:
        return ConfigurationError(
            f"its weights are quantised (it has {sign!r}), and its model's config.json, which "
            "would say how, cannot be read here",
            engine=self.url,
            phase="plan",
            remedy="push weights that are quantised as its checkpoint is, with their scales, or "
            "make the model's folder readable under the same path",
        )

    def _intake_of(self, info: dict[str, Any], model: dict[str, Any]) -> Intake:
        folder = self._folder = folder_of(info, model)
        again = self.capabilities.sessions
        config = read_config(folder)
        intake = intake_of(info, model, config, requantises=again)
        if folder and not config and intake.quantization is None:
            return replace(intake, unread=True)
        if intake.quantization is None and info.get("load_format") != "dummy":
            return replace(intake, shapes=read_shapes(folder))
        return replace(intake, scaled=read_scaled(folder)) if intake.block else intake

    def _digests(self, deadline: Deadline, phase: Phase) -> Digests | None:
        return digests_of(self._client.checksums(deadline, phase))

    def _wait_until_idle(self, route: str, patience: int | None, deadline: Deadline) -> None:
        seen, repeats = 0, 0
        while running := self._running(route, seen, deadline):
            repeats = repeats + 1 if running == seen else 0
            seen = running
            if patience is not None and repeats >= patience:
                return
            if deadline.remaining() <= _POLL_SECONDS:
                raise self._never_idle(running)
            deadline.sleep(_POLL_SECONDS)

    def _running(self, route: str, seen: int, deadline: Deadline) -> int | None:
        try:
            return running_requests(self._client.loads(route, deadline))
        except UpdateTimeout as error:
            raise (self._never_idle(seen) if seen else error) from None

    def _never_idle(self, running: int) -> UpdateTimeout:
        return UpdateTimeout(f"{running} request(s) still run", engine=self.url, phase="drain")
