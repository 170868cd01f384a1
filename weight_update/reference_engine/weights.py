"""Receiving tensors from the trainer and writing them into the model."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby
from math import prod
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from weight_update.reference_engine.dummy import ParameterBag, read_shapes
from weight_update.reference_engine.faults import Fault, count_taken, strike
from weight_update.reference_engine.loading import Buffers
from weight_update.reference_engine.shards import Cut, Shard
from weight_update.reference_engine.sums import positional_sums

_log = logging.getLogger("reference_engine.weights")


@dataclass(frozen=True)
class Announcement:
    """What one update request says will be broadcast."""

    names: Sequence[str]
    dtypes: Sequence[str]
    shapes: Sequence[Sequence[int]]
    flattened: bool = False

    def matched(self) -> Announcement:
        """Return it with lists of equal length.

        Raises:
            ValueError: A bucket is empty or has lists of unequal length. Without a bucket they
                are cut to the shortest, as the real server does.
        """
        counts = [len(self.names), len(self.dtypes), len(self.shapes)]
        least = min(counts)
        if self.flattened and (not least or least < max(counts)):
            raise ValueError(f"a bucket needs names, dtypes and shapes, as many of each: {counts}")
        return self.first(least)

    def first(self, count: int) -> Announcement:
        """Return what is said of the first ``count`` tensors."""
        names, dtypes, shapes = self.names[:count], self.dtypes[:count], self.shapes[:count]
        return Announcement(names, dtypes, shapes, self.flattened)


# A name, the shape that was announced for it, and its elements in one row.
Arrival = tuple[str, Sequence[int], torch.Tensor]


class Inbox:
    """A group to receive on, and the buffers that its tensors arrive in."""

    def __init__(self, group: Any, device: torch.device) -> None:
        self.group = group
        self.buffers = Buffers(device)

    def receive(self, announced: Announcement, faults: Sequence[Fault] = ()) -> list[Arrival]:
        """Take part in the broadcasts that ``announced`` calls for.

        Raises:
            Exception: Whatever goes wrong; the model is untouched then.
        """
        announced = announced.matched()
        count = count_taken(faults, len(announced.names))
        announced = announced.first(count)
        runs, size = _runs(announced)
        buffer = self.buffers.take(size)
        rows = [row for run in runs for row in run.rows(buffer)]
        arrivals = [buffer[:size]] if announced.flattened else list(rows)
        arrivals += [torch.empty_like(rows[-1]) for _ in range(count - len(rows))]
        # All are posted before the first is waited for.
        works = [dist.broadcast(row, src=0, group=self.group, async_op=True) for row in arrivals]
        strike(faults, "after_receive", 0, len(rows))
        for done, work in enumerate(works, start=1):
            work.wait()
            strike(faults, "after_receive", len(rows) if announced.flattened else done, len(rows))
        return list(zip(announced.names, announced.shapes, rows, strict=True))


@dataclass(frozen=True)
class _Run:
    """Neighbours of one dtype in the buffer, which one call cuts apart."""

    dtype: torch.dtype
    start: int
    lengths: list[int]

    @property
    def end(self) -> int:
        return self.start + sum(self.lengths) * self.dtype.itemsize

    def rows(self, buffer: torch.Tensor) -> Sequence[torch.Tensor]:
        return torch.split(buffer[self.start : self.end].view(self.dtype), self.lengths)


def _runs(announced: Announcement) -> tuple[list[_Run], int]:
    """Return where the tensors lie in the buffer and its size in bytes, or raise before joining.

    A bucket has no gaps; tensors that come one by one may lie anywhere.
    """
    lengths = [_length(shape) for shape in announced.shapes]
    runs: list[_Run] = []
    done = end = 0
    for text, alike in groupby(announced.dtypes):
        dtype, count = getattr(torch, text), len(list(alike))
        gap = -end % dtype.itemsize
        if gap and announced.flattened:
            raise ValueError(f"{announced.names[done]}: offset {end} does not fit {text}")
        runs.append(_Run(dtype, end + gap, lengths[done : done + count]))
        done, end = done + count, runs[-1].end
    return runs, end


def _length(shape: Sequence[int]) -> int:
    if min(shape, default=0) < 0:
        raise ValueError(f"{list(shape)} is no shape")
    return prod(shape)


@dataclass(frozen=True)
class Slot:
    """Where the tensor of one name goes.

    Args:
        shape: Shape of the whole tensor.
        place: The parameter, in one row if the whole tensor goes into it.
        cut: Dimension, start and length of the part that goes into it; None for all.
    """

    shape: list[int]
    place: torch.Tensor
    cut: Cut | None = None

    def fits(self, shape: Sequence[int], row: torch.Tensor) -> bool:
        """Return whether nothing can go wrong when it takes the elements in ``row``."""
        return self.shape == shape and self.place.dtype is row.dtype

    def take(self, name: str, shape: Sequence[int], row: torch.Tensor) -> None:
        """Copy the elements in ``row``, or this slot's part of them.

        Raises:
            ValueError: The shape is another one.
        """
        if self.shape != shape:
            raise ValueError(
                f"{name}: attempted to load weight {list(shape)} into parameter {self.shape}"
            )
        self.place.copy_(self.part_of(shape, row))

    def part_of(self, shape: Sequence[int], row: torch.Tensor) -> torch.Tensor:
        """Return what of a whole tensor goes here."""
        return row.view(shape).narrow(*self.cut) if self.cut else row


class Weights:
    """The parameters of a model, by the names under which checkpoints know them."""

    def __init__(self, model: Any, shapes: dict[str, list[int]], shard: Shard) -> None:
        self.model = model
        self._slots = {}
        for name, parameter in model.named_parameters():
            cut, place = shard.cut(name, shapes[name]), parameter.detach()
            self._slots[name] = Slot(shapes[name], place if cut else place.view(-1), cut)
        tied = model.config.tie_word_embeddings
        self._ignored = {"lm_head.weight"} if tied else set()

    def fit(self, arrivals: Sequence[Arrival]) -> bool:
        """Return whether nothing can go wrong when they are loaded."""
        slots = self._slots
        return all(
            name not in slots or slots[name].fits(shape, row) for name, shape, row in arrivals
        )

    @torch.no_grad()
    def load(self, arrivals: Sequence[Arrival], faults: Sequence[Fault] = ()) -> None:
        """Copy what arrived into the parameters, in order; unknown names are skipped.

        Raises:
            ValueError: A shape is wrong; the tensors before it are already written.
        """
        strike(faults, "after_load", 0, len(arrivals))
        for done, (name, shape, row) in enumerate(arrivals, start=1):
            if name in self._slots:
                self._slots[name].take(name, shape, row)
            elif name not in self._ignored:
                _log.warning("Parameter %s not found in params_dict", name)
            strike(faults, "after_load", done, len(arrivals))

    @torch.no_grad()
    def take(self, arrivals: Sequence[Arrival]) -> None:
        """Copy what arrived, all of which fits, by one call: a call a tensor costs 10 us each."""
        slots, last = self._slots, {name: (shape, row) for name, shape, row in arrivals}
        for name in last.keys() - slots.keys() - self._ignored:
            _log.warning("Parameter %s not found in params_dict", name)
        known = [name for name in last if name in slots]
        rows = [slots[name].part_of(*last[name]) for name in known]
        if known:
            copy: Any = torch._foreach_copy_
            copy([slots[name].place for name in known], rows)

    def fill(self, path: Path) -> None:
        """Load the checkpoint in a directory.

        Raises:
            ValueError: It has no safetensors, or not all parameters.
        """
        from safetensors import safe_open

        missing = set(self._slots)
        for file in sorted(path.glob("*.safetensors")):
            with safe_open(file, "pt") as tensors:
                names = list(tensors.keys())
                pairs = ((name, tensors.get_tensor(name)) for name in names)
                self.load([(name, list(t.shape), t.reshape(-1)) for name, t in pairs])
                missing.difference_update(names)
        if missing:
            raise ValueError(f"{path} has no safetensors with {', '.join(sorted(missing)[:3])}")

    @torch.no_grad()
    def fill_arbitrarily(self) -> None:
        """Give the parameters small arbitrary values, as SGLang's dummy format does."""
        for slot in self._slots.values():
            slot.place.uniform_(-1e-3, 1e-3)

    def first_rows(self, name: str, count: int) -> list[Any] | None:
        """Return the first ``count`` rows of a parameter, or None if there is no such parameter."""
        try:
            rows: list[Any] = self.model.get_parameter(name)[:count].float().tolist()
        except AttributeError:
            return None
        return rows

    def checksums(self) -> dict[str, Any]:
        """Return the SHA-256 of each parameter's bytes, and which part of the tensor that is."""
        return {
            "checksums": {name: digest(_raw_bytes(s.place)) for name, s in self._slots.items()},
            "parts": {name: _part(slot.cut) for name, slot in self._slots.items()},
            "digest": "sha256",
            "dtype": str(self.model.dtype).removeprefix("torch."),
        }

    def look(self) -> dict[str, Any]:
        """Return a sum and the address of each parameter, and the memory of its GPU.

        ``peak_bytes`` is the most that this process held there since the last look.
        """
        memory = _memory(self.model.device)
        places = {name: slot.place for name, slot in self._slots.items()}
        sums = dict(zip(places, positional_sums(places.values()), strict=True))
        addresses = {name: place.data_ptr() for name, place in places.items()}
        if memory:
            torch.cuda.reset_peak_memory_stats(self.model.device)
        return {"sums": sums, "addresses": addresses, **memory}


def _memory(device: torch.device) -> dict[str, int]:
    if device.type != "cuda":
        return {}
    held = torch.cuda.memory_allocated(device)
    return {"held_bytes": held, "peak_bytes": torch.cuda.max_memory_allocated(device)}


def _part(cut: Cut | None) -> dict[str, int | None]:
    dimension, start, length = cut or (None, 0, 0)
    return {"dim": dimension, "start": start, "length": length}


def _raw_bytes(tensor: torch.Tensor) -> bytes:
    return bytes(tensor.cpu().reshape(-1).view(torch.uint8).numpy())


def digest(data: bytes) -> str:
    """Return the SHA-256 of ``data`` in hex digits."""
    return hashlib.sha256(data).hexdigest()


def load_model(
    path: Path,
    dtype: str,
    device: torch.device,
    shard: Shard,
    kind: type[Weights] = Weights,
    *,
    dummy: bool = False,
    bag: Path | None = None,
) -> Weights:
    """Load a share of a causal language model for inference from a directory.

    Args:
        path: The directory.
        dtype: Name of the torch dtype.
        device: Where the model goes.
        shard: Which share.
        kind: How it takes weights.
        dummy: Whether the values are arbitrary, so that the directory needs no weights.
        bag: A file with the shapes of parameters, which are held instead of a model.

    Raises:
        ValueError: Weights are missing, or ``bag`` holds something else than shapes.
    """
    from transformers import AutoConfig

    load_config: Callable[..., Any] = AutoConfig.from_pretrained
    config = load_config(path, local_files_only=True)
    # Without memory first: nothing is initialised only to be overwritten.
    with torch.device("meta"):
        model = _new_model(config, getattr(torch, dtype), bag)
    shapes = {name: list(parameter.shape) for name, parameter in model.named_parameters()}
    shard.divide(model)
    model = model.to_empty(device=device).eval().requires_grad_(False)
    if bag is None:
        model.tie_weights()
        # The one part that no checkpoint holds.
        model.model.rotary_emb = type(model.model.rotary_emb)(config).to(device)
    weights = kind(model, shapes, shard)
    if dummy or bag:
        weights.fill_arbitrarily()
    else:
        weights.fill(path)
    return weights


def _new_model(config: Any, dtype: torch.dtype, bag: Path | None) -> Any:
    from transformers import AutoModelForCausalLM

    if bag is not None:
        return ParameterBag(config, read_shapes(bag), dtype)
    return AutoModelForCausalLM.from_config(config, dtype=dtype)
