"""What an SGLang release can do and how a server is laid out, told from its routes and answers."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from weight_update.errors import ConfigurationError
from weight_update.options import PauseMode

PROBED_ROUTES = (
    "/pause_generation",
    "/begin_weight_update",
    "/model_info",
    "/v1/loads",
    "/get_load",
    "/ready",
)
_OLDEST = (0, 5, 6)
_SESSIONS_SINCE = (0, 5, 21)
_REFUSED_FLUSH_TOLD_SINCE = (0, 5, 22)
# Older ones take a cache key with a request, and ignore it.
_SALTS_SINCE = (0, 5, 11)

WHICH_URL = (
    "give the server's root URL (without /v1); a vLLM server takes VLLMWeightSyncScheme or "
    "VLLMGeneration"
)
"""What to do where something else than SGLang answers."""


@dataclass(frozen=True)
class SGLangCapabilities:
    """What the procedure needs to know of a release.

    Attributes:
        release: As the server names it; empty when it does not.
        sessions: Updates run between begin and end (0.5.21 and later).
        loads_route: Where running requests are counted, if anywhere.
        live_loads: The count still moves while the engine is paused by ``retract``.
        flush_under_retract: The cache can be flushed while requests wait to be resumed.
        brackets_ipv6: The server glues ``tcp://`` and the address together as they are.
        tells_readiness: It says whether it is paused (0.5.20 and later).
        salts_prefixes: A request may bring a cache key of its own (0.5.11 and later).
        tells_refused_flush: An update whose flush is refused answers so (0.5.22 and later).
    """

    release: str
    sessions: bool
    loads_route: str | None
    live_loads: bool
    flush_under_retract: bool
    brackets_ipv6: bool
    tells_readiness: bool = False
    salts_prefixes: bool = False
    tells_refused_flush: bool = False


@dataclass(frozen=True)
class SGLangLayout:
    """How a server spreads its model.

    Attributes:
        ranks: Ranks of the model: those that join the weight-update group, if it can take part
            in one. None when the server does not say.
        disaggregated: Prefill and decode run in different servers.
        offline: Why none of them can join a group, in words; None when they can.
        stages: Parts of the model that run one after the other; only the first answers.
        replicas: Copies of the model; all of them answer.
    """

    ranks: int | None
    disaggregated: bool
    offline: str | None = None
    stages: int = 1
    replicas: int = 1

    def objection(self, mode: PauseMode) -> str | None:
        """Why such a server cannot be updated under a pause mode; None when it can."""
        if mode == "abort":
            return None
        if self.disaggregated:
            return f"pause_mode={mode!r} is not safe on a disaggregated server; use 'abort'"
        if self.stages > 1:  # seen on 0.5.23: requests in flight run on, and no flush succeeds
            return f"pause_mode={mode!r} does not stop pipeline stages; use 'abort'"
        return None


def release_number(release: str) -> tuple[int, ...] | None:
    """The leading numbers of a release, or None when there are none.

    Example:
        >>> release_number("0.5.15.post1")
        (0, 5, 15)
    """
    found = re.match(r"v?(\d{1,9})\.(\d{1,9})(?:\.(\d{1,9}))?", release)
    return tuple(int(part or 0) for part in found.groups()) if found else None


def read_capabilities(
    release: str, routes: Mapping[str, bool | None], *, url: str
) -> SGLangCapabilities:
    """Capabilities from the routes a server has; the release decides only where routes cannot.

    Args:
        release: The server's own release text; may be empty.
        routes: For each of ``PROBED_ROUTES`` whether it is there, or None when that is unknown.
        url: For errors.

    Raises:
        ConfigurationError: The release has no pause modes (older than 0.5.6).

    Example:
        >>> routes = dict.fromkeys(PROBED_ROUTES, True) | {"/get_load": False}
        >>> read_capabilities("0.5.23", routes, url="http://a:1").flush_under_retract
        True
    """
    number = release_number(release)
    _refuse_old(release, number, routes, url)
    sessions = routes["/begin_weight_update"]
    if sessions is None:
        sessions = number is not None and number >= _SESSIONS_SINCE
    return SGLangCapabilities(
        release=release,
        sessions=sessions,
        loads_route=next((r for r in ("/get_load", "/v1/loads") if routes[r] is not False), None),
        live_loads=not sessions,
        flush_under_retract=sessions or (number is not None and number < (0, 5, 10)),
        brackets_ipv6=number is not None and number < (0, 5, 10),
        tells_readiness=routes["/ready"] is not False,
        salts_prefixes=number is not None and number >= _SALTS_SINCE,
        tells_refused_flush=number is not None and number >= _REFUSED_FLUSH_TOLD_SINCE,
    )


def read_layout(info: Mapping[str, Any]) -> SGLangLayout:
    """The layout in a ``/server_info`` answer.

    Example:
        >>> read_layout({"tp_size": 2, "pp_size": 1, "dp_size": 1}).ranks
        2
        >>> read_layout({"tp_size": 2, "dp_size": 3}).offline
        'runs 3 data-parallel replicas, which cannot join a group'
    """
    stages, replicas = stages_of(info), replicas_of(info)
    offline = None
    if replicas > 1:
        offline = f"runs {replicas} data-parallel replicas, which cannot join a group"
    if stages > 1:
        offline = f"runs {stages} pipeline stages, which share their ranks in a group"
    size, mode = _size(info, "tp_size"), info.get("disaggregation_mode")
    return SGLangLayout(
        size and size * stages * replicas,
        disaggregated=mode in ("prefill", "decode"),
        offline=offline,
        stages=stages,
        replicas=replicas,
    )


def stages_of(info: Mapping[str, Any]) -> int:
    """How many pipeline stages a server runs."""
    return _size(info, "pp_size") or 1


def replicas_of(info: Mapping[str, Any]) -> int:
    """How many copies of the model a server runs; with DP attention there is one."""
    return 1 if info.get("enable_dp_attention") else _size(info, "dp_size") or 1


def _size(info: Mapping[str, Any], key: str) -> int | None:
    value = info.get(key)
    counts = isinstance(value, int) and not isinstance(value, bool) and 0 < value < 1 << 31
    return value if counts else None


def _refuse_old(
    release: str,
    number: tuple[int, ...] | None,
    routes: Mapping[str, bool | None],
    url: str,
) -> None:
    if not release and routes["/pause_generation"] is False:
        raise ConfigurationError(
            "no SGLang server answers here: /server_info and /pause_generation are missing",
            engine=url,
            phase="connect",
            remedy=WHICH_URL,
        )
    if number is not None:
        too_old = number < _OLDEST
    else:
        too_old = routes["/model_info"] is False
    if too_old or routes["/pause_generation"] is False:
        raise ConfigurationError(
            f"SGLang {release or '(release unknown)'} has no pause modes",
            engine=url,
            phase="connect",
            remedy="SGLang 0.5.6 or later is needed",
        )


def running_requests(loads: Any) -> int | None:
    """Running requests of all ranks in a loads answer, in either of its two forms.

    Example:
        >>> running_requests([{"num_reqs": 5, "num_waiting_reqs": 2}])
        3
        >>> running_requests({"loads": [{"num_running_reqs": 1}, {"num_running_reqs": 4}]})
        5
        >>> running_requests({"message": "busy"}) is None
        True
    """
    rows = loads.get("loads") if isinstance(loads, dict) else loads
    if not isinstance(rows, list):
        return None
    counts = [_running(row) for row in rows]
    return None if None in counts else sum(count for count in counts if count is not None)


def _running(row: Any) -> int | None:
    if not isinstance(row, dict):
        return None
    if isinstance(row.get("num_running_reqs"), int):
        return int(row["num_running_reqs"])
    total, waiting = row.get("num_reqs"), row.get("num_waiting_reqs", 0)
    return max(0, total - waiting) if isinstance(total, int) and isinstance(waiting, int) else None
