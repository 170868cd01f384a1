"""What torch keeps of FSDP1's parameters and shows in public only to all ranks at once.

Names and shapes must be known before anything is gathered: a gather to learn them would hang
where one rank alone asks. Run on torch 2.13.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from weight_update.errors import ConfigurationError


@dataclass(frozen=True)
class FlatLayout:
    """What one flat parameter is made of.

    Attributes:
        shapes: Full shape by name, as seen from the module that the unit wraps; in order.
        shared: Names under which some of them are tied.
        dtype: Of all of them.
        device: Likewise.
    """

    shapes: dict[str, torch.Size]
    shared: frozenset[str]
    dtype: torch.dtype
    device: torch.device


_NOTHING = FlatLayout({}, frozenset(), torch.float32, torch.device("cpu"))


def flat_layout(unit: nn.Module) -> FlatLayout:
    """The layout of an FSDP1 unit; empty of one that has no parameters of its own."""
    wrapper: Any = unit
    try:
        handle = wrapper._handle
        return _NOTHING if handle is None else _layout(handle.flat_param)
    except AttributeError as error:
        raise ConfigurationError(
            f"this torch ({torch.__version__}) does not tell the parameters of FSDP1: {error}",
            phase="plan",
            remedy="use FSDP2 (fully_shard), or pass a full state dict on one rank",
        ) from error


def _layout(flat: Any) -> FlatLayout:
    tied = (
        f"{info.module_name}.{info.param_name}" if info.module_name else info.param_name
        for info in flat._shared_param_infos
    )
    shapes = dict(zip(flat._fqns, flat._shapes, strict=True))
    return FlatLayout(shapes, frozenset(tied), flat.dtype, flat.device)


def persistent_buffers(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """A module's own buffers that its ``state_dict`` holds, which a walk by FSDP1 would gather."""
    for name, buffer in module.named_buffers(recurse=False):
        if name not in module._non_persistent_buffers_set:
            yield name, buffer
