"""Weights as a model family's checkpoint holds them."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from weight_update.errors import ConfigurationError
from weight_update.weights.families.experts import Shelf, split
from weight_update.weights.families.layouts import Layout, layout_of
from weight_update.weights.names import bare_name
from weight_update.weights.specs import TensorSpec, Weight

# Tables that a model computes from its configuration. Some models keep them as persistent
# buffers; no engine loads them. Buffers that hold something learned or counted (the bias of a
# router, the statistics of a batch norm) are sent.
_TABLES = re.compile(
    r"(?:^|\.)(?:(?:original_)?inv_freq|cos_cached|sin_cached|masked_bias|position_ids)$"
)
_EXPERTS = re.compile(r"(?:^|[._])(?:experts?|moe)(?:[._]|$)")


@dataclass(frozen=True)
class _Root:
    """A transformers model, and where it stands in the trainer's module.

    Attributes:
        prefix: Its path, with a dot behind it; empty for the module itself.
        kind: Its `model_type`.
        layout: None where its family has no entry.
        unsaved: Names that `save_pretrained` leaves out.
        is_new: Whether transformers 5 or later built it.
    """

    prefix: str
    kind: str
    layout: Layout | None
    unsaved: frozenset[str]
    is_new: bool


def as_checkpoint(weights: Iterable[Weight], model: nn.Module) -> Iterator[Weight]:
    """The weights under the names, and in the layout, that ``model.save_pretrained`` writes.

    Experts that transformers 5 stacks are split; the parts are views. Computed tables (rotary
    frequencies, position ids) are left out, whatever the module is.

    Args:
        weights: Under the module's own names.
        model: The module: a transformers model, one that holds some, or any other.

    Raises:
        ConfigurationError: A transformers model stacks its experts in a way not known here.

    Example:
        >>> import torch
        >>> from weight_update.weights.extract import extract_weights
        >>> tensors = {"rotary_emb.inv_freq": torch.ones(2), "weight": torch.ones(2)}
        >>> [w.spec.name for w in as_checkpoint(extract_weights(tensors), nn.Linear(1, 1))]
        ['weight']
    """
    convert = Converter(model)
    for weight in weights:
        yield from convert(weight)


class Converter:
    """Converts one weight of a model after the other, as :func:`as_checkpoint` does.

    Args:
        model: The module.
        hold: Whether a value may cost something to read: it is then kept until its last part
            was read, one at a time.
    """

    def __init__(self, model: nn.Module, *, hold: bool = True) -> None:
        self._roots = tuple(_roots(model))
        self._shelf = Shelf() if hold else None

    def __call__(self, weight: Weight) -> Iterator[Weight]:
        """What the checkpoint has in its place, nothing included."""
        name = weight.spec.name
        if _TABLES.search(name):
            return
        root = next((root for root in self._roots if name.startswith(root.prefix)), None)
        if root is None:
            yield weight
        elif name.removeprefix(root.prefix) not in root.unsaved:
            yield from _converted(weight, root, self._shelf)


def _roots(module: nn.Module, path: str = "") -> Iterator[_Root]:
    """The outermost transformers models."""
    if _is_of_transformers(module):
        yield _root(module, f"{path}." if path else "")
        return
    for name, child in module.named_children():
        yield from _roots(child, bare_name(f"{path}.{name}" if path else name))


def _is_of_transformers(module: nn.Module) -> bool:
    # Models whose code came with a checkpoint are saved under their own names.
    base = getattr(sys.modules.get("transformers.modeling_utils"), "PreTrainedModel", ())
    return isinstance(module, base) and any(
        home.__module__.startswith("transformers.models.") for home in type(module).__mro__
    )


def _root(model: nn.Module, prefix: str) -> _Root:
    config: Any = model.config
    unsaved = getattr(model, "_keys_to_ignore_on_save", None) or ()
    release = str(sys.modules["transformers"].__version__)
    return _Root(
        prefix,
        kind=str(config.model_type),
        layout=layout_of(config),
        unsaved=frozenset(map(str, unsaved)),
        is_new=int(release.partition(".")[0]) >= 5,
    )


def _converted(weight: Weight, root: _Root, shelf: Shelf | None) -> Iterator[Weight]:
    layout = root.layout or Layout()
    stack = layout.stack_of(weight.spec.name) if len(weight.spec.shape) == 3 else None
    if stack is not None:
        for part in split(weight, stack, shelf):
            yield _under_its_name(part, root.prefix, layout)
    else:
        _refuse_unknown_experts(weight.spec, root, layout)
        swapped = root.is_new and weight.spec.name.endswith(layout.swapped)
        found = _transposed(weight) if swapped else weight
        yield _under_its_name(found, root.prefix, layout)


def _under_its_name(weight: Weight, prefix: str, layout: Layout) -> Weight:
    spec = weight.spec
    name = prefix + layout.renamed(spec.name.removeprefix(prefix))
    if name == spec.name:
        return weight
    return replace(weight, spec=TensorSpec(name, spec.dtype, spec.shape))


def _transposed(weight: Weight) -> Weight:
    spec = weight.spec
    experts, rows, columns = spec.shape
    read = weight.read
    return weight.derived(
        TensorSpec(spec.name, spec.dtype, (experts, columns, rows)),
        lambda: read().transpose(1, 2),
    )


def _refuse_unknown_experts(spec: TensorSpec, root: _Root, layout: Layout) -> None:
    if len(spec.shape) != 3 or not _EXPERTS.search(spec.name):
        return
    if spec.name.endswith((*layout.kept, *layout.swapped)):
        return
    raise ConfigurationError(
        f"weight {spec.name!r} of shape {spec.shape} stacks experts, and how checkpoints of "
        f"model_type {root.kind!r} hold them is not known here",
        phase="plan",
        remedy="pass the weights as a mapping under the names that the engine loads, "
        "or push a checkpoint that save_pretrained wrote",
    )
