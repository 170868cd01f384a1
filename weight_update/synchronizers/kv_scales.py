"""Scales of an fp8 KV cache, which some engines take at the end of a refit."""

from __future__ import annotations

from collections.abc import Mapping
from math import isfinite
from typing import Any

from weight_update.errors import ConfigurationError


def check_kv_scales(scales: Any) -> None:
    """Raises ConfigurationError unless scales are None, or finite numbers above zero by name.

    Example:
        >>> check_kv_scales({"layers.0.k_scale": 0.5})
        >>> check_kv_scales({"layers.0.k_scale": 0.0})
        Traceback (most recent call last):
        weight_update.errors.ConfigurationError: plan: kv_scales['layers.0.k_scale']=0.0 must be ...
    """
    if scales is None:
        return
    if not isinstance(scales, Mapping) or not all(isinstance(name, str) for name in scales):
        raise ConfigurationError(
            f"kv_scales must be a mapping of names to numbers, and is {scales!r}", phase="plan"
        )
    for name, scale in scales.items():
        if not _is_scale(scale):
            raise ConfigurationError(
                f"kv_scales[{name!r}]={scale!r} must be a finite number above zero", phase="plan"
            )


def _is_scale(scale: Any) -> bool:
    try:
        return isfinite(scale) and scale > 0
    except (TypeError, ValueError, OverflowError, RuntimeError):
        return False
