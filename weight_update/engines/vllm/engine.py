"""vLLM, taking one LoRA adapter from a folder; its weights are not updated here."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from weight_update.engines.lora import (
    MERGE,
    AdapterFolders,
    AdapterParcel,
    AdapterSession,
    HeldAdapter,
)
from weight_update.engines.vllm.client import LOAD_ROUTE, PAUSE_ROUTE, VLLMClient
from weight_update.errors import ConfigurationError, EngineRejected
from weight_update.facts import Digests, Intake, NameCheck, Sighting
from weight_update.options import HttpOptions, PauseMode, Way
from weight_update.waiting import Deadline

_MODES = {"abort": "abort", "retract": "keep", "in_place": "keep"}


class VLLMAdapterEngine:
    """One vLLM server whose adapter is replaced; shown on 0.32.0.

    Requests keep the adapter that they began with, so none need end: under ``retract`` and
    ``in_place`` they are frozen and go on. So do those that came while it was paused.

    Args:
        url: Base URL.
        options: Keys, TLS and proxies.
        folders: Brings the adapter of the update that runs, in a folder that the server sees.
    """

    harmless_name = ""
    flush_skipped = "Skipping the vLLM prefix-cache reset"
    salts_prefixes = False
    layout: str | None = None

    def __init__(self, url: str, options: HttpOptions, folders: AdapterFolders) -> None:
        self.url = url
        self.ranks: int | None = None
        self.intake = Intake(any_shape=True)
        self._client = VLLMClient(url, options)
        self._folders = folders
        self._held = HeldAdapter()
        self._lacks = ""

    def inspect(self, deadline: Deadline) -> None:
        """Learns release and routes.

        Raises:
            ConfigurationError: No vLLM server, or one without control routes.
        """
        if self._client.release(deadline) is None or not self._client.has(PAUSE_ROUTE, deadline):
            raise ConfigurationError(
                "no vLLM server with control routes answers here",
                engine=self.url,
                phase="connect",
                remedy="start vLLM with VLLM_SERVER_DEV_MODE=1",
            )
        self.ranks = self._client.ranks(deadline)
        self._held = HeldAdapter()
        self._lacks = "" if self._client.has(LOAD_ROUTE, deadline) else LOAD_ROUTE

    def objection(self, mode: PauseMode) -> str | None:
        """Why this server cannot take an adapter; None when it can."""
        if self._lacks:
            return (
                f"it has no {self._lacks}; start it with --enable-lora and "
                f"VLLM_ALLOW_RUNTIME_LORA_UPDATING=True, or {MERGE}"
            )
        return None

    def workers(self, deadline: Deadline) -> tuple[str, ...]:
        """None: this is no router."""
        return ()

    def observe(self, deadline: Deadline, *, readiness: bool = True) -> Sighting:
        """Label and readiness as the server shows them now."""
        paused = self._client.paused(deadline) if readiness else None
        return Sighting(self.label(deadline), None if paused is None else not paused)

    def label(self, deadline: Deadline) -> str | None:
        """The version label that the server shows now."""
        return self._client.label(deadline)

    def check_names(self, names: Sequence[str], deadline: Deadline) -> NameCheck:
        """The server checks an adapter as a whole, when it loads it."""
        return NameCheck()

    def digests(self, deadline: Deadline) -> Digests | None:
        """Adapters cannot be proved."""
        return None

    def first_values(self, name: str, deadline: Deadline) -> tuple[float, ...] | None:
        """Adapters cannot be read back."""
        return None

    def join(self, **_: Any) -> None:
        """Nothing: the adapter travels in a folder."""

    def leave(self, group_name: str, deadline: Deadline) -> None:
        """Nothing: there is no group."""

    def pause(self, mode: PauseMode, deadline: Deadline, *, again: bool) -> None:
        """Pauses generation; requests in flight are aborted, or kept frozen."""
        # The cache stays: a new folder's prefixes are its own, and those of the base are valid.
        self._client.pause(_MODES[mode], deadline, clear_cache=False)

    def drain(self, mode: PauseMode, deadline: Deadline) -> None:
        """Nothing: the pause answers when requests are aborted or frozen."""

    def resume(self, deadline: Deadline) -> None:
        """Continues generation."""
        self._client.resume(deadline)

    def can_flush(self, mode: PauseMode) -> bool:
        """Prefixes are kept apart by folder, so that none of the one before can be served."""
        return True

    def flushes_with_update(self, mode: PauseMode) -> bool:
        """A new adapter begins without prefixes."""
        return True

    def flush(self, deadline: Deadline) -> None:
        """Empties the prefix cache.

        Raises:
            EngineRejected: Requests use it.
        """
        if not self.flush_once(deadline):
            raise EngineRejected("the cache was not emptied", engine=self.url, phase="flush")

    def flush_once(self, deadline: Deadline) -> bool:
        """Asks for one flush; whether it was done."""
        return self._client.reset_prefix_cache(deadline)

    def stamp(self, label: str, deadline: Deadline) -> None:
        """Writes the version label."""
        self._client.stamp(label, deadline)

    def session(self, way: Way) -> AdapterSession:
        """A session for one update."""
        return AdapterSession(_Desk(self._client, self._folders), self._folders, self._held)

    def close(self) -> None:
        """Closes the connections."""
        self._client.close()


@dataclass(frozen=True)
class _Desk:
    """Where the adapters of one server are loaded and unloaded."""

    client: VLLMClient
    folders: AdapterFolders

    def load(self, name: str, parcel: AdapterParcel, deadline: Deadline) -> None:
        self.client.load_adapter(name, str(self.folders.place), deadline)

    def unload(self, name: str, deadline: Deadline) -> None:
        self.client.unload_adapter(name, deadline)
