"""Parameters that are emptied: somebody holds them in parts, in a way not known here."""

from __future__ import annotations

import torch
from torch import nn

from weight_update.errors import ConfigurationError
from weight_update.weights.shards.gather import shape_of


class Parts:
    """Looks at a module's tensors one after the other, and refuses emptied parameters.

    Example:
        >>> parts = Parts()
        >>> parts.look_at("a", nn.Parameter(torch.ones(2)))
        >>> parts.look_at("b", nn.Parameter(torch.empty(0)))
        >>> parts.refuse()
        Traceback (most recent call last):
            ...
        weight_update.errors.ConfigurationError: plan: 1 parameter(s) are empty here, ...
    """

    def __init__(self) -> None:
        self._empty: list[str] = []
        self._any_full = False

    def look_at(self, name: str, tensor: torch.Tensor) -> None:
        """Takes note of one tensor."""
        shape = shape_of(tensor)
        if isinstance(tensor, nn.Parameter) and shape == (0,):
            self._empty.append(name)
        self._any_full = self._any_full or 0 not in shape

    def refuse(self) -> None:
        """Raises if some parameters are empty and other tensors are not.

        Raises:
            ConfigurationError: They are, and other ranks may hold what is missing.
        """
        if self._empty and self._any_full:
            raise ConfigurationError(
                f"{len(self._empty)} parameter(s) are empty here, {self._empty[0]!r} first: parts "
                "of them seem to lie elsewhere, held in a way that is not known",
                phase="plan",
                remedy="FSDP1, FSDP2, DTensor and DeepSpeed ZeRO-3 are gathered; of anything "
                "else pass the whole tensors as a mapping",
            )
