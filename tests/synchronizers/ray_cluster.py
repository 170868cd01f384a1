"""A Ray cluster of this machine alone."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def cluster(ray: Any, num_cpus: int) -> Iterator[Any]:
    """Start a cluster and stop it; on a busy machine a first start may outlast Ray's 30 s."""
    try:
        _start(ray, num_cpus)
    except Exception as error:
        if "timed out during startup" not in str(error):
            raise
        ray.shutdown()
        _start(ray, num_cpus)
    try:
        yield ray
    finally:
        ray.shutdown()


def _start(ray: Any, num_cpus: int) -> None:
    # Ray keeps the first token of a process for all of its clusters, and would write one to HOME.
    os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(16))
    ray.init(
        num_cpus=num_cpus, include_dashboard=False, log_to_driver=False, configure_logging=False
    )
