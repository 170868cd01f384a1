"""The disk path: weights are written as a checkpoint, in a folder that engines read."""

from __future__ import annotations

import json
import threading
from collections.abc import Generator, Iterator, Sequence
from contextlib import closing
from functools import partial
from pathlib import Path

import torch

from weight_update.errors import ConfigurationError, WeightUpdateError
from weight_update.options import UpdateOptions
from weight_update.transports.address import is_here
from weight_update.transports.folders import VersionFolders
from weight_update.transports.in_request import NoGroup
from weight_update.transports.packing import read_as_announced
from weight_update.transports.tensor_file import can_hold, can_name, write_tensors, write_text
from weight_update.weights.buckets import Bucket, Plan
from weight_update.weights.cargo import Cargo, Format, Terms
from weight_update.weights.checkpoint import INDEX
from weight_update.weights.growing_plan import GrowingPlan
from weight_update.weights.specs import TensorSpec, Weight

# Engines read files side by side, and keep one whole file a reader in memory.
_FILE_BYTES = 1 << 30


def open_no_group(urls: Sequence[str], options: UpdateOptions) -> NoGroup:
    """What stands for a group; refuses engines that cannot see the folder.

    Raises:
        ConfigurationError: No directory is set, and an engine is on another host.
    """
    elsewhere = [] if options.directory else [url for url in urls if not is_here(url)]
    if elsewhere:
        raise ConfigurationError(
            "it is on another host, and does not see a folder of this one",
            engine=elsewhere[0],
            engines=elsewhere,
            phase="connect",
            remedy="set directory= (or WEIGHT_UPDATE_DIRECTORY) to a folder that trainer and "
            "servers see under the same path",
        )
    return NoGroup()


class DiskPacker:
    """Writes all weights into one new folder before anything is paused.

    All of them are one bucket, so one request tells an engine to load them. Of a stream, whose
    end is not known, each bucket gets a folder and a request of its own, and the others keep what
    the ones before brought.

    Args:
        folders: Where they are written.
    """

    def __init__(self, folders: VersionFolders) -> None:
        self._folders = folders
        self._file_bytes = _FILE_BYTES
        self._given_up = threading.Event()

    def format(self, specs: Sequence[TensorSpec] | None, terms: Terms) -> Format:
        """One bucket of everything; its files are of the size that was asked for."""
        self._file_bytes = terms.bucket_bytes or _FILE_BYTES
        reason = f"safetensors in {self._folders.place}"
        whole = self._file_bytes if specs is None else sum(spec.nbytes for spec in specs)
        return Format(max(whole, 1), lambda _: True, reason)

    def reserve(self, plan: Plan | GrowingPlan) -> None:
        """Nothing: one tensor at a time is in memory."""

    def objections(self, plan: Plan | GrowingPlan) -> list[str]:
        """Tensors that no safetensors file can hold."""
        specs = [spec for bucket in plan.buckets for spec in bucket.specs]
        return [
            f"{spec.name!r} is {spec.dtype_name}, which safetensors cannot hold"
            for spec in specs
            if not can_hold(spec.dtype)
        ] + [
            f"{spec.name!r} is a name that safetensors cannot hold"
            for spec in specs
            if not can_name(spec.name)
        ]

    @torch.no_grad()
    def pack(self, bucket: Bucket) -> Cargo:
        """Writes a bucket; the folder appears once all of it is stored.

        Raises:
            WeightMismatchError: A value has another dtype or shape than was announced.
            WeightUpdateError: It cannot be written.
        """
        given_up, unread = self._given_up, list[OSError]()
        try:
            with self._folders.written(bucket.nbytes) as (folder, place):
                self._fill(folder, bucket, given_up, unread)
        except OSError as error:
            if error in unread:
                raise  # the place is well: it is the source of the weights that is not
            raise WeightUpdateError(
                f"weights could not be written under {self._folders.place}: {error}",
                phase="plan",
                remedy="look at the space and the modes there, or set directory=",
            ) from error
        return Cargo(folder=place, reading=partial(self._folders.reading, place))

    def abandon(self) -> None:
        """Has a pack that does not end stop at its next tensor."""
        self._given_up.set()
        self._given_up = threading.Event()

    def _fill(
        self, folder: Path, bucket: Bucket, given_up: threading.Event, unread: list[OSError]
    ) -> None:
        files = list(cut(bucket.weights, self._file_bytes))
        weight_map: dict[str, str] = {}
        for number, weights in enumerate(files, start=1):
            name = f"model-{number:05}-of-{len(files):05}.safetensors"
            with closing(_until(given_up, weights, unread)) as values:
                write_tensors(folder / name, [weight.spec for weight in weights], values)
            weight_map |= {weight.spec.name: name for weight in weights}
        # Last: who reads a folder without an index reads one that nobody finished.
        index = {"metadata": {"total_size": bucket.nbytes}, "weight_map": weight_map}
        write_text(folder / INDEX, json.dumps(index))


def cut(weights: Sequence[Weight], file_bytes: int) -> Iterator[list[Weight]]:
    """The weights of each file: in order, but those of larger items first.

    Example:
        >>> from weight_update.weights.extract import extract_weights
        >>> tensors = {"a": torch.zeros(2), "b": torch.zeros(2), "c": torch.zeros(9)}
        >>> [[w.spec.name for w in file] for file in cut(extract_weights(tensors), 16)]
        [['a', 'b'], ['c']]
    """
    file: list[Weight] = []
    size = 0
    for weight in weights:
        if file and size + weight.spec.nbytes > file_bytes:
            yield _aligned(file)
            file, size = [], 0
        file.append(weight)
        size += weight.spec.nbytes
    if file:
        yield _aligned(file)


def _aligned(file: list[Weight]) -> list[Weight]:
    return sorted(file, key=lambda weight: -weight.spec.dtype.itemsize)


def _until(
    given_up: threading.Event, weights: Sequence[Weight], unread: list[OSError]
) -> Generator[torch.Tensor]:
    """Values, until they are given up; notes that one could not be read."""
    with closing(read_as_announced(weights)) as values:
        for _ in weights:
            if given_up.is_set():
                raise WeightUpdateError("the update was given up", phase="plan")
            try:
                value = next(values)
            except OSError as error:
                unread.append(error)
                raise
            yield value
            del value  # or it would exist while the next is read
