"""How engines hold weights, as NeMo-RL's configuration says it."""

from __future__ import annotations

from typing import Any

from weight_update.errors import ConfigurationError

SCHEMES = ("bf16", "mxfp8", "nvfp4")


def check_scheme(scheme: Any) -> None:
    """Raises ConfigurationError unless a scheme is one that SGLang takes.

    Example:
        >>> check_scheme("fp7")
        Traceback (most recent call last):
        weight_update.errors.ConfigurationError: plan: quantization.scheme='fp7' must be one of ...
    """
    if scheme not in SCHEMES:
        raise ConfigurationError(
            f"quantization.scheme={scheme!r} must be one of {', '.join(SCHEMES)}", phase="plan"
        )
