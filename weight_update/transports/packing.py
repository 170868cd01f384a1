"""Packing: the values of weights, as the bytes of one buffer, on a stream of its own."""

from __future__ import annotations

from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import closing, contextmanager
from itertools import islice, repeat, tee
from typing import Any

import torch

from weight_update.errors import WeightMismatchError
from weight_update.weights.reading import read_in_turn
from weight_update.weights.specs import Weight

# Thousands of small tensors cost a call each, on the CPU as on the GPU, so they are written in
# runs; a run's values exist together, which bounds what merged weights may take.
_RUN_BYTES = 4 << 20


class SideStream:
    """Where a packer reads and writes on a GPU, beside what the caller computes.

    Work on it begins after what the caller's stream was asked before, so that what an optimiser
    has just written is read after it; and what the caller's stream is asked later begins after
    that work, so that no value changes while it is read, and no memory of a value that was read
    is used anew before. Nobody waits on the host. On the CPU it is nothing.

    Args:
        device: Device of the buffers that are packed.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream: Any = None

    @contextmanager
    def running(self) -> Iterator[None]:
        """Runs the body on the stream."""
        if self._device.type != "cuda":
            yield
            return
        cuda: Any = torch.cuda
        caller = cuda.current_stream(self._device)
        own = self._stream = self._stream or cuda.Stream(self._device)
        own.wait_stream(caller)
        try:
            with cuda.stream(own):
                yield
        finally:
            caller.wait_stream(own)


def fill(buffer: torch.Tensor, weights: Sequence[Weight]) -> None:
    """Writes the values of weights into a buffer, one after the other without gaps.

    Args:
        buffer: Bytes (``uint8``), as many as the weights have. Every offset must be a multiple
            of the item size, as in the buckets that :func:`plan_buckets` makes.
        weights: Read in order, each once.

    Raises:
        WeightMismatchError: A value has another dtype or shape than was announced.

    Example:
        >>> from weight_update.weights.extract import extract_weights
        >>> weights = extract_weights({"a": torch.tensor([1, 2]).byte(), "b": torch.ones(1).byte()})
        >>> buffer = torch.zeros(3, dtype=torch.uint8)
        >>> fill(buffer, weights)
        >>> buffer.tolist()
        [1, 2, 1]
    """
    # Found one by one: a GPU copies the first while the others are found.
    runs, same = tee(_placed(buffer, weights))
    places = (made for run, place in same for made in _places(run, place))
    with closing(read_as_announced(weights, places)) as values:
        for run, place in runs:
            _fill(place, run, values)


def read_as_announced(
    weights: Sequence[Weight], places: Iterable[torch.Tensor | None] = repeat(None)
) -> Generator[torch.Tensor]:
    """The values of some weights, in order, each read when it is asked for; close it.

    Args:
        weights: Which.
        places: As :func:`read_in_turn` takes them.

    Raises:
        WeightMismatchError: A value has another dtype or shape than was announced.
    """
    # No name holds a value while the next is read: merged ones would exist twice.
    with closing(read_in_turn(weights, places)) as values:
        for weight in weights:
            yield _checked(weight, next(values))


def _placed(
    buffer: torch.Tensor, weights: Sequence[Weight]
) -> Iterator[tuple[list[Weight], torch.Tensor]]:
    """The runs, and where each is written."""
    offset = 0
    for run in _runs(weights):
        end = offset + sum(weight.spec.nbytes for weight in run)
        yield run, buffer[offset:end].view(run[0].spec.dtype)
        offset = end


def _places(run: list[Weight], place: torch.Tensor) -> list[torch.Tensor | None]:
    """Where the values of a run may be made: a large one in its own place."""
    return [place.view(run[0].spec.shape)] if len(run) == 1 else [None] * len(run)


def _runs(weights: Sequence[Weight]) -> Iterator[list[Weight]]:
    """Neighbours that are written by one call: of one dtype, and together small."""
    run: list[Weight] = []
    size = 0
    for weight in weights:
        nbytes = weight.spec.nbytes
        if run and (weight.spec.dtype != run[0].spec.dtype or size + nbytes > _RUN_BYTES):
            yield run
            run, size = [], 0
        run.append(weight)
        size += nbytes
    if run:
        yield run


def _fill(place: torch.Tensor, run: list[Weight], values: Generator[torch.Tensor]) -> None:
    if len(run) > 1 and {weight.device for weight in run} == {place.device}:
        torch.cat([value.reshape(-1) for value in islice(values, len(run))], out=place)
        return
    start = 0
    for _ in run:
        start += _write(place[start:], next(values))


def _write(place: torch.Tensor, value: torch.Tensor) -> int:
    if value.data_ptr() != place.data_ptr():  # else it was made there
        place[: value.numel()].view(value.shape).copy_(value)
    return value.numel()


def _checked(weight: Weight, value: torch.Tensor) -> torch.Tensor:
    tensor = value.resolve_conj().resolve_neg()
    if tensor.dtype != weight.spec.dtype or tensor.shape != weight.spec.shape:
        raise WeightMismatchError(
            f"{weight.spec.name!r} was announced as {weight.spec.dtype} {weight.spec.shape} and is "
            f"{tensor.dtype} {tuple(tensor.shape)} now",
            phase="transfer",
            remedy="do not change the model while an update runs",
        )
    return tensor
