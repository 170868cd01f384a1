"""The vLLM client: one method an endpoint, each a yes or a typed error."""

from __future__ import annotations

from typing import Any

import requests

from weight_update.engines.http import EngineHttp, json_of
from weight_update.errors import Phase
from weight_update.options import HttpOptions
from weight_update.waiting import Deadline

LOAD_ROUTE = "/v1/load_lora_adapter"
PAUSE_ROUTE = "/pause"


class VLLMClient:
    """Calls the control routes of one vLLM server.

    Args:
        url: Base URL.
        options: Keys, TLS and proxies.
    """

    def __init__(self, url: str, options: HttpOptions) -> None:
        self.url = url
        self._http = EngineHttp(url, options)

    def has(self, route: str, deadline: Deadline) -> bool:
        """Whether a route exists, without running it."""
        response = self._http.call("OPTIONS", route, phase="connect", deadline=deadline)
        return response.status_code != 404

    def release(self, deadline: Deadline) -> str | None:
        """The release; None when this is no vLLM server."""
        return _text(self._get("/version", "connect", deadline), "version")

    def ranks(self, deadline: Deadline) -> int | None:
        """Workers of the server."""
        ranks = self._get("/get_world_size?include_dp=true", "connect", deadline).get("world_size")
        return ranks if isinstance(ranks, int) else None

    def label(self, deadline: Deadline) -> str | None:
        """The version label."""
        return _text(self._get("/weight_info", "plan", deadline), "weight_version")

    def paused(self, deadline: Deadline) -> bool | None:
        """Whether it is paused."""
        paused = self._get("/is_paused", "plan", deadline).get("is_paused")
        return paused if isinstance(paused, bool) else None

    def pause(self, mode: str, deadline: Deadline, *, clear_cache: bool) -> None:
        """Pauses generation; requests in flight are aborted or kept."""
        clear = str(clear_cache).lower()
        self._post(f"{PAUSE_ROUTE}?mode={mode}&clear_cache={clear}", "pause", deadline)

    def resume(self, deadline: Deadline) -> None:
        """Continues generation; harmless when it was not paused."""
        self._post("/resume", "continue", deadline)

    def reset_prefix_cache(self, deadline: Deadline) -> bool:
        """Asks for an empty prefix cache; whether it is, whatever the status."""
        answer = json_of(self._post("/reset_prefix_cache", "flush", deadline))
        return isinstance(answer, dict) and answer.get("success") is True

    def stamp(self, label: str, deadline: Deadline) -> None:
        """Writes the version label."""
        self._post("/update_weight_version", "stamp", deadline, {"new_version": label})

    def load_adapter(self, name: str, path: str, deadline: Deadline) -> None:
        """Loads an adapter from a folder, under a name that is free."""
        body = {"lora_name": name, "lora_path": path}
        self._post(LOAD_ROUTE, "transfer", deadline, body)

    def unload_adapter(self, name: str, deadline: Deadline) -> None:
        """Takes a name away; requests that use the adapter end with it. None is no error."""
        body = {"lora_name": name}
        self._post("/v1/unload_lora_adapter", "transfer", deadline, body, absent=404)

    def close(self) -> None:
        """Closes the connections."""
        self._http.close()

    def _get(self, route: str, phase: Phase, deadline: Deadline) -> dict[str, Any]:
        response = self._http.call("GET", route, phase=phase, deadline=deadline, control=False)
        body = json_of(response)
        return body if response.status_code == 200 and isinstance(body, dict) else {}

    def _post(
        self,
        route: str,
        phase: Phase,
        deadline: Deadline,
        body: dict[str, Any] | None = None,
        *,
        absent: int | None = None,
    ) -> requests.Response:
        response = self._http.call("POST", route, phase=phase, deadline=deadline, body=body or {})
        if response.status_code not in (200, absent):
            raise self._http.rejection(response, phase=phase)
        return response


def _text(body: dict[str, Any], key: str) -> str | None:
    value = body.get(key)
    return value if isinstance(value, str) else None
