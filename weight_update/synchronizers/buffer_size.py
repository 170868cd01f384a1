"""How large a buffer a refit may take: what was asked for, or a share of the free memory."""

from __future__ import annotations

import os
import sys
from math import isfinite

from weight_update.errors import ConfigurationError

RATIO_VARIABLE = "NRL_REFIT_BUFFER_MEMORY_RATIO"
DEFAULT_RATIO = 0.3
_GIBIBYTE = 1024**3


def check_buffer_size(gigabytes: float | None) -> None:
    """Raises ConfigurationError unless a size is None or some bytes, and the ratio is readable.

    Example:
        >>> check_buffer_size(0)
        Traceback (most recent call last):
        weight_update.errors.ConfigurationError: refit_buffer_size_gb must be > 0, and is 0
    """
    if gigabytes is None:
        memory_ratio()
        return
    if isinstance(gigabytes, bool) or not isinstance(gigabytes, (int, float)):
        raise ConfigurationError(f"refit_buffer_size_gb must be a number, and is {gigabytes!r}")
    if not gigabytes > 0:
        raise ConfigurationError(f"refit_buffer_size_gb must be > 0, and is {gigabytes}")
    if not 1 <= gigabytes * _GIBIBYTE <= sys.maxsize:
        raise ConfigurationError(
            f"refit_buffer_size_gb={gigabytes} must be at least a byte, and less than "
            f"{sys.maxsize // _GIBIBYTE + 1} GiB"
        )


def memory_ratio() -> float:
    """Which share of the free memory a buffer takes; the environment's, or else 0.3.

    Raises:
        ConfigurationError: The environment's is no number, or not above zero.
    """
    text = os.environ.get(RATIO_VARIABLE, "").strip() or str(DEFAULT_RATIO)
    try:
        ratio = float(text)
    except ValueError as error:
        raise ConfigurationError(f"{RATIO_VARIABLE} must be a valid float, got {text!r}") from error
    if not isfinite(ratio):
        raise ConfigurationError(f"{RATIO_VARIABLE} must be a valid float, got {text!r}")
    if ratio <= 0:
        raise ConfigurationError(f"{RATIO_VARIABLE} must be > 0, and is {text}")
    return ratio


def explicit_bytes(gigabytes: float) -> int:
    """The bytes of a size that was asked for.

    Example:
        >>> explicit_bytes(0.5)
        536870912
    """
    check_buffer_size(gigabytes)
    return int(gigabytes * _GIBIBYTE)


def share_of(free_bytes: int) -> int:
    """The share of the free memory that a buffer may take.

    Raises:
        ConfigurationError: Nothing is free.

    Example:
        >>> share_of(1000)
        300
    """
    size = int(free_bytes * memory_ratio())
    if size < 1:
        raise ConfigurationError(
            f"the trainer has {free_bytes} bytes free, which leaves none for a refit buffer",
            phase="plan",
            remedy="free memory, or set refit_buffer_size_gb=",
        )
    return size
