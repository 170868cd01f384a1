"""A module's ``state_dict``, where asking for it changes nothing."""

from __future__ import annotations

import sys
from typing import Any

from torch import nn

from weight_update.torch_private.fsdp1 import persistent_buffers


def state_of(module: nn.Module) -> dict[str, Any]:
    """The module's own tensors and its extra state, as ``state_dict(keep_vars=True)`` has them.

    Layers of bitsandbytes are in the way: a 4-bit one that was laid out for inference on a CPU
    lays itself out anew to be saved, and not as it was, and a quantised embedding cannot be
    saved. Of a model with such layers all parameters and persistent buffers are told.

    Example:
        >>> list(state_of(nn.Linear(1, 1)))
        ['weight', 'bias']
    """
    if not _is_disturbed(module):
        state: dict[str, Any] = module.state_dict(keep_vars=True)
        return state
    return {
        f"{path}.{key}" if path else key: tensor
        for path, part in module.named_modules(remove_duplicate=False)
        for key, tensor in (*part.named_parameters(recurse=False), *persistent_buffers(part))
    }


def _is_disturbed(module: nn.Module) -> bool:
    """Whether ``state_dict`` would change a layer, or fail at one."""
    bitsandbytes: Any = sys.modules.get("bitsandbytes")  # its layers can only exist with it
    if bitsandbytes is None:
        return False
    layers = bitsandbytes.nn
    for part in module.modules():
        if isinstance(part, (layers.Embedding4bit, layers.Embedding8bit)):
            return True
        if isinstance(part, layers.Linear4bit):
            state = getattr(part.weight, "quant_state", None)
            if getattr(state, "packing_format_for_cpu", False):
                return True
    return False
