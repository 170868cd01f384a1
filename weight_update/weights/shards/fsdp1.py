"""FSDP1: units whose parameters lie in one flat parameter, gathered a unit at a time."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager
from functools import partial, reduce
from itertools import chain
from typing import Any

import torch
from torch import distributed, nn
from torch.distributed.fsdp import FlatParameter, FullyShardedDataParallel

from weight_update.torch_private.fsdp1 import FlatLayout, flat_layout, persistent_buffers
from weight_update.weights.names import bare_name
from weight_update.weights.shards.held import hold
from weight_update.weights.specs import TensorSpec, Weight


def weights_of(module: nn.Module) -> Iterator[Weight]:
    """Parameters and persistent buffers under the bare model's names and in its order.

    Nothing is gathered before a value is read. A tied parameter comes once, under its first
    name.
    """
    units = list(_units(module))
    owned: dict[str, list[Weight]] = {}
    for weight in chain.from_iterable(unit.weights() for unit in units):
        owned.setdefault(weight.spec.name.rpartition(".")[0], []).append(weight)
    taken = {name for unit in units for name in unit.names()}
    for path, child in module.named_modules():
        yield from owned.pop(bare_name(path), ())
        yield from _plain(bare_name(path), child, taken)


def _plain(path: str, module: nn.Module, taken: set[str]) -> Iterator[Weight]:
    """What a module holds besides the parameters of units."""
    for leaf, tensor in chain(module.named_parameters(recurse=False), persistent_buffers(module)):
        name = _joined(path, leaf)
        if name not in taken and not isinstance(tensor, FlatParameter):
            taken.add(name)
            spec = TensorSpec(name, tensor.dtype, tuple(tensor.shape))
            yield Weight(spec, tensor.device, tensor.detach)


def _units(module: nn.Module) -> Iterator[_Unit]:
    root: _Unit | None = None
    for path, child in module.named_modules():
        if isinstance(child, FullyShardedDataParallel):
            inside = root is not None and (not root.path or path.startswith(f"{root.path}."))
            unit = _Unit(path, child, flat_layout(child), root if inside else None)
            root = root if inside else unit
            yield unit


class _Unit:
    """A module whose parameters FSDP1 gathers together.

    Args:
        path: Where it stands in the trainer's module.
        module: The unit.
        layout: Its parameters.
        root: The unit that it stands in, if any.
    """

    def __init__(self, path: str, module: Any, layout: FlatLayout, root: _Unit | None) -> None:
        self.path = path
        self._module = module
        self._layout = layout
        self._root = root
        self._known_as_root = False

    def names(self) -> Iterator[str]:
        """Under which its parameters are known, tied ones each time."""
        for name in (*self._layout.shapes, *self._layout.shared):
            yield _joined(bare_name(self.path), bare_name(name))

    def weights(self) -> Iterator[Weight]:
        """Its parameters, read a unit at a time."""
        layout = self._layout
        for name, shape in layout.shapes.items():
            spec = TensorSpec(
                _joined(bare_name(self.path), bare_name(name)), layout.dtype, tuple(shape)
            )
            read = partial(self._read, name)
            yield Weight(spec, layout.device, read, collective=True, ranks=self._ranks())

    def _ranks(self) -> tuple[int, ...]:
        """Who gathers; replicas have groups of their own, so of those everybody takes part."""
        if "HYBRID" in self._module.sharding_strategy.name:
            return ()
        return tuple(sorted(distributed.get_process_group_ranks(self._module.process_group)))

    def _read(self, name: str) -> torch.Tensor:
        if self._root is not None:
            self._root.become_root()
        hold(self, self._gathered)
        value: torch.Tensor = reduce(getattr, name.split("."), self._module.module)
        return value.detach().clone()  # the unit's storage goes as soon as another is read

    def become_root(self) -> None:
        """The unit that is gathered first takes itself for the root, and then nobody else can."""
        if not self._known_as_root:
            with self._gathered():
                pass

    def _gathered(self) -> AbstractContextManager[Any]:
        self._known_as_root = True
        context: AbstractContextManager[Any] = FullyShardedDataParallel.summon_full_params(
            self._module, recurse=False, writeback=False
        )
        return context


def _joined(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name
