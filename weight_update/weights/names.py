"""Names as the bare model has them: wrappers of the trainer leave no trace in them."""

from __future__ import annotations

from torch import nn

# Attribute names under which torch's own wrappers keep the module they wrap. `module` is not
# among them: models have true children of that name, so DDP is recognised by its class.
_INFIXES = frozenset({"_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module"})


def unwrap(module: nn.Module) -> nn.Module:
    """The trained module inside ``torch.compile``, DDP and DataParallel, in any nesting.

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
    return compiled if isinstance(compiled, nn.Module) else None
