"""What ranks that pack the same buckets say to each other: how to plan, and where the bytes lie."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from hashlib import sha256
from typing import Any

import torch

from weight_update.facts import Intake
from weight_update.options import UpdateOptions
from weight_update.update.planning import planned
from weight_update.update.protocols import Packer
from weight_update.weights.buckets import Bucket, Plan
from weight_update.weights.cargo import Format, SharedMemory, SharedTensor, Terms
from weight_update.weights.fitting import Wishes, common, fit
from weight_update.weights.specs import Weight

# What of an engine's intake decides which bytes it gets.
_DECIDING = ("dtype", "vocabulary", "quantization", "block", "scaled", "unconverted", "requantises")


def wishes_of(options: UpdateOptions) -> Wishes:
    """What the user asked for, less what the leader alone looks at."""
    return Wishes(options.dtype, options.trim_vocabulary)


def recipe_of(chosen: Format, terms: Terms, options: UpdateOptions) -> dict[str, Any]:
    """How others plan what this rank has planned, as a message can hold it."""
    intake = common(terms.intakes, wishes_of(options))
    facts = {name: _plain(getattr(intake, name)) for name in _DECIDING}
    size = terms.limited(chosen).bucket_bytes
    return {"bucket_bytes": size, "ranks": terms.ranks, "intake": facts}


def plan_by(
    recipe: Mapping[str, Any], weights: Sequence[Weight], options: UpdateOptions, packer: Packer
) -> Plan:
    """The plan of the rank that told the recipe, made of this rank's weights.

    Args:
        recipe: As told.
        weights: What this rank extracted.
        options: The same as the other's.
        packer: Of this rank.

    Example:
        >>> plan_by({"empty": 2}, (), UpdateOptions(), None).requests
        2
    """
    if "empty" in recipe:
        return Plan((Bucket(()),) * recipe["empty"])
    facts = {name: _hashable(value) for name, value in recipe["intake"].items()}
    scaled = facts["scaled"]
    intake = Intake(**{**facts, "scaled": None if scaled is None else frozenset(scaled)})
    fits = fit(weights, intake, wishes_of(options), whole=True)
    terms = Terms(recipe["bucket_bytes"], ranks=recipe["ranks"])
    return planned(fits, options, lambda _: packer.format([w.spec for w in fits], terms))


def digest_of(bucket: Bucket) -> str:
    """Equal for buckets of the same names, dtypes and shapes in the same order."""
    lines = (f"{spec.name} {spec.dtype_name} {spec.shape}\n" for spec in bucket.specs)
    return sha256("".join(lines).encode()).hexdigest()


def told(shared: Sequence[SharedTensor]) -> dict[str, Any]:
    """Where shared tensors lie, as a message can hold it."""
    memories = list(dict.fromkeys(tensor.memory for tensor in shared))
    numbers = {memory: index for index, memory in enumerate(memories)}
    rows = [
        (numbers[t.memory], str(t.dtype).removeprefix("torch."), t.shape, t.offset) for t in shared
    ]
    return {"memories": [(m.device, m.plain_opening, m.nbytes) for m in memories], "tensors": rows}


def heard(message: Mapping[str, Any]) -> tuple[SharedTensor, ...]:
    """The shared tensors that a message tells of.

    Example:
        >>> memory = SharedMemory("GPU-1", (b"handle", 4, None), 4)
        >>> heard(told([SharedTensor(memory, torch.uint8, (4,))]))[0].memory == memory
        True
    """
    memories = [
        SharedMemory(device, tuple(map(_read, opening)), nbytes)
        for device, opening, nbytes in message["memories"]
    ]
    return tuple(
        SharedTensor(memories[number], getattr(torch, dtype), tuple(shape), offset)
        for number, dtype, shape, offset in message["tensors"]
    )


def _read(part: Any) -> Any:
    return bytes.fromhex(part["hex"]) if isinstance(part, dict) else part


def _plain(value: Any) -> Any:
    return sorted(value) if isinstance(value, frozenset) else value


def _hashable(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value
