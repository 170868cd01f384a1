"""The client of a vLLM that NVIDIA Dynamo serves: the same calls, on a worker's system port.

A Dynamo worker offers vLLM's weight transfer under one of two families of routes, and which one
depends on what runs there: vLLM's native sidecar (``/engine/control/...``, ``/engine/update/...``,
with the bodies of vLLM's own routes), or Dynamo's Python worker (``/engine/...``, which calls
methods of vLLM's workers by name). Both were read from Dynamo's documentation and sources of 2026;
they change from release to release, and no Dynamo has been run: this table is the one place that
says what they are.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal
from urllib.parse import parse_qs, urlsplit

import requests

from weight_update.engines.answers import json_of
from weight_update.engines.calls import Body
from weight_update.engines.vllm.capabilities import release_number
from weight_update.engines.vllm.client import (
    FINISH_ROUTE,
    FLUSH_ROUTE,
    INIT_ROUTE,
    LABEL_ROUTE,
    LEAVE_ROUTE,
    PAUSE_ROUTE,
    PAUSED_ROUTE,
    RANKS_ROUTE,
    RESUME_ROUTE,
    START_ROUTE,
    UPDATE_ROUTE,
    WEIGHT_INFO_ROUTE,
    VLLMClient,
)
from weight_update.errors import NotSupported, Phase
from weight_update.options import HttpOptions
from weight_update.waiting import Deadline

DynamoRoutes = Literal["sidecar", "worker"]


@dataclass(frozen=True)
class _Target:
    """Where a request goes instead of to vLLM's own route.

    Attributes:
        path: After ``/engine/``.
        rpc: The method of vLLM's workers that it is to call, where the route takes one.
        keys: Names in its body that differ from vLLM's.
    """

    path: str
    rpc: str | None = None
    keys: Mapping[str, str] = field(default_factory=dict)


_UPDATE = "update_weights_from_distributed"
_TARGETS: Mapping[DynamoRoutes, Mapping[str, _Target]] = {
    "sidecar": {
        PAUSE_ROUTE: _Target("control/pause_generation"),
        RESUME_ROUTE: _Target("control/resume_generation"),
        PAUSED_ROUTE: _Target("control/is_paused"),
        WEIGHT_INFO_ROUTE: _Target("control/get_weight_version"),
        INIT_ROUTE: _Target("update/init_weight_transfer_engine"),
        START_ROUTE: _Target("update/start_weight_update"),
        UPDATE_ROUTE: _Target("update/update_weights"),
        FINISH_ROUTE: _Target("update/finish_weight_update"),
        LABEL_ROUTE: _Target("update/update_weight_version"),
    },
    "worker": {
        PAUSE_ROUTE: _Target("pause_generation"),
        RESUME_ROUTE: _Target("resume_generation"),
        WEIGHT_INFO_ROUTE: _Target("get_weight_version", keys={"version": "weight_version"}),
        INIT_ROUTE: _Target("init_weights_update_group", "init_weight_transfer_engine"),
        LEAVE_ROUTE: _Target("destroy_weights_update_group", "shutdown_weight_transfer_engine"),
        START_ROUTE: _Target(_UPDATE, "start_weight_update"),
        UPDATE_ROUTE: _Target(_UPDATE, "update_weights"),
        FINISH_ROUTE: _Target(_UPDATE, "finish_weight_update"),
        FLUSH_ROUTE: _Target("flush_cache"),
        # A label is only ever written beside a call of the workers: one that does nothing.
        LABEL_ROUTE: _Target(_UPDATE, "check_health", {"new_version": "weight_version"}),
    },
}
# Routes that only look: one that answers says which family this is.
_LOOKS: Mapping[DynamoRoutes, str] = {"sidecar": PAUSED_ROUTE, "worker": WEIGHT_INFO_ROUTE}
# Workers of vLLM are called by name: their methods and arguments are those of its release.
_NO_FORMAT_SINCE = (0, 26)
_LEAVES_SINCE = (0, 32)


@dataclass(frozen=True)
class DynamoOptions:
    """What a Dynamo worker does not say of itself.

    Attributes:
        engine_world_size: Ranks of one worker's engine: tensor by pipeline by data parallel.
        vllm_release: The release of vLLM in it, which decides what it wants to be told.
        routes: Which family of routes it has; None finds out.
    """

    engine_world_size: int = 1
    vllm_release: str = "0.32.0"
    routes: DynamoRoutes | None = None


class DynamoClient(VLLMClient):
    """Calls one Dynamo worker as if it were a vLLM server.

    Args:
        url: The worker's system URL, such as ``http://10.0.0.12:8081``: not the frontend's.
        options: Keys, TLS and proxies.
        dynamo: What the worker does not say.
    """

    stranger = "no Dynamo worker that takes weights answers here"
    address = (
        "give the worker's system URL (DYN_SYSTEM_PORT), and not the frontend's; Dynamo's Python "
        "worker needs --enable-rl"
    )

    def __init__(self, url: str, options: HttpOptions, dynamo: DynamoOptions) -> None:
        super().__init__(url, options)
        self._dynamo = dynamo
        self._routes = dynamo.routes

    def has(self, route: str, deadline: Deadline) -> bool:
        """Whether a route exists; looked up, since Dynamo runs a route whatever the method."""
        path = urlsplit(route).path
        known = path in _TARGETS[self._family(deadline)]
        return known and not (path == LEAVE_ROUTE and self._is_older_than(_LEAVES_SINCE))

    def release(self, deadline: Deadline) -> str | None:
        """The release of vLLM, as it was given; None when no such worker answers here."""
        family = self._family(deadline)
        answer = self._send(_LOOKS[family], "connect", deadline, {})
        return self._dynamo.vllm_release if answer.status_code == 200 else None

    def label(self, deadline: Deadline) -> str | None:
        """The version label; none between an update and its number, when it is ``unknown``."""
        told = super().label(deadline)
        return None if told == "unknown" else told

    def reset_prefix_cache(self, deadline: Deadline, *, running: bool = False) -> bool:
        """Empties the prefix cache; a sidecar does it by a pause, for which requests wait.

        Args:
            deadline: Bound of all calls.
            running: Whether requests that run lose theirs too, and are not waited for.
        """
        if self._family(deadline) == "worker":
            self._post(FLUSH_ROUTE, "flush", deadline)  # the pause before it has done it already
            return True
        paused = self.paused(deadline)
        self.pause("keep" if running or paused else "wait", deadline, clear_cache=True)
        if not paused:
            self.resume(deadline)
        return True

    def _family(self, deadline: Deadline) -> DynamoRoutes:
        if self._routes is None:
            found = self._send_to(_TARGETS["sidecar"][PAUSED_ROUTE], "connect", deadline, {})
            self._routes = "worker" if found.status_code == 404 else "sidecar"
        return self._routes

    def _get(self, route: str, phase: Phase, deadline: Deadline) -> dict[str, Any]:
        if urlsplit(route).path == RANKS_ROUTE:
            return {"world_size": self._dynamo.engine_world_size}
        if not self.has(route, deadline):
            return {}
        response = self._send(route, phase, deadline, {})
        body = json_of(response)
        if response.status_code != 200 or not isinstance(body, dict):
            return {}
        return _renamed(body, _TARGETS[self._family(deadline)][urlsplit(route).path].keys)

    def _post(
        self,
        route: str,
        phase: Phase,
        deadline: Deadline,
        body: Body | None = None,
        *,
        absent: int | None = None,
    ) -> requests.Response:
        response = self._send(route, phase, deadline, body or {})
        answer = json_of(response)
        refused = isinstance(answer, dict) and answer.get("status") == "error"
        if refused or response.status_code not in (200, absent):
            raise self._answers.rejection(response, phase=phase)
        return response

    def _send(self, route: str, phase: Phase, deadline: Deadline, body: Body) -> requests.Response:
        parts = urlsplit(route)
        target = _TARGETS[self._family(deadline)].get(parts.path)
        if target is None:
            raise NotSupported(
                f"Dynamo has no route that does what vLLM's {parts.path} does",
                engine=self.url,
                phase=phase,
            )
        given = json.loads(body) if isinstance(body, bytes) else body
        content = _renamed({**_told_in(parts.query), **given}, target.keys)
        if parts.path == START_ROUTE and not self._is_older_than(_NO_FORMAT_SINCE):
            content.pop("is_checkpoint_format", None)
        return self._send_to(target, phase, deadline, content)

    def _send_to(
        self, target: _Target, phase: Phase, deadline: Deadline, content: dict[str, Any]
    ) -> requests.Response:
        body = content if target.rpc is None else {"engine_rpc": target.rpc, **content}
        return self._calls.call(
            "POST", f"/engine/{target.path}", phase=phase, deadline=deadline, body=body
        )

    def _is_older_than(self, release: tuple[int, ...]) -> bool:
        number = release_number(self._dynamo.vllm_release)
        return number is not None and number < release


def _told_in(query: str) -> dict[str, Any]:
    """What vLLM's route takes in its address, as a body.

    Example:
        >>> _told_in("mode=keep&clear_cache=true")
        {'mode': 'keep', 'clear_cache': True}
    """
    words = {"true": True, "false": False}
    return {key: words.get(value[0], value[0]) for key, value in parse_qs(query).items()}


def _renamed(body: Mapping[str, Any], keys: Mapping[str, str]) -> dict[str, Any]:
    return {keys.get(key, key): value for key, value in body.items()}
