"""What a collector hands to a scheme: which weights are meant, and which can't be sent."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from itertools import chain
from operator import attrgetter
from typing import Any

import torch
from tensordict import TensorDictBase
from torch import nn

from weight_update.errors import ConfigurationError, WeightUpdateError


def has_weights(model: Any) -> bool:
    """Whether it is a module with parameters."""
    return isinstance(model, nn.Module) and any(True for _ in model.parameters())


def are_given(weights: Any) -> bool:
    """Whether a collector was given weights; what it extracts of a client is empty."""
    if isinstance(weights, TensorDictBase):
        return not weights.is_empty()
    if isinstance(weights, Mapping):
        return bool(weights)
    return weights is not None and not isinstance(weights, str)


def model_in(collector: Any, model_id: str) -> nn.Module | None:
    """The model of a collector that has weights to send, if there is one.

    Args:
        collector: It may have none, or be None.
        model_id: Where it stands in the collector, as TorchRL names it: ``"policy"``, or
            attributes in a row (``"env.value_net"``).
    """
    with suppress(AttributeError):
        model = attrgetter(model_id)(collector)
        return model if has_weights(model) else None
    return None


def named_in(collector: Any, name: str) -> nn.Module:
    """The model that stands under a name in a collector.

    Raises:
        ConfigurationError: It has none of that name with weights.
    """
    model = model_in(collector, name)
    if model is None:
        raise ConfigurationError(
            f"there are no weights to send: {type(collector).__name__} has no model with "
            f"parameters under {name!r}",
            phase="plan",
            remedy="pass the module or its weights, or nothing for the registered model",
        )
    return model


def gone_model() -> WeightUpdateError:
    """What is raised where the registered model is no more: nothing else is sent in its place."""
    return WeightUpdateError(
        "Model reference is no longer valid: the registered model was garbage-collected",
        phase="plan",
        remedy="keep the model alive, and register it again after replacing it",
    )


def is_extracted_from(weights: Any, model: nn.Module) -> bool:
    """Whether a mapping holds all parameters of a model, as they are.

    Example:
        >>> layer = nn.Linear(1, 1)
        >>> is_extracted_from(layer.state_dict(), layer)
        True
        >>> is_extracted_from({"bias": layer.bias}, layer)
        False
    """
    flat = weights.flatten_keys(".") if isinstance(weights, TensorDictBase) else weights
    if not isinstance(flat, (Mapping, TensorDictBase)):
        return False
    return all(_is_same(flat.get(name, None), held) for name, held in model.named_parameters())


def refuse_one_a_worker(weights: Any) -> None:
    """Raises ConfigurationError for weights that TorchRL would hand to one worker each."""
    if isinstance(weights, dict) and any(isinstance(key, int) for key in weights):
        raise ConfigurationError(
            "there are weights for each worker, and one set of servers that all sample from",
            phase="plan",
            remedy="send one model",
        )


def refuse_unknown_workers(worker_ids: Any, workers: int) -> None:
    """Raises ConfigurationError for the number of a worker that there is not.

    Args:
        worker_ids: A number, several, or None for all.
        workers: How many there are.
    """
    named = [] if worker_ids is None else worker_ids
    unknown = set([named] if isinstance(named, int) else named) - set(range(workers))
    if unknown:
        raise ConfigurationError(
            f"there is no worker {sorted(unknown)[0]}: there are {workers}, counted from 0",
            phase="plan",
            remedy="leave worker_ids= out; all workers sample from the same servers",
        )


def refuse_stand_in(collector: Any) -> None:
    """Raises ConfigurationError if the workers would get a policy without its values."""
    policy = getattr(collector, "policy", None)
    if any(getattr(collector, "policy_factory", None) or ()) or not isinstance(policy, nn.Module):
        return
    if any(True for _ in chain(policy.parameters(), policy.buffers())):
        raise ConfigurationError(
            f"the {type(policy).__name__} has parameters or buffers, and TorchRL would hand a "
            f"stand-in on the meta device to the workers of {type(collector).__name__}: it has no "
            "values, and servers get the weights, not workers",
            remedy="pass policy_factory=, a function that makes the policy in each worker; policy= "
            "may stand beside it, as the model whose weights are sent",
        )


def _is_same(weight: Any, held: torch.Tensor) -> bool:
    if weight is held:
        return True
    plain = (torch.Tensor, nn.Parameter)
    if type(weight) not in plain or type(held) not in plain or weight.shape != held.shape:
        return False
    return bool(weight.data_ptr() == held.data_ptr())
