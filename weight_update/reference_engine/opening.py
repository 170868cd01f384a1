"""Opening tensors that a trainer on the same host has shared, in the pickles that SGLang takes."""

from __future__ import annotations

import base64
import io
import pickle
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch.multiprocessing import reductions

from weight_update.reference_engine.faults import Fault, count_taken, strike
from weight_update.reference_engine.weights import Arrival


@dataclass
class Place:
    """Where one tensor lies in a flat bucket, by bytes; SGLang's ``FlattenedTensorMetadata``."""

    name: str
    shape: Sequence[int]
    dtype: torch.dtype
    start_idx: int
    end_idx: int
    numel: int


def _rebuild_on_gpu(*arguments: Any) -> torch.Tensor:
    """What torch does, for a GPU that is named by its UUID."""
    before, device, after = arguments[:6], arguments[6], arguments[7:]
    known: Any = torch.cuda
    indices = range(known.device_count())
    uuids = {str(known.get_device_properties(index).uuid): index for index in indices}
    if isinstance(device, str) and device not in uuids:
        raise RuntimeError(f"Invalid device_uuid={device}")
    rebuild: Any = reductions.rebuild_cuda_tensor
    opened: torch.Tensor = rebuild(*before, uuids.get(device, device), *after)
    return opened


_REDUCTIONS = "torch.multiprocessing.reductions"
_KNOWN: dict[tuple[str, str], Any] = {
    **{
        (_REDUCTIONS, name): getattr(reductions, name)
        for name in dir(reductions)
        if name in ("rebuild_tensor", "rebuild_typed_storage", "rebuild_storage_filename")
    },
    (_REDUCTIONS, "rebuild_cuda_tensor"): _rebuild_on_gpu,
    ("sglang.srt.utils.patch_torch", "_rebuild_cuda_tensor_modified"): _rebuild_on_gpu,
    ("sglang.srt.weight_sync.tensor_bucket", "FlattenedTensorMetadata"): Place,
    ("torch", "Size"): torch.Size,
    ("torch", "Tensor"): torch.Tensor,
    ("torch.storage", "TypedStorage"): torch.storage.TypedStorage,
    ("torch.storage", "UntypedStorage"): torch.UntypedStorage,
    **{
        ("torch", name): kind for name, kind in vars(torch).items() if isinstance(kind, torch.dtype)
    },
}


class Unpickler(pickle.Unpickler):
    """Makes what is on the list, and nothing else."""

    def find_class(self, module: str, name: str) -> Any:
        """Return what a pickle names.

        Raises:
            RuntimeError: It is not on the list.
        """
        if (module, name) not in _KNOWN:
            raise RuntimeError(
                f"Blocked unsafe global ({module}.{name}) during pickle deserialization"
            )
        return _KNOWN[module, name]


def open_tensors(entry: str, load_format: str | None, faults: Sequence[Fault]) -> list[Arrival]:
    """Open one rank's entry of a request.

    The memory stays open as long as any of the arrivals lives; on a GPU, closing it waits for
    what was asked of it.

    Raises:
        Exception: It cannot be opened; no weight was touched.
    """
    payload = Unpickler(io.BytesIO(base64.b64decode(entry, validate=True))).load()
    if load_format == "flattened_bucket":
        opened = _cut(payload["flattened_tensor"], payload["metadata"])
    elif load_format is None:
        opened = [(name, list(tensor.shape), tensor.reshape(-1)) for name, tensor in payload]
    else:
        raise NotImplementedError(f"Unknown load_format={load_format}")
    strike(faults, "after_receive", 0, len(opened))
    opened = opened[: count_taken(faults, len(opened))]
    strike(faults, "after_receive", len(opened), len(opened))
    return opened


def _cut(buffer: torch.Tensor, places: Sequence[Place]) -> list[Arrival]:
    rows = [row for run in _runs(places) for row in _rows(buffer, run)]
    named = zip(places, rows, strict=True)
    return [(place.name, list(place.shape), row) for place, row in named]


def _runs(places: Sequence[Place]) -> Iterator[list[Place]]:
    """Yield neighbours of one dtype that lie side by side: one call cuts them apart."""
    run: list[Place] = []
    for place in places:
        if run and (place.dtype is not run[0].dtype or place.start_idx != run[-1].end_idx):
            yield run
            run = []
        run.append(place)
    if run:
        yield run


def _rows(buffer: torch.Tensor, run: Sequence[Place]) -> Sequence[torch.Tensor]:
    """Return the elements of each tensor.

    Raises:
        RuntimeError: A shape has other bytes than its place.
    """
    whole = buffer[run[0].start_idx : run[-1].end_idx].view(run[0].dtype)
    lengths = [prod(place.shape) for place in run]
    wrong = [p.name for p, n in zip(run, lengths, strict=True) if n * p.dtype.itemsize != _size(p)]
    if wrong:
        raise RuntimeError(f"the shape of {wrong[0]} is invalid for its place in the buffer")
    return torch.split(whole, lengths)


def _size(place: Place) -> int:
    return place.end_idx - place.start_idx
