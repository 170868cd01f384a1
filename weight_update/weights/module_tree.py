"""What a module is made of, read at C speed: the one place that knows torch's private names of it.

``state_dict()`` costs 4 us a tensor, of which most is building names that were built before; a
mixture of experts would spend longer on it than on moving its weights between two GPUs.
"""

from __future__ import annotations

from torch import Tensor, nn

Signature = list[str | int]

_PARAMETERS, _BUFFERS, _NOT_PERSISTENT, _CHILDREN, _ABSENT, _HOOKS = range(6)


def has_plain_state_dict(module: nn.Module) -> bool:
    """Whether its ``state_dict()`` is what it is made of: no hooks, no methods of its own.

    Example:
        >>> has_plain_state_dict(nn.Sequential(nn.Linear(1, 1)))
        True
    """
    return all(
        type(node).state_dict is nn.Module.state_dict
        and type(node)._save_to_state_dict is nn.Module._save_to_state_dict
        and not _hooks(node)
        for node in module.modules()
    )


def _hooks(node: nn.Module) -> int:
    return len(node._state_dict_hooks) + len(node._state_dict_pre_hooks)


def flatten(module: nn.Module) -> tuple[Signature, list[Tensor | None]]:
    """The names of a module's tensors and children in a fixed order, and the tensors.

    Two trees of one signature give their tensors the same full names.

    Args:
        module: The root.

    Returns:
        Local names, with the kind of those before it after each group, and the tensors; None
        for one that a module names but does not have.

    Example:
        >>> signature, tensors = flatten(nn.Linear(2, 3, bias=False))
        >>> signature, [None if tensor is None else tensor.shape for tensor in tensors]
        (['weight', 'bias', 0], [torch.Size([3, 2]), None])
    """
    signature: Signature = []
    tensors: list[Tensor | None] = []
    stack: list[nn.Module | None] = [module]
    while stack:
        node = stack.pop()
        if node is None:
            signature.append(_ABSENT)
            continue
        signature += node._parameters
        signature.append(_PARAMETERS)  # always, so that it ends the module before
        tensors += node._parameters.values()
        if node._state_dict_hooks or node._state_dict_pre_hooks:
            signature += (_hooks(node), _HOOKS)
        if node._buffers:
            signature += (*node._buffers, _BUFFERS)
            signature += (*node._non_persistent_buffers_set, _NOT_PERSISTENT)
            tensors += node._buffers.values()
        if node._modules:
            signature += (*node._modules, _CHILDREN)
            stack += node._modules.values()
    return signature, tensors
