"""What decides which weights a model has, values apart: so much is remembered of one."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import nn

from weight_update.torch_private.modules import own_tensors, saved_by

_Part = tuple[weakref.ref[nn.Module], tuple[object, ...]]
_Place = tuple[int, str, type, int, tuple[int, ...], torch.dtype, torch.Size, torch.device]


@dataclass(frozen=True)
class Marks:
    """The modules and tensors of a model; no tensor is referred to.

    Attributes:
        parts: The model and all modules in it, each once, and how they are saved.
        places: Of all tensors, each in the module that owns it.

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
        modules = list(module.modules())
        parts = tuple((weakref.ref(part), saved_by(part)) for part in modules)
        return cls(parts, _places(modules))

    def hold_for(self, module: nn.Module) -> bool:
        """Whether a model has the same.

        Its ``state_dict`` has then, too, unless a class of it makes that from more than its
        tensors. A model whose modules are the known ones, and each of which has the parts that it
        had, is the same tree: it is not walked.
        """
        modules = []
        for ref, way in self.parts:
            part = ref()
            if part is None or saved_by(part) != way:
                return False
            modules.append(part)
        return modules[0] is module and _places(modules) == self.places


def _places(parts: Iterable[nn.Module]) -> list[_Place]:
    return [
        (id(owner), name, type(t), *_address(t), t.dtype, t.shape, t.device)
        for owner, name, t in own_tensors(parts)
    ]


def _address(tensor: torch.Tensor) -> tuple[int, tuple[int, ...]]:
    return (tensor.data_ptr(), tensor.stride()) if tensor.layout is torch.strided else (0, ())
