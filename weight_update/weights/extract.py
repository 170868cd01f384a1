"""Extraction: any source of weights becomes one flat list of dotted names and lazy values."""

from __future__ import annotations

import os
import sys
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from weight_update.errors import ConfigurationError, WeightMismatchError, some_of
from weight_update.weights.checkpoint import Checkpoint
from weight_update.weights.families.convert import as_checkpoint
from weight_update.weights.lora.entries import Changes, Entry
from weight_update.weights.lora.merge import adapter_model, merged_copy, merged_tensors
from weight_update.weights.names import bare_name, unwrap
from weight_update.weights.saved_state_dict import SavedStateDict
from weight_update.weights.shards.gather import weight_of
from weight_update.weights.shards.parts import Parts
from weight_update.weights.shards.wrapped import is_wrapped, wrapped_weights
from weight_update.weights.specs import Weight
from weight_update.weights.state import state_of

_SHOWN = 3

Metadata = Mapping[str, tuple[torch.dtype, torch.Size]]


def get_model_metadata(model: nn.Module) -> dict[str, tuple[torch.dtype, torch.Size]]:
    """Names, dtypes and shapes that an update of ``model`` sends, in send order.

    Names are those of the bare model's ``state_dict`` (parameters and persistent buffers),
    merged names for a LoRA model; tied tensors appear once, under their first name. The model
    is not touched, and nothing is copied (except that a model with a ``merge_and_unload`` of
    its own, not PEFT's, is copied to learn its names).

    Args:
        model: The training model, wrapped by DDP, ``torch.compile`` or PEFT or not.

    Returns:
        Name to (dtype, full shape).

    Raises:
        ConfigurationError: The model has no parameters.

    Example:
        >>> get_model_metadata(nn.Linear(2, 3))
        {'weight': (torch.float32, torch.Size([3, 2])), 'bias': (torch.float32, torch.Size([3]))}
    """
    specs = (weight.spec for weight in extract_weights(model))
    return {spec.name: (spec.dtype, torch.Size(spec.shape)) for spec in specs}


def extract_weights(source: Any) -> tuple[Weight, ...]:
    """The weights of a module, a mapping, a TensorDict or a checkpoint, values read later.

    Args:
        source: A module, a mapping of names to tensors, a TensorDict (nested or flat), or a
            checkpoint on disk.

    Raises:
        ConfigurationError: There is nothing in it, or it is no source of weights.
        WeightMismatchError: An entry is not a tensor.

    Example:
        >>> [weight.spec.name for weight in extract_weights({"a": torch.zeros(1)})]
        ['a']
    """
    weights = tuple(_weights_of(source))
    if not weights:
        raise ConfigurationError(
            f"{type(source).__name__} has no weights to send",
            phase="plan",
            remedy="register the training model, not a client or a wrapper without parameters",
        )
    return weights


def device_of(model: nn.Module) -> torch.device:
    """Where a model's first weight lives; nothing is read or copied.

    Raises:
        ConfigurationError: The model has no weights.
    """
    for tensor in (*model.parameters(), *model.buffers()):
        return tensor.device
    raise ConfigurationError(
        f"{type(model).__name__} has no weights to send",
        remedy="register the training model, not a client or a wrapper without parameters",
    )


def match_metadata(weights: Iterable[Weight], metadata: Metadata) -> tuple[Weight, ...]:
    """The weights that ``metadata`` announces, in its order.

    Raises:
        WeightMismatchError: Some are missing or have another dtype or shape; all are listed.
    """
    by_name = {weight.spec.name: weight for weight in weights}
    problems = [
        problem
        for name, (dtype, shape) in metadata.items()
        if (problem := _objection(name, dtype, tuple(shape), by_name.get(name)))
    ]
    if problems:
        raise WeightMismatchError(
            f"{len(problems)} weight(s) differ from the metadata: {'; '.join(problems[:20])}",
            phase="plan",
            remedy="call init_all_workers_group() again if the model changed on purpose",
        )
    return tuple(by_name[name] for name in metadata)


def _objection(
    name: str, dtype: torch.dtype, shape: tuple[int, ...], weight: Weight | None
) -> str | None:
    if weight is None:
        return f"Weight {name!r} not found in weights"
    if weight.spec.dtype != dtype:
        return f"Weight {name!r} changed dtype: {dtype} announced, {weight.spec.dtype} given"
    if weight.spec.shape != shape:
        return f"Weight {name!r} changed shape: {shape} announced, {weight.spec.shape} given"
    return None


def _weights_of(source: Any) -> Iterator[Weight]:
    if _is_tensordict(source):
        return _from_mapping(_flattened(source))
    if isinstance(source, nn.Module):
        return _from_module(unwrap(source))
    if isinstance(source, Mapping):
        return _from_mapping(source)
    if isinstance(source, (Checkpoint, SavedStateDict)):
        return iter(source.weights)
    raise ConfigurationError(
        f"weights of type {type(source).__name__} cannot be read",
        phase="plan",
        remedy=_remedy_for(source),
    )


def _remedy_for(source: Any) -> str:
    if isinstance(source, (str, os.PathLike)):
        return (
            "Checkpoint(path) opens a folder of safetensors, SavedStateDict(path) a file of "
            "torch.save(model.state_dict(), path)"
        )
    if isinstance(source, Collection) and _is_pair(next(iter(source), None)):
        return "of pairs of names and tensors, pass dict(pairs), or Stream(pairs, whole=True)"
    return (
        "pass a module, a mapping of names to tensors, a TensorDict, a Checkpoint, a "
        "SavedStateDict, an iterator of names and tensors, or a function that returns any of these"
    )


def _is_pair(item: Any) -> bool:
    return isinstance(item, (tuple, list)) and len(item) == 2


def _is_tensordict(source: Any) -> bool:
    # A TensorDict can only exist once tensordict was imported; importing it here would cost
    # every user of plain modules a second.
    tensordict = sys.modules.get("tensordict")
    return tensordict is not None and isinstance(source, tensordict.TensorDictBase)


def _flattened(source: Any) -> dict[str, Any]:
    try:
        return dict(source.flatten_keys(".").items())
    except KeyError as error:
        raise WeightMismatchError(
            f"two weights of the {type(source).__name__} have the same dotted name: {error}",
            phase="plan",
        ) from error


def _from_mapping(tensors: Mapping[str, Any]) -> Iterator[Weight]:
    wrong = {name: value for name, value in tensors.items() if not isinstance(value, torch.Tensor)}
    if wrong:
        kinds = sorted({type(value).__name__ for value in wrong.values()})
        raise WeightMismatchError(
            f"{len(wrong)} of {len(tensors)} entries are not tensors: {some_of(list(wrong))} "
            f"({', '.join(kinds[:_SHOWN])})",
            phase="plan",
            remedy=not_tensors(wrong),
        )
    for name, tensor in tensors.items():
        yield _weight(name, tensor)


def not_tensors(entries: Mapping[Any, Any]) -> str:
    """What to do about entries of a mapping, or an item of a stream, that are no tensors.

    Example:
        >>> not_tensors({"model": {"a": torch.ones(1)}, "step": 3})
        "pass the entry 'model': the weights seem to be in it"
        >>> not_tensors({"step": 3})
        'pass names and tensors alone, as model.state_dict() has them'
    """
    if "param_groups" in entries and "state" in entries:
        return "this is the state of an optimizer; pass the state_dict of the model"
    for key, value in entries.items():
        if isinstance(value, Mapping) and any(isinstance(v, torch.Tensor) for v in value.values()):
            return f"pass the entry {key!r}: the weights seem to be in it"
    if any(type(value).__module__ == "numpy" for value in entries.values()):
        return "torch.from_numpy(array) makes a tensor of an array without a copy"
    return "pass names and tensors alone, as model.state_dict() has them"


def _from_module(module: nn.Module) -> Iterator[Weight]:
    if is_wrapped(module):
        return as_checkpoint(wrapped_weights(module), module)
    base = adapter_model(module)
    if base is not None:
        return as_checkpoint(merged_weights(base), base)
    plain = merged_copy(module)
    return as_checkpoint(from_state_dict(state_of(plain)), plain)


def merged_weights(base: nn.Module) -> Iterator[Weight]:
    """The weights of a model with adapters, from what :func:`adapter_model` gives."""
    return _from_entries(merged_tensors(base))


def from_state_dict(state: Mapping[str, Any]) -> Iterator[Weight]:
    """The weights of a plain module, from what :func:`state_of` tells."""
    return _from_entries(Entry(name, value) for name, value in state.items())


def _from_entries(entries: Iterable[Entry]) -> Iterator[Weight]:
    seen: dict[object, tuple[str, Changes]] = {}
    parts = Parts()
    for name, value, computed, changes in entries:
        if not isinstance(value, torch.Tensor):
            continue  # extra state
        first, first_changes = seen.setdefault(_identity(value), (name, changes))
        if first_changes != changes:
            raise _torn(first, name)
        if first != name:
            continue  # a tied tensor that already travels under its first name
        parts.look_at(name, value)
        if computed is None:
            _refuse_packed(name, value)
        yield computed or _weight(bare_name(name), value)
    parts.refuse()


def _torn(first: str, name: str) -> ConfigurationError:
    return ConfigurationError(
        f"weights {first!r} and {name!r} are tied, and the adapters do not change them alike",
        phase="plan",
        remedy="set ensure_weight_tying=True in the LoraConfig, or keep adapters off both",
    )


def _identity(tensor: torch.Tensor) -> object:
    address = 0 if tensor.is_meta or tensor.numel() == 0 else tensor.data_ptr()
    if not address:
        return id(tensor)
    return (tensor.device, address, tensor.dtype, tensor.shape, tensor.stride())


def _weight(name: str, tensor: torch.Tensor) -> Weight:
    if not isinstance(name, str):
        raise WeightMismatchError(
            f"the name {name!r} is {type(name).__name__}, and no text",
            phase="plan",
            remedy="pass a mapping of names, such as model.state_dict(), to tensors",
        )
    if tensor.is_quantized:
        raise ConfigurationError(f"weight {name!r} is quantised; dequantise it", phase="plan")
    if tensor.layout is not torch.strided:
        raise ConfigurationError(f"weight {name!r} is {tensor.layout}, not dense", phase="plan")
    return weight_of(name, tensor)


def _refuse_packed(name: str, tensor: torch.Tensor) -> None:
    is_weight = isinstance(tensor, nn.Parameter) or name.rpartition(".")[2] == "weight"
    if is_weight and not (tensor.is_floating_point() or tensor.is_complex()):
        raise ConfigurationError(
            f"weight {name!r} is quantised: {tensor.dtype} of shape {tuple(tensor.shape)}",
            phase="plan",
            remedy="dequantise the model, or pass a mapping of the tensors that the engine loads",
        )
