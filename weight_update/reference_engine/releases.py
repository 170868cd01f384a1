"""What differs between the SGLang releases that the reference engine can stand for."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Release:
    """The behaviour of one SGLang release, as far as a weight update can see it.

    Args:
        name: Version string, as ``/server_info`` reports it.
        sessions: Updates outside a session are refused.
        missing_routes: Paths that exist in some other release but not in this one.
        missing_fields: Fields of request bodies that this release does not know.
        attn_dp_size: ``/server_info`` reports ``attn_dp_size``.
        token_spans: Answers carry ``weight_versions``, one span a version, and the version
            of a token is the one that the scheduler held when it made that token.
        flush_timeout: ``/flush_cache`` takes the ``timeout`` query.
        paused_flush_ignores_queue: A paused engine may flush although requests are queued.
        refused_flush_kills: An update whose flush is refused ends the process.
        unknown_group_kills: An update that names an unknown group ends the process.

    Example:
        >>> RELEASES["0.5.15"].sessions
        False
    """

    name: str
    sessions: bool = True
    missing_routes: frozenset[str] = frozenset()
    missing_fields: frozenset[str] = frozenset()
    attn_dp_size: bool = True
    token_spans: bool = True
    flush_timeout: bool = True
    paused_flush_ignores_queue: bool = True
    refused_flush_kills: bool = False
    unknown_group_kills: bool = False


_PROFILES = (
    Release("0.5.23", missing_routes=frozenset({"/get_load"})),
    Release(
        "0.5.15",
        sessions=False,
        missing_routes=frozenset({"/begin_weight_update", "/end_weight_update", "/ready"}),
        missing_fields=frozenset({"selector"}),
        attn_dp_size=False,
        token_spans=False,
        paused_flush_ignores_queue=False,
        refused_flush_kills=True,
        unknown_group_kills=True,
    ),
)

RELEASES: dict[str, Release] = {release.name: release for release in _PROFILES}


def release_named(name: str) -> Release:
    """Return the profile called ``name``.

    Raises:
        ValueError: There is no such profile; the text lists those there are.
    """
    if name not in RELEASES:
        raise ValueError(f"no profile for release {name!r}; there are {', '.join(RELEASES)}")
    return RELEASES[name]
