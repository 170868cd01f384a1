"""Names as the bare model has them: wrappers of the trainer leave no trace in them."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

from torch import nn

from weight_update.errors import ConfigurationError

# Attribute names under which torch's own wrappers keep the module they wrap. `module` is not
# among them: models have true children of that name, so DDP is recognised by its class.
_INFIXES = frozenset({"_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module"})
_VALUE_HEADS = frozenset({"v_head", "value_head", "critic", "critic_head"})


def unwrap(module: nn.Module) -> nn.Module:
    """The trained model inside wrappers and policy classes, in any nesting.

    Looked through are DDP, DataParallel, ``torch.compile``, activation checkpointing, the
    modules of tensordict and the actor-critics of torchrl. A class that holds one transformers
    model, and nothing else with weights but a value head, is such a wrapper too; a trunk and a
    head that it holds apart are put together again.

    Raises:
        ConfigurationError: It holds several language models, and any of them may be meant.

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
    if _is_language_model(module):
        return None
    inner = _wrapped(module)
    if inner is None:
        inner = _policy(module)
    return _held(module) if inner is None else inner


def _wrapped(module: nn.Module) -> nn.Module | None:
    """What a wrapper of torch, or an actor-critic of torchrl, has inside."""
    if isinstance(module, _DATA_PARALLEL) or _is_a(module, _DEEPSPEED):
        wrapper: Any = module
        wrapped: nn.Module = wrapper.module
        return wrapped
    if _is_a(module, _ACTOR_CRITICS):
        actor_critic: Any = module
        policy: nn.Module = actor_critic.get_policy_operator()
        return policy
    # By the registered children: a class that passes attributes on would show another's.
    children = dict(module.named_children())
    return children.get("_orig_mod", children.get("_checkpoint_wrapped_module"))


def _policy(module: nn.Module) -> nn.Module | None:
    """The language model that ``module`` holds, if nothing else in it has weights."""
    models: dict[str, nn.Module] = {}
    others: list[nn.Module] = []
    for name, part in _parts(module, "", {module}):
        if _is_language_model(part):
            models[name] = part
        else:
            others.append(part)
        if len(others) > 1:  # it is a model of its own
            return None
    if len(models) > 1:
        models = _outermost(models)
    if others:
        return _together(list(models.values()), others[0])
    if len(models) > 1:
        raise _ambiguous(module, models)
    return next(iter(models.values()), None)


def _parts(module: nn.Module, name: str, seen: set[nn.Module]) -> Iterator[tuple[str, nn.Module]]:
    """Language models inside, and modules that have weights themselves; no value heads."""
    if _is_language_model(module) or _has_own_weights(module):
        yield name, module
    if _is_language_model(module):
        return
    for key, registered in module.named_children():
        child = _without_wrappers(registered)
        if child in seen:
            continue
        seen.add(child)
        parts = _parts(child, f"{name}.{key}" if name else key, seen)
        yield from _without_head(parts) if _is_value_head(key, child) else parts


def _without_wrappers(module: nn.Module) -> nn.Module:
    inside = _wrapped(module)
    return module if inside is None else _without_wrappers(inside)


def _without_head(parts: Iterator[tuple[str, nn.Module]]) -> Iterator[tuple[str, nn.Module]]:
    """Nothing, unless what is called a head is a language model, which may be the policy."""
    found = list(parts)
    return iter(found if any(_is_language_model(part) for _, part in found) else ())


def _is_value_head(name: str, module: nn.Module) -> bool:
    one_number = isinstance(module, nn.Linear) and module.out_features == 1
    return one_number or name in _VALUE_HEADS or _is_a(module, _VALUE_OPERATORS)


def _has_own_weights(module: nn.Module) -> bool:
    own = (module.parameters(recurse=False), module.buffers(recurse=False))
    return any(next(tensors, None) is not None for tensors in own)


def _outermost(models: dict[str, nn.Module]) -> dict[str, nn.Module]:
    """Without those that are a part of another: a base model beside its own PEFT model."""
    inner = {part for model in models.values() for part in model.modules() if part is not model}
    return {name: model for name, model in models.items() if model not in inner}


def _ambiguous(module: nn.Module, models: dict[str, nn.Module]) -> ConfigurationError:
    candidates = ", ".join(f"{name} ({type(model).__name__})" for name, model in models.items())
    return ConfigurationError(
        f"{type(module).__name__} holds {len(models)} language models: {candidates}",
        phase="plan",
        remedy=f"pass the one that the engines serve, such as its .{next(iter(models))}; if all of "
        "it is one model, pass a mapping with the engine's names",
    )


class _Together(nn.Module):
    """A causal language model of a trunk and a head, with the names that transformers gives."""

    def __init__(self, trunk: Any, head: nn.Linear) -> None:
        super().__init__()
        self.config = trunk.config
        self.add_module(trunk.base_model_prefix, trunk)
        self.lm_head = head


def _together(models: list[nn.Module], other: nn.Module) -> nn.Module | None:
    """A trunk without a head, and the head beside it, as the one model that they are."""
    if len(models) != 1 or not isinstance(other, nn.Linear):
        return None
    trunk: Any = models[0]
    headless = getattr(trunk, "base_model", None) is trunk
    if not headless or not trunk.base_model_prefix:
        return None
    embedding = trunk.get_input_embeddings()
    if other.out_features != getattr(embedding, "num_embeddings", None):
        return None
    return _Together(trunk, other)


def _held(module: nn.Module) -> nn.Module | None:
    """What tensordict's modules hold, if only one module in them has weights."""
    if not _is_a(module, _TENSORDICT_MODULES) or _has_own_weights(module):
        return None
    held = module
    while held is module or isinstance(held, nn.ModuleList):
        children = [c for c in held.children() if next(c.parameters(), None) is not None]
        if len(children) != 1:
            return None
        held = children[0]
    return held


# Classes by the module that has them: instances can only exist once it was imported, and
# importing it here would cost seconds.
_LANGUAGE_MODELS = (
    ("transformers.modeling_utils", "PreTrainedModel"),
    ("peft.peft_model", "PeftModel"),
)
_DATA_PARALLEL = (nn.parallel.DistributedDataParallel, nn.DataParallel)
_DEEPSPEED = (("deepspeed", "DeepSpeedEngine"),)
_FSDP = (("torch.distributed.fsdp", "FullyShardedDataParallel"),)
_TENSORDICT_MODULES = (
    ("tensordict.nn", "TensorDictModule"),
    ("tensordict.nn", "TensorDictModuleWrapper"),
)
_ACTOR_CRITICS = (
    ("torchrl.modules", "ActorValueOperator"),
    ("torchrl.modules", "ActorCriticWrapper"),
)
_VALUE_OPERATORS = (("torchrl.modules", "ValueOperator"),)


def _is_a(module: nn.Module, classes: tuple[tuple[str, str], ...]) -> bool:
    return any(
        isinstance(module, getattr(sys.modules[home], name, ()))
        for home, name in classes
        if home in sys.modules
    )


def _is_language_model(module: nn.Module) -> bool:
    if _is_a(module, _FSDP):
        # It stays around its model: it alone knows where the shards are.
        sharded: Any = module
        return _is_language_model(unwrap(sharded.module))
    return isinstance(module, _Together) or _is_a(module, _LANGUAGE_MODELS)
