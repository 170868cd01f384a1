"""Names as the bare model has them: wrappers of the trainer leave no trace in them."""

from __future__ import annotations

import sys

from torch import nn

# Attribute names under which torch's own wrappers keep the module they wrap. `module` is not
# among them: models have true children of that name, so DDP is recognised by its class.
_INFIXES = frozenset({"_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module"})


def unwrap(module: nn.Module) -> nn.Module:
    """The trained module inside ``torch.compile``, DDP and DataParallel, in any nesting.

    A policy class that does nothing but hold one transformers model is such a wrapper too.

    Example:
        >>> inner = nn.Linear(1, 1)
        >>> unwrap(nn.DataParallel(inner)) is inner
        True
    """
    inner = _inner(module)
    return module if inner is None else unwrap(inner)


def bare_name(name: str) -> str:
    """A state-dict name without the infixes of wrapped sub-modules.

    Example:
        >>> bare_name("layers.0._orig_mod.mlp._checkpoint_wrapped_module.weight")
        'layers.0.mlp.weight'
    """
    if "_" not in name:
        return name
    return ".".join(part for part in name.split(".") if part not in _INFIXES)


def _inner(module: nn.Module) -> nn.Module | None:
    if isinstance(module, (nn.parallel.DistributedDataParallel, nn.DataParallel)):
        wrapped: nn.Module = module.module
        return wrapped
    compiled = getattr(module, "_orig_mod", None)
    return compiled if isinstance(compiled, nn.Module) else _held_model(module)


def _held_model(module: nn.Module) -> nn.Module | None:
    """The language model that ``module`` holds, if nothing else in it has weights."""
    own = (*module.parameters(recurse=False), *module.buffers(recurse=False))
    children = [child for child in module.children() if next(child.parameters(), None) is not None]
    if own or len(children) != 1 or _is_language_model(module):
        return None
    held = unwrap(children[0])
    return held if _is_language_model(held) else None


def _is_language_model(module: nn.Module) -> bool:
    # Such a model can only exist once its library was imported.
    homes = (("transformers.modeling_utils", "PreTrainedModel"), ("peft.peft_model", "PeftModel"))
    return any(
        isinstance(module, getattr(sys.modules[home], name, ()))
        for home, name in homes
        if home in sys.modules
    )
