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
from weight_update.engines.vllm.client import LOAD_ROUTE, VLLMClient
from weight_update.engines.vllm.engine import PAUSE_MODES, VLLMControls
from weight_update.facts import Intake, NameCheck
from weight_update.options import HttpOptions, PauseMode, Way
from weight_update.waiting import Deadline


class VLLMAdapterEngine(VLLMControls):
    """One vLLM server whose adapter is replaced; shown on 0.32.0.

    Requests keep the adapter that they began with, so none need end: under ``retract`` and
    ``in_place`` they are frozen and go on. So do those that came while it was paused.

    Args:
        url: Base URL.
        options: Keys, TLS and proxies.
        folders: Brings the adapter of the update that runs, in a folder that the server sees.
    """

    def __init__(self, url: str, options: HttpOptions, folders: AdapterFolders) -> None:
        super().__init__(VLLMClient(url, options))
        self.intake = Intake(any_shape=True)
        self._folders = folders
        self._held = HeldAdapter()
        self._lacks = ""

    def inspect(self, deadline: Deadline) -> None:
        """Learns whether adapters can be loaded.

        Raises:
            ConfigurationError: No vLLM server, or one without control routes.
            EngineRejected: It wants another key.
        """
        super().inspect(deadline)
        self._client.check_key(deadline)
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

    def check_names(self, names: Sequence[str], deadline: Deadline) -> NameCheck:
        """The server checks an adapter as a whole, when it loads it."""
        return NameCheck()

    def join(self, **_: Any) -> None:
        """Nothing: the adapter travels in a folder."""

    def leave(self, group_name: str, deadline: Deadline) -> None:
        """Nothing: there is no group."""

    def pause(self, mode: PauseMode, deadline: Deadline, *, again: bool) -> None:
        """Pauses generation; requests in flight are aborted, or kept frozen."""
        # The cache stays: a new folder's prefixes are its own, and those of the base are valid.
        self._client.pause(PAUSE_MODES[mode], deadline, clear_cache=False)

    def can_flush(self, mode: PauseMode) -> bool:
        """Prefixes are kept apart by folder, so that none of the one before can be served."""
        return True

    def flushes_with_update(self, mode: PauseMode) -> bool:
        """A new adapter begins without prefixes."""
        return True

    def session(self, way: Way) -> AdapterSession:
        """A session for one update."""
        return AdapterSession(_Desk(self._client, self._folders), self._folders, self._held)


@dataclass(frozen=True)
class _Desk:
    """Where the adapters of one server are loaded and unloaded."""

    client: VLLMClient
    folders: AdapterFolders

    def load(self, name: str, parcel: AdapterParcel, deadline: Deadline) -> None:
        self.client.load_adapter(name, str(self.folders.place), deadline)

    def unload(self, name: str, deadline: Deadline) -> None:
        self.client.unload_adapter(name, deadline)
