"""What decides which weights a model has, values apart: so much is remembered of one."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import nn

from weight_update.torch_private.modules import own_tensors, saved_by, walk

_Part = tuple[str, weakref.ref[nn.Module], tuple[object, ...]]
_Place = tuple[str, type, int, tuple[int, ...], torch.dtype, torch.Size, torch.device]


@dataclass(frozen=True)
class Marks:
    """The modules and tensors of a model; no tensor is referred to.

    Attributes:
        parts: Each module under the last part of its name, and how it is saved; a model may
            change its parts.
        places: Of all tensors.

    Example:
        >>> model = nn.Linear(1, 1)
        >>> marks = Marks.of(model)
        >>> model.bias = None
        >>> marks.hold_for(model)
        False
    """

    parts: tuple[_Part, ...]
    places: list[_Place]

    @classmethod
    def of(cls, module: nn.Module) -> Marks:
        """Those that a model has now."""
        named = walk(module)
        parts = tuple((name, weakref.ref(part), saved_by(part)) for name, part in named)
        return cls(parts, _places(named))

    def hold_for(self, module: nn.Module) -> bool:
        """Whether a model has the same.

        Its ``state_dict`` has then, too, unless a class of it makes that from more than its
        tensors: one walk tells in a fraction of the time that a ``state_dict`` takes.
        """
        named = walk(module)
        if len(named) != len(self.parts):
            return False
        for (name, part), (known, ref, way) in zip(named, self.parts, strict=True):
            if ref() is not part or name != known or saved_by(part) != way:
                return False
        return _places(named) == self.places


def _places(named: Iterable[tuple[str, nn.Module]]) -> list[_Place]:
    return [
        (name, type(t), *_address(t), t.dtype, t.shape, t.device)
        for _, name, t in own_tensors(part for _, part in named)
    ]


def _address(tensor: torch.Tensor) -> tuple[int, tuple[int, ...]]:
    return (tensor.data_ptr(), tensor.stride()) if tensor.layout is torch.strided else (0, ())
