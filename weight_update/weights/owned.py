"""A tensor by the module that owns it: what may be kept of a model between two updates."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import nn

from weight_update.errors import WeightMismatchError

ORDINARY = frozenset({torch.Tensor, nn.Parameter, nn.Buffer})
"""Of these, place in memory and strides tell all; a sub-class may hold what they do not show."""


class Owned:
    """A tensor, by the module that owns it.

    No tensor is referred to, not even weakly: ``torch.utils.swap_tensors`` refuses that.

    Example:
        >>> layer = nn.Linear(1, 1)
        >>> Owned(layer, "bias").read().shape
        torch.Size([1])
    """

    __slots__ = ("key", "owner")

    def __init__(self, owner: nn.Module, key: str) -> None:
        self.owner = weakref.ref(owner)
        self.key = key

    def read(self) -> torch.Tensor:
        """The value that it has now, detached."""
        owner = self.owner()
        if owner is None:
            raise WeightMismatchError(f"the module that owned {self.key!r} is gone", phase="plan")
        tensor: Any = owner.__getattr__(self.key)  # as the model was looked at
        value: torch.Tensor = tensor.detach()
        return value

    def tells(self, value: object) -> bool:
        """Whether this is what it reads."""
        owner: Any = self.owner()
        try:
            return owner.__getattr__(self.key) is value
        except AttributeError:
            return False

    @property
    def is_contiguous(self) -> bool:
        """Whether reading it makes a contiguous value."""
        tensor: Any = getattr(self.owner(), self.key, None)
        return isinstance(tensor, torch.Tensor) and tensor.is_contiguous()

    def rows(self, first: int, end: int) -> torch.Tensor:
        """Some rows of it."""
        return self.read()[first:end]


def owned(module: nn.Module, name: str) -> Owned | None:
    """The tensor that a module's ``state_dict`` has under a name; None if no module owns it."""
    *path, key = name.split(".")
    owner: Any = module
    for child in path:
        owner = getattr(owner, child, None)
    return Owned(owner, key) if isinstance(owner, nn.Module) else None
