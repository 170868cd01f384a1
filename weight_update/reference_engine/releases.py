"""What differs between the SGLang releases that the reference engine can stand for."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any


@dataclass(frozen=True)
class Release:
    """The behaviour of one SGLang release, as far as a weight update can see it.

    The defaults are those of the oldest release.

    Args:
        name: Version string, as ``/server_info`` reports it.
        missing_routes: Paths that exist in some other release but not in this one.
        missing_fields: Fields of request bodies that this release does not know.
        paused_updates_are_labelled: An update under a pause sets the ``weight_version`` it
            brings; otherwise it is ignored.
        continue_waits: ``/continue_generation`` waits for an update under the pause.
        raw_tcp_address: An IPv6 ``master_address`` must come with its brackets.
        flush_timeout: ``/flush_cache`` takes the ``timeout`` query, and its text says whether
            it flushed.
        paused_flush_ignores_queue: A paused engine may flush although requests are queued.
        retractions_counted: Answers carry ``num_retractions``.
        checksums: ``/weights_checker`` knows ``checksum``: not at all, when asked for, or by
            default.
        live_loads: ``/v1/loads`` and ``/get_load`` ask the scheduler; otherwise they show what
            it left, which is frozen while it is paused or blocked.
        token_spans: Answers carry ``weight_versions``, one span a version, and the version
            of a token is the one that the scheduler held when it made that token.
        sessions: Updates outside a session are refused.
        failed_receive_told: A failed receive is told apart from a failed load,
            which leaves the weights partly updated.
        unknown_group_kills: An update that names an unknown group ends the process.
        refused_flush_kills: An update whose flush is refused ends the process.
        attn_dp_size: ``/server_info`` reports ``attn_dp_size``.

    Example:
        >>> RELEASES["0.5.15"].sessions
        False
    """

    name: str
    missing_routes: frozenset[str] = frozenset()
    missing_fields: frozenset[str] = frozenset()
    paused_updates_are_labelled: bool = False
    continue_waits: bool = True
    raw_tcp_address: bool = True
    flush_timeout: bool = False
    paused_flush_ignores_queue: bool = True
    retractions_counted: bool = False
    checksums: str = "never"
    live_loads: bool = True
    token_spans: bool = False
    sessions: bool = False
    failed_receive_told: bool = False
    unknown_group_kills: bool = True
    refused_flush_kills: bool = True
    attn_dp_size: bool = False


_SESSION_ROUTES = frozenset({"/begin_weight_update", "/end_weight_update"})
_SELECTOR = frozenset({"UpdateWeightsFromDistributed.selector", "UpdateWeightsFromTensor.selector"})
_EMPTY_CACHE = frozenset(
    {
        "UpdateWeightsFromDistributed.torch_empty_cache",
        "UpdateWeightsFromTensor.torch_empty_cache",
    }
)

_OLDEST = Release(
    "0.5.6",
    missing_routes=_SESSION_ROUTES | {"/ready", "/v1/loads"},
    missing_fields=_SELECTOR | _EMPTY_CACHE | {"ContinueGeneration.torch_empty_cache"},
)

#: What each release changed; one that is not named changed nothing.
_CHANGES: Mapping[str, Mapping[str, Any]] = {
    "0.5.7": {"paused_updates_are_labelled": True, "continue_waits": False},
    "0.5.8": {"missing_routes": _SESSION_ROUTES | {"/ready"}},
    "0.5.9": {},
    "0.5.10": {
        "raw_tcp_address": False,
        "flush_timeout": True,
        "paused_flush_ignores_queue": False,
    },
    "0.5.11": {
        "continue_waits": True,
        "missing_fields": _SELECTOR | {"ContinueGeneration.torch_empty_cache"},
    },
    "0.5.12": {
        "retractions_counted": True,
        "checksums": "asked",
        "missing_fields": _SELECTOR,
    },
    "0.5.13": {"checksums": "default"},
    # Live on a real 0.5.9, and frozen on a real 0.5.15.post1: it writes them as it decodes.
    "0.5.15": {"live_loads": False},
    "0.5.19": {"token_spans": True},
    "0.5.20": {"missing_routes": _SESSION_ROUTES},
    "0.5.21": {
        "sessions": True,
        "missing_routes": frozenset({"/get_load"}),
        "missing_fields": frozenset(),
        "paused_flush_ignores_queue": True,
        "failed_receive_told": True,
        "unknown_group_kills": False,
    },
    "0.5.22": {"refused_flush_kills": False, "attn_dp_size": True},
    "0.5.23": {},
}


def _profiles() -> dict[str, Release]:
    known = {_OLDEST.name: _OLDEST}
    for name, changes in _CHANGES.items():
        known[name] = replace(list(known.values())[-1], name=name, **changes)
    return known


RELEASES: dict[str, Release] = _profiles()


def release_named(name: str) -> Release:
    """Return the profile in force for a release: its own, or that of the last one before it.

    Raises:
        ValueError: It is older than the oldest profile or newer than the newest, or no release.

    Example:
        >>> release_named("0.5.17.post1") == replace(RELEASES["0.5.15"], name="0.5.17.post1")
        True
    """
    number = _number(name)
    older = [known for known in RELEASES.values() if number and _number(known.name) <= number]
    newest = list(RELEASES)[-1]
    if not older or number > _number(newest):
        raise ValueError(f"no profile for release {name!r}; there are {_OLDEST.name} to {newest}")
    return replace(older[-1], name=name)


def _number(name: str) -> tuple[int, ...]:
    """Return the three numbers of a release; empty if it has others."""
    found = re.fullmatch(r"(\d+)\.(\d+)\.(\d+)(\.post\d+)?", name)
    return tuple(map(int, found.groups()[:3])) if found else ()
