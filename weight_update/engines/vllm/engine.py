"""vLLM as an engine: what all pushes share, and updates of whole models."""

from __future__ import annotations

import base64
import json
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from weight_update.engines.vllm.capabilities import (
    DEVELOPMENT_MODE,
    NO_CONTROL,
    PROBED_ROUTES,
    VLLMCapabilities,
    read_capabilities,
)
from weight_update.engines.vllm.client import PAUSE_ROUTE, VLLMClient
from weight_update.engines.vllm.facts import VLLMFacts, instance_of, read_facts
from weight_update.engines.vllm.session import Bracket, VLLMSession
from weight_update.engines.vllm.shared import EXTENSION, OpenChannel, VLLMSharedSession, workers_of
from weight_update.errors import ConfigurationError, EngineRejected, UpdateTimeout
from weight_update.facts import Digests, Intake, NameCheck, Sighting
from weight_update.options import HttpOptions, PauseMode, Way
from weight_update.waiting import Deadline, retry_pauses, spawn

UniqueId = Callable[[str, Deadline], bytes]
"""The id of an NCCL group, by the group's name, as soon as the trainer has made it."""

PAUSE_MODES = {"abort": "abort", "retract": "keep", "in_place": "keep"}
# What is left of a deadline tells a server whose workers are busy from one that is gone.
_LABEL_SHARE = 0.6
_INFO_SHARE = 0.7
_BACKENDS = {"nccl": "nccl", "gloo": "weight_update_gloo"}


class VLLMControls:
    """What is the same whatever a vLLM server is brought: its pauses, its label, its caches.

    Args:
        client: Speaks to the server.
    """

    harmless_name = ""
    flush_skipped = "Skipping the vLLM prefix-cache reset"
    salts_prefixes = False
    ends_without_group = False
    layout: str | None = None

    def __init__(self, client: VLLMClient) -> None:
        self.url = client.url
        self.ranks: int | None = None
        self._client = client

    def inspect(self, deadline: Deadline) -> None:
        """Learns how many workers there are.

        Raises:
            ConfigurationError: No vLLM server, or one without control routes.
        """
        self._meet(deadline)

    def _meet(self, deadline: Deadline) -> str:
        """The release."""
        release = self._client.release(deadline)
        if release is None:
            raise self._unfit(self._client.stranger, self._client.address)
        if not self._client.has(PAUSE_ROUTE, deadline):
            raise self._unfit(f"vLLM {release} {NO_CONTROL}", DEVELOPMENT_MODE)
        self.ranks = self._client.ranks(deadline)
        return release

    def _unfit(self, text: str, remedy: str) -> ConfigurationError:
        return ConfigurationError(text, engine=self.url, phase="connect", remedy=remedy)

    def _info(self, deadline: Deadline) -> dict[str, Any]:
        """Its configuration; a server takes seconds for it the first time, and may do without."""
        try:
            return self._client.server_info(deadline.share(_INFO_SHARE))
        except UpdateTimeout:
            return {}

    def workers(self, deadline: Deadline) -> tuple[str, ...]:
        """None: this is no router."""
        return ()

    def observe(self, deadline: Deadline, *, readiness: bool = True) -> Sighting:
        """Label, readiness and instance as the server shows them now; all asked for at once."""
        info = spawn(self._info, deadline)
        paused = spawn(self._client.paused, deadline) if readiness else None
        label = self.label(deadline)
        told = None if paused is None else paused.result()
        return Sighting(label, None if told is None else not told, instance_of(info.result()))

    def label(self, deadline: Deadline) -> str | None:
        """The version label that the server shows now.

        Raises:
            EngineRejected: An update request blocks its workers; the server is there.
        """
        try:
            return self._client.label(deadline.share(_LABEL_SHARE))
        except UpdateTimeout as error:
            if not self._client.healthy(deadline):
                raise
            raise EngineRejected(
                "an update request, of this trainer or another one, blocks its workers",
                engine=self.url,
                phase="plan",
                remedy="wait until its trainer is gone, or restart the server",
            ) from error

    def digests(self, deadline: Deadline) -> Digests | None:
        """None: digests of a server's own are blind for what it lays out anew."""
        return None

    def first_values(self, name: str, deadline: Deadline) -> tuple[float, ...] | None:
        """None: no weight can be read back."""
        return None

    def drain(self, mode: PauseMode, deadline: Deadline) -> None:
        """Nothing: the pause answers when requests are aborted or frozen."""

    def resume(self, deadline: Deadline) -> None:
        """Continues generation; a server that was put to sleep goes on once it is fully awake.

        Asked itself, every server that is paused says that it sleeps.
        """
        if not self._client.asleep:  # resumed, it would use memory that is not there
            self._client.resume(deadline)

    def flush(self, deadline: Deadline) -> None:
        """Empties the prefix cache; requests that are frozen are computed anew when they go on.

        Raises:
            UpdateTimeout: The cache was still not emptied at the deadline.
        """
        for pause in retry_pauses():
            if self._client.reset_prefix_cache(deadline, running=True):
                return
            if not deadline.outlasts(pause):
                text = "the prefix cache was not emptied: its blocks are held"
                raise UpdateTimeout(text, engine=self.url, phase="flush")

    def flush_once(self, deadline: Deadline) -> bool:
        """Asks for one flush; whether it was done. Requests that run keep it from being done."""
        return self._client.reset_prefix_cache(deadline)

    def stamp(self, label: str, deadline: Deadline) -> None:
        """Writes the version label."""
        self._client.stamp(label, deadline)

    def close(self) -> None:
        """Closes the connections."""
        self._client.close()


class VLLMEngine(VLLMControls):
    """One vLLM server that takes whole models through its own weight transfer.

    Requests in flight end early under ``abort``. Under ``retract`` they are frozen and computed
    anew when they go on, under ``in_place`` they go on from the KV cache of the old weights.

    Args:
        url: Base URL.
        options: Keys, TLS and proxies.
        packed: Whether the weights of a request come in one broadcast, or in one each.
        unique_id: Where the id of an NCCL group comes from.
        open_channel: How workers are told of memory that they open.
        by_memory: Whether that is the way that was asked for.
        client: Speaks to the server; None makes vLLM's own.
    """

    # Loaders of vLLM skip rotary tables: they compute them themselves.
    harmless_name = "model.layers.0.self_attn.rotary_emb.inv_freq"

    def __init__(
        self,
        url: str,
        options: HttpOptions,
        *,
        packed: bool = True,
        unique_id: UniqueId | None = None,
        open_channel: OpenChannel | None = None,
        by_memory: bool = False,
        client: VLLMClient | None = None,
    ) -> None:
        super().__init__(client or VLLMClient(url, options))
        self._packed, self._unique_id = packed, unique_id
        self._open_channel, self._by_memory = open_channel, by_memory
        self._capabilities: VLLMCapabilities | None = None
        self._facts = VLLMFacts()
        self._bracket = Bracket(self._client)
        self._instance: str | None = None
        self._group_name = ""
        # Workers have one group: who leaves late must not drop the next one.
        self._membership = threading.Lock()
        self._seen: str | None = None  # the label that was seen last
        self._ours: str | None = None  # the label when the group was surely ours

    def inspect(self, deadline: Deadline) -> None:
        """Learns release, routes and configuration; the only place where they are asked for.

        Raises:
            ConfigurationError: No vLLM server, or one that cannot take full updates.
        """
        info = spawn(self._info, deadline)
        release = self._meet(deadline)
        routes = {route: self._client.has(route, deadline) for route in PROBED_ROUTES}
        self._capabilities = read_capabilities(release, routes, url=self.url)
        told = info.result()
        self._facts = read_facts(told, self._client.models(deadline))
        extended = bool(self._facts.extension) and self._capabilities.calls_workers
        still_open = self._bracket.open and instance_of(told) == self._instance
        self._bracket = Bracket(self._client, extended=extended)
        self._bracket.open = self._bracket.suspect = still_open
        self._instance, self._group_name = instance_of(told), ""
        if self._by_memory:  # whether it can is found out before any pause
            workers_of(self._client, self.ranks, deadline, "connect")

    def observe(self, deadline: Deadline, *, readiness: bool = True) -> Sighting:
        """Label, readiness and instance; a server has one group, that of who came last."""
        seen = super().observe(deadline, readiness=readiness)
        self._seen = seen.label
        return replace(seen, ungrouped=self._is_anothers(seen.label))

    def _is_anothers(self, label: str | None) -> bool:
        """Whether a label shows that another trainer took the group's place."""
        return bool(self._group_name) and self._ours not in (None, label)

    @property
    def capabilities(self) -> VLLMCapabilities:
        """What :meth:`inspect` found."""
        if self._capabilities is None:
            raise ConfigurationError("the engine was not inspected yet", engine=self.url)
        return self._capabilities

    @property
    def intake(self) -> Intake:
        """How the server takes weights, as :meth:`inspect` found it."""
        return self._facts.intake

    def objection(self, mode: PauseMode) -> str | None:
        """Why this server cannot be updated; None when it can, whatever the pause mode."""
        return self.capabilities.objection(lora=self._facts.lora)

    def check_names(self, names: Sequence[str], deadline: Deadline) -> NameCheck:
        """Compares names with those in the folder of the server's model, where it can be read."""
        return self._facts.check_names(names)

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
        """Has the server's workers join a group; returns when they have.

        Raises:
            ConfigurationError: The server, or its release, has no such group.
        """
        self._check_backend(backend)
        ranks = {"rank_offset": rank_offset, "world_size": world_size}
        if backend == "nccl":
            place = self._nccl_place(address, port, group_name, deadline)
        else:
            place = {"master_address": address, "master_port": port, "group_name": group_name}
            place["packed"] = self._packed
        with self._membership:
            self._drop_group(deadline)
            self._group_name, self._ours = group_name, self._seen
        self._client.init_transfer({**ranks, **place}, deadline)

    def leave(self, group_name: str, deadline: Deadline) -> None:
        """Has the workers drop a group, if it is theirs; older releases drop it for the next."""
        with self._membership:
            if group_name != self._group_name or not self.capabilities.leaves:
                return
            if not self._is_anothers(self.label(deadline)):
                self._client.leave_transfer(deadline)

    def pause(self, mode: PauseMode, deadline: Deadline, *, again: bool) -> None:
        """Pauses generation.

        Args:
            mode: What becomes of requests in flight.
            deadline: Bound of the call.
            again: It may be paused already; then somebody's update may have failed there.
        """
        self._bracket.suspect = self._bracket.suspect or again
        self._client.pause(PAUSE_MODES[mode], deadline, clear_cache=mode == "retract")

    def resume(self, deadline: Deadline) -> None:
        """Continues generation.

        Raises:
            EngineRejected: Its layers wait for weights; generating would end it.
        """
        if self._bracket.open:
            raise EngineRejected(
                "it is not resumed, since its layers wait for weights",
                engine=self.url,
                phase="continue",
                remedy="push a whole model; if that fails too, restart the server",
            )
        super().resume(deadline)

    def can_flush(self, mode: PauseMode) -> bool:
        """Whether prefixes and requests in flight may be computed anew under a pause mode."""
        return mode != "in_place"

    def flushes_with_update(self, mode: PauseMode) -> bool:
        """No: the cache is emptied by a call."""
        return False

    def flush(self, deadline: Deadline) -> None:
        """Empties the prefix cache, and that of a vision tower.

        Raises:
            UpdateTimeout: The cache was still not emptied at the deadline.
        """
        super().flush(deadline)
        if self.capabilities.encoder_cache:
            self._client.reset_encoder_cache(deadline)

    def stamp(self, label: str, deadline: Deadline) -> None:
        """Writes the version label, where the release has one."""
        if self.capabilities.labels:
            super().stamp(label, deadline)
            self._seen = self._ours = label

    def session(self, way: Way) -> VLLMSession | VLLMSharedSession:
        """A session for one update, whose bytes come by a way."""
        if way == "ipc" and self._open_channel is not None:
            return VLLMSharedSession(self._client, self._bracket, self._open_channel, self.ranks)
        native = self._facts.backend != _BACKENDS["gloo"]
        packing = self.capabilities.update_info(packed=self._packed) if native else {}
        return VLLMSession(self._client, self._bracket, packing)

    def _check_backend(self, backend: str) -> None:
        """A server has one backend, from its start."""
        has = self._facts.backend
        wrong = wrong_backend(backend, has)
        if wrong is not None:
            raise self._unfit(wrong[0], f"{wrong[1]}{_or_go_by(has or '')}")

    def _nccl_place(
        self, address: str, port: int, group_name: str, deadline: Deadline
    ) -> dict[str, Any]:
        """Where the workers find the group's id, which there is once the trainer joins."""
        if self._unique_id is None:
            raise ConfigurationError("no NCCL group has an id here", engine=self.url)
        found = base64.b64encode(self._unique_id(group_name, deadline)).decode()
        rendezvous = {"master_address": address, "master_port": port}
        place = {"nccl_unique_id_b64": found} if self.capabilities.unique_id else rendezvous
        return {**place, **self.capabilities.init_info(packed=self._packed)}

    def _drop_group(self, deadline: Deadline) -> None:
        """Drops the group before, of whatever trainer: its update may have died in it."""
        if not self.capabilities.leaves:
            return
        try:
            self._client.leave_transfer(deadline)
        except EngineRejected:
            return  # an update is open; the new group takes the old one's place all the same


def wrong_backend(backend: str, has: str | None) -> tuple[str, str] | None:
    """Why a server's weight transfer takes nothing of what a trainer sends, and how it would.

    Args:
        backend: What the trainer sends by.
        has: What the server was started with: nothing where it is empty, and None where it does
            not say.

    Example:
        >>> wrong_backend("nccl", "")
        ('the trainer sends by nccl, and the server was started without weight transfer', ...)
    """
    wanted = _BACKENDS[backend]
    if has is None or has == wanted:
        return None
    config = f"--weight-transfer-config '{json.dumps({'backend': wanted})}'"
    extended = f" and --worker-extension-cls {EXTENSION}" if backend == "gloo" else ""
    started = f"with the backend {has!r}" if has else "without weight transfer"
    what = f"the trainer sends by {backend}, and the server was started {started}"
    return what, f"start it with {config}{extended}"


def _or_go_by(backend: str) -> str:
    """The other way out, where the trainer can go by the server's backend."""
    ours = next((ours for ours, theirs in _BACKENDS.items() if theirs == backend), None)
    return f", or pass backend={ours!r}" if ours else ""
