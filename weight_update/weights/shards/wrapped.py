"""Modules whose parameters only their wrapper can tell."""

from __future__ import annotations

import sys
from collections.abc import Iterator

from torch import nn

from weight_update.errors import ConfigurationError
from weight_update.weights.specs import Weight

_FSDP1 = "torch.distributed.fsdp.fully_sharded_data_parallel"
_FSDP2 = "torch.distributed.fsdp"


def is_wrapped(module: nn.Module) -> bool:
    """Whether FSDP1 holds parameters of it: a walk over them, or their ``state_dict``, misleads."""
    wrapper = getattr(sys.modules.get(_FSDP1), "FullyShardedDataParallel", None)
    return wrapper is not None and any(isinstance(child, wrapper) for child in module.modules())


def is_gathered(source: object) -> bool:
    """Whether FSDP2 shards it: after a forward pass without a backward one, no tensor shows it."""
    sharded = getattr(sys.modules.get(_FSDP2), "FSDPModule", None)
    if sharded is None or not isinstance(source, nn.Module):
        return False
    return any(isinstance(child, sharded) for child in source.modules())


def wrapped_weights(module: nn.Module) -> Iterator[Weight]:
    """The weights of such a module, under the bare model's names.

    Raises:
        ConfigurationError: There are adapters in it.
    """
    from weight_update.weights.lora.layers import is_tuner_layer
    from weight_update.weights.shards import fsdp1

    if any(is_tuner_layer(child) for child in module.modules()):
        raise ConfigurationError(
            "LoRA adapters inside FSDP1 cannot be merged: it keeps base and adapters in one flat "
            "parameter",
            phase="plan",
            remedy="use FSDP2 (fully_shard), or pass the merged weights as a mapping",
        )
    return fsdp1.weights_of(module)
