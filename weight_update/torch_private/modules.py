"""What modules hold and how they are saved; torch's public iterators take five times as long."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import nn


def own_tensors(modules: Iterable[nn.Module]) -> Iterator[tuple[nn.Module, str, torch.Tensor]]:
    """Parameters and buffers of the modules themselves, after their owner and their name in it.

    Example:
        >>> [name for _, name, _ in own_tensors([nn.Linear(1, 1), nn.ReLU()])]
        ['weight', 'bias']
    """
    for module in modules:
        for tensors in (module._parameters, module._buffers):
            if tensors:
                for name, tensor in tensors.items():
                    if tensor is not None:
                        yield module, name, tensor


def saved_by(module: nn.Module) -> tuple[object, ...]:
    """What decides, beside its tensors, what a module's ``state_dict`` has.

    That is its class, or methods that were put in front of its class's, its hooks, which of its
    buffers are not saved, and its parts by name and identity.

    Example:
        >>> layer = nn.Linear(1, 1)
        >>> before = saved_by(layer)
        >>> _ = layer.register_state_dict_pre_hook(lambda *_: None)
        >>> saved_by(layer) == before
        False
    """
    own, parts = module.__dict__, module._modules
    # Nearly all modules have nothing of it, and a model of experts has 20,000.
    special = (
        module._state_dict_hooks
        or module._state_dict_pre_hooks
        or module._non_persistent_buffers_set
        or "state_dict" in own
        or "_save_to_state_dict" in own
    )
    held = (*parts, *map(id, parts.values())) if parts else ()
    return type(module), _specials_of(module) if special else (), held


def _specials_of(module: nn.Module) -> tuple[object, ...]:
    hooks = (*module._state_dict_hooks, *module._state_dict_pre_hooks)
    methods = module.__dict__.get("state_dict"), module.__dict__.get("_save_to_state_dict")
    return *methods, *hooks, *module._non_persistent_buffers_set


def saves_its_tensors(module: nn.Module) -> bool:
    """Whether the module's part of a ``state_dict`` is its own tensors, as they are.

    Example:
        >>> saves_its_tensors(nn.Linear(1, 1)), saves_its_tensors(torch.jit.script(nn.ReLU()))
        (True, False)
    """
    kind = type(module)
    return (
        not isinstance(module, torch.jit.ScriptModule)
        and kind.state_dict is nn.Module.state_dict
        and "state_dict" not in module.__dict__
        and kind._save_to_state_dict is nn.Module._save_to_state_dict
        and "_save_to_state_dict" not in module.__dict__
        and not module._state_dict_hooks
        and not module._state_dict_pre_hooks
    )
