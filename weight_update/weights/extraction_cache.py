"""Extraction that does its work again only after the model's tensors changed."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from weight_update.torch_private.modules import saves_its_tensors
from weight_update.weights.extract import extract_weights, from_state_dict
from weight_update.weights.families.convert import Converter
from weight_update.weights.lora.known import KnownAdapted, known_adapted
from weight_update.weights.lora.merge import is_plain, merges_itself
from weight_update.weights.marks import Marks
from weight_update.weights.names import bare_name, unwrap
from weight_update.weights.owned import ORDINARY, Owned, owned
from weight_update.weights.shards.gather import is_shard
from weight_update.weights.shards.wrapped import is_wrapped
from weight_update.weights.specs import Lasting, Weight
from weight_update.weights.state import state_of


class ExtractionCache:
    """Extracts weights, and remembers what it found out about the last module.

    A module whose tensors have the same names, dtypes, shapes and places in memory as before
    costs one look at each of them, and so does one with LoRA adapters that are active, scaled
    and merged as before. No tensor of a module is referred to between updates: a trainer may
    replace, swap and free its tensors as if nobody had looked at them. Models with other adapters,
    with a ``state_dict`` of their own or hooks on it, sharded ones and mappings are extracted anew
    each time.

    Example:
        >>> cache = ExtractionCache()
        >>> [weight.spec.name for weight in cache.extract(nn.Linear(1, 1))]
        ['weight', 'bias']
    """

    def __init__(self) -> None:
        self._known: _Known | KnownAdapted | None = None
        self._seen: Callable[[], nn.Module | None] = _nothing

    def extract(self, source: Any) -> tuple[Weight, ...]:
        """As :func:`extract_weights`."""
        if not isinstance(source, nn.Module):
            return extract_weights(source)
        module = unwrap(source)
        known = self._known  # another thread may extract another model meanwhile
        if known is None or not known.holds_for(module):
            known = self._known_again(module)
        # What is first sent holds its tensors, so that a model that nobody keeps can be sent.
        return extract_weights(module) if known is None else known.weights

    def _known_again(self, module: nn.Module) -> _Known | KnownAdapted | None:
        """What is remembered of a module that comes again.

        Of one that comes for the first time it is nothing: it may be the last, and 20,000 tensors
        would take 25 MB beside the weights that are sent.
        """
        again = self._seen() is module
        self._seen = weakref.ref(module)
        found = (_known(module) or known_adapted(module)) if again else None
        self._known = found if found is not None and found.holds_for(module) else None
        return self._known


def _nothing() -> None:
    """Nothing was extracted yet."""


@dataclass(frozen=True)
class _Known:
    """A model that was extracted.

    Attributes:
        module: Itself.
        marks: What its weights were found by.
        weights: What is sent, read from whoever owns it.
    """

    module: Callable[[], nn.Module | None]
    marks: Marks
    weights: tuple[Weight, ...]

    def holds_for(self, module: nn.Module) -> bool:
        return self.module() is module and not merges_itself(module) and self.marks.hold_for(module)


def _known(module: nn.Module) -> _Known | None:
    """What to remember; None where marks do not tell all."""
    if is_wrapped(module) or not is_plain(module) or not _saves_its_tensors(module):
        return None
    state = state_of(module)
    owners = {bare_name(name): own for name in state if (own := owned(module, name))}
    if not state or len(owners) < len(state):
        return None
    if not all(map(_is_read_by, owners.values(), state.values())):
        return None
    convert = Converter(module, hold=False)  # all values are views
    weights = (_by_owner(weight, owners[weight.spec.name]) for weight in from_state_dict(state))
    sent = Lasting(part for weight in weights for part in convert(weight))
    return _Known(weakref.ref(module), Marks.of(module), sent)


def _saves_its_tensors(module: nn.Module) -> bool:
    return all(map(saves_its_tensors, module.modules()))


def _is_read_by(own: Owned, value: Any) -> bool:
    """Whether whoever owns a value tells it, and its place tells the rest."""
    ordinary = type(value) in ORDINARY and not is_shard(value)
    return ordinary and own.tells(value)


def _by_owner(weight: Weight, own: Owned) -> Weight:
    return replace(weight, read=own.read, rows=own.rows if weight.spec.shape else None)
