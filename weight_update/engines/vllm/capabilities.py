"""What a vLLM release can do, told from its routes; its number decides only where they cannot."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from weight_update.engines.vllm.client import (
    ENCODER_CACHE_ROUTE,
    FINISH_ROUTE,
    INIT_ROUTE,
    LABEL_ROUTE,
    LEAVE_ROUTE,
    RPC_ROUTE,
    START_ROUTE,
    UPDATE_ROUTE,
)
from weight_update.errors import ConfigurationError

PROBED_ROUTES = (
    START_ROUTE,
    FINISH_ROUTE,
    UPDATE_ROUTE,
    INIT_ROUTE,
    LEAVE_ROUTE,
    LABEL_ROUTE,
    ENCODER_CACHE_ROUTE,
    RPC_ROUTE,
)
NO_CONTROL = "answers here without the routes that change weights"
DEVELOPMENT_MODE = "start it with VLLM_SERVER_DEV_MODE=1 in its environment"
_OLDEST = (0, 23)
_BRACKET = (START_ROUTE, UPDATE_ROUTE, FINISH_ROUTE, INIT_ROUTE)
_PACKED_IN_INIT_SINCE = (0, 28)
_UNIQUE_ID_SINCE = (0, 32)  # 0.27.1 has none; those in between were not looked at
_LOADS_UNDER_LORA_SINCE = (0, 32)  # 0.27.1 does not, 0.32.0 does
# No bucket is as large: each is one broadcast, and not cut where a buffer would be full.
_WHOLE_BUCKETS = 1 << 62


@dataclass(frozen=True)
class VLLMCapabilities:
    """What the procedure needs to know of a release.

    Attributes:
        release: As the server names it.
        labels: It has a version label (0.27 and later).
        leaves: It drops a group when it is told to (0.32 and later).
        encoder_cache: It says that it has a cache of what a vision tower computed.
        calls_workers: It passes calls on to its workers.
        unique_id: It is told the id of an NCCL group; others look for it in the trainer's store.
        loads_under_lora: Its loaders find the layers that adapters are wrapped around.
        packed_in_init: It is told once how weights are packed, and not with every request.
    """

    release: str
    labels: bool = True
    leaves: bool = True
    encoder_cache: bool = False
    calls_workers: bool = True
    unique_id: bool = True
    loads_under_lora: bool = True
    packed_in_init: bool = True

    def init_info(self, *, packed: bool) -> dict[str, Any]:
        """What NCCL's ``init_info`` says of packing.

        Example:
            >>> VLLMCapabilities("0.27.1", packed_in_init=False).init_info(packed=True)
            {}
        """
        return _packing(packed) if self.packed_in_init else {}

    def objection(self, *, lora: bool) -> str | None:
        """Why a server of this release takes no whole weights; None where it does.

        Args:
            lora: Whether it was started with ``--enable-lora``.

        Example:
            >>> VLLMCapabilities("0.27.1", loads_under_lora=False).objection(lora=False) is None
            True
        """
        if not lora or self.loads_under_lora:
            return None
        return (
            f"vLLM {self.release} with --enable-lora loads no weights by the names of its "
            "checkpoint; serve without it, or with vLLM 0.32.0 or later"
        )

    def update_info(self, *, packed: bool) -> dict[str, Any]:
        """What NCCL's ``update_info`` says of packing.

        Example:
            >>> VLLMCapabilities("0.32.0").update_info(packed=True)
            {}
        """
        return {} if self.packed_in_init else _packing(packed)


def _packing(packed: bool) -> dict[str, Any]:
    return {"packed": packed, "packed_buffer_size_bytes": _WHOLE_BUCKETS}


def read_capabilities(release: str, routes: Mapping[str, bool], *, url: str) -> VLLMCapabilities:
    """Capabilities of a server.

    Args:
        release: Its own release text.
        routes: Whether each of ``PROBED_ROUTES`` is there.
        url: For errors.

    Raises:
        ConfigurationError: The release opens and closes no updates (0.20 and older).

    Example:
        >>> routes = dict.fromkeys(PROBED_ROUTES, True) | {LEAVE_ROUTE: False}
        >>> found = read_capabilities("0.27.1", routes, url="http://a:1")
        >>> found.labels, found.leaves, found.unique_id
        (True, False, False)
    """
    lacking = [route for route in _BRACKET if not routes[route]]
    if lacking:
        raise ConfigurationError(
            f"vLLM {release} has no {lacking[0]}, which full updates need",
            engine=url,
            phase="connect",
            remedy="serve with vLLM 0.23 or later (0.32.0 was run), with VLLM_SERVER_DEV_MODE=1",
        )
    number = release_number(release)
    return VLLMCapabilities(
        release=release,
        labels=routes[LABEL_ROUTE],
        leaves=routes[LEAVE_ROUTE],
        encoder_cache=routes[ENCODER_CACHE_ROUTE],
        calls_workers=routes[RPC_ROUTE],
        unique_id=number is None or number >= _UNIQUE_ID_SINCE,
        loads_under_lora=number is None or number >= _LOADS_UNDER_LORA_SINCE,
        packed_in_init=number is None or number >= _PACKED_IN_INIT_SINCE,
    )


def is_too_old(release: str) -> bool:
    """Whether a release opens and closes no updates, whatever routes it shows.

    Example:
        >>> is_too_old("0.20.2"), is_too_old("0.32.0"), is_too_old("dev")
        (True, False, False)
    """
    number = release_number(release)
    return number is not None and number < _OLDEST


def release_number(release: str) -> tuple[int, ...] | None:
    """The first two numbers of a release; None where there are none, or nobody made one of it.

    Example:
        >>> release_number("0.27.1+cpu"), release_number("0.1.dev1+g1234"), release_number("dev")
        ((0, 27), None, None)
    """
    found = re.match(r"v?(\d{1,9})\.(\d{1,9})", release)
    number = tuple(map(int, found.groups())) if found else None
    return None if number is None or number < (0, 2) else number
