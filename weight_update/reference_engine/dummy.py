"""Models without files of weights: arbitrary values, and parameters that belong to no model."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch


class ParameterBag(torch.nn.Module):
    """Parameters under given names, and nothing that could generate with them.

    It stands for a model that other engines hold under the names of its checkpoint, and
    transformers under names of its own (experts stacked into one tensor).

    Args:
        config: The transformers configuration, for what the server says of its model.
        shapes: Shape of each parameter.
        dtype: Of all of them.

    Example:
        >>> bag = ParameterBag(None, {"model.norm.weight": [4]}, torch.bfloat16)
        >>> {name: list(value.shape) for name, value in bag.named_parameters()}
        {'model.norm.weight': [4]}
    """

    def __init__(
        self, config: Any, shapes: Mapping[str, Sequence[int]], dtype: torch.dtype
    ) -> None:
        super().__init__()
        self.config = config
        self.dtype = dtype
        for name, shape in shapes.items():
            path, _, own = name.rpartition(".")
            parameter = torch.nn.Parameter(torch.empty(*shape, dtype=dtype), requires_grad=False)
            _module(self, path).register_parameter(own, parameter)

    @property
    def device(self) -> torch.device:
        """Where the parameters are."""
        return next(self.parameters()).device


def _module(root: torch.nn.Module, path: str) -> torch.nn.Module:
    """Return the module at a path, and make those that are not there."""
    for name in filter(None, path.split(".")):
        if name not in dict(root.named_children()):
            root.add_module(name, torch.nn.Module())
        root = root.get_submodule(name)
    return root


def read_shapes(path: Path) -> dict[str, list[int]]:
    """Return the shapes in a JSON file, by name.

    Raises:
        ValueError: It holds something else.
    """
    found = json.loads(path.read_text())
    if not isinstance(found, dict) or not found or not all(map(_is_shape, found.values())):
        raise ValueError(f"{path} does not hold a shape for each of some names")
    return found


def _is_shape(value: object) -> bool:
    return isinstance(value, list) and all(type(size) is int and size > 0 for size in value)
