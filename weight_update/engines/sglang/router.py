"""A router in front of SGLang servers, told from how it lists them: pure functions.

``sglang-router`` answers ``GET /workers`` with ``{"workers": [{"url", "is_healthy", ...}]}``,
and ``GET /list_workers`` with ``{"urls": [...]}`` before that. A server has neither route.
"""

from __future__ import annotations

import re
from typing import Any

from weight_update.errors import ConfigurationError

WORKER_ROUTES = {"/workers": "workers", "/list_workers": "urls"}
# Of a worker that the router addresses rank by rank, as in ``http://a:1@0``.
_RANK = re.compile(r"@\d+$")


def is_list_of_workers(route: str, body: Any) -> bool:
    """Whether a router answered ``body`` to one of ``WORKER_ROUTES``.

    Example:
        >>> is_list_of_workers("/workers", {"workers": []})
        True
        >>> is_list_of_workers("/workers", {"detail": "Not Found"})
        False
    """
    return isinstance(body, dict) and WORKER_ROUTES[route] in body


def read_workers(route: str, body: Any, *, url: str) -> tuple[str, ...]:
    """URLs of the servers behind a router.

    Args:
        route: Where it was asked.
        body: What it answered there.
        url: The router's, for errors.

    Raises:
        ConfigurationError: They cannot all be spoken to, so an update would miss some.

    Example:
        >>> read_workers("/list_workers", {"urls": ["http://a:1", "http://b:1"]}, url="http://r")
        ('http://a:1', 'http://b:1')
    """
    rows = body[WORKER_ROUTES[route]]
    workers = [_worker(row) for row in rows] if isinstance(rows, list) else []
    if not workers or None in workers:
        raise _refusal(f"this router lists no workers that can be read: {str(rows)[:200]}", url)
    return tuple(dict.fromkeys(worker for worker in workers if worker is not None))


def _worker(row: Any) -> str | None:
    """URL of a worker; None when it cannot be spoken to over HTTP.

    One that the router calls unhealthy is a worker too: a paused server is, for a while.
    """
    url = row.get("url") if isinstance(row, dict) else row
    if not isinstance(url, str) or not url.startswith(("http://", "https://")):
        return None
    url = _RANK.sub("", url).rstrip("/")
    return url if "//" in url and url.partition("//")[2] else None


def _refusal(message: str, url: str) -> ConfigurationError:
    remedy = "name the URL of each server behind it, less those that should stay as they are"
    return ConfigurationError(message, engine=url, phase="connect", remedy=remedy)
