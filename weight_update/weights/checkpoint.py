"""A checkpoint on disk as a source of weights: safetensors, one shard in memory at a time."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from weight_update.errors import ConfigurationError, Phase, WeightMismatchError, some_of
from weight_update.weights.specs import TensorSpec, Weight

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"

DTYPES = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "I16": torch.int16,
    "I32": torch.int32,
    "I64": torch.int64,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F64": torch.float64,
    "C64": torch.complex64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
}
_OTHER_FORMATS = (".bin", ".pt", ".pth", ".ckpt", ".gguf", ".h5", ".msgpack")
CONVERT = (
    "convert it once: AutoModelForCausalLM.from_pretrained(OLD).save_pretrained(NEW) of "
    "transformers writes safetensors"
)
_MERGE = "merge it into its base model first (merge_and_unload() of peft), and save that"
_SAVE_AGAIN = "copy or save the checkpoint again"
_CPU = torch.device("cpu")


class Checkpoint:
    """The weights of a folder that transformers' ``save_pretrained`` wrote.

    Names, dtypes and shapes come from the files' headers. A value is read when its bucket is
    packed, and one file is open at a time, so that pushing a checkpoint holds one shard and the
    buckets, whatever its size. Tied weights are sent as they are stored.

    Args:
        directory: The folder: ``model.safetensors``, or shards with
            ``model.safetensors.index.json``.

    Attributes:
        directory: The folder.
        weights: The weights, file by file and in the order of their bytes.

    Raises:
        ConfigurationError: There is no readable safetensors checkpoint of a whole,
            unquantised model.
        WeightMismatchError: Index and files, or two files, contradict each other.

    Example:
        >>> import tempfile
        >>> from safetensors.torch import save_file
        >>> folder = tempfile.TemporaryDirectory()
        >>> save_file({"a": torch.ones(2)}, folder.name + "/model.safetensors")
        >>> [weight.spec for weight in Checkpoint(folder.name).weights]
        [TensorSpec(name='a', dtype=torch.float32, shape=(2,))]
    """

    def __init__(self, directory: str | os.PathLike[str]) -> None:
        self.directory = Path(directory)
        reader = _Reader()
        index = _index_of(self.directory)
        files = _files_of(self.directory) if index is None else _shards_of(self.directory, index)
        found = {file: tuple(_weights_of(file, reader)) for file in files}
        _refuse_duplicates(found)
        self.weights: tuple[Weight, ...] = tuple(chain.from_iterable(found.values()))
        if index is not None:
            _match(self.directory / INDEX, index, {spec.name for spec in self.specs})
        refuse_packed(self.directory, self.specs, quantised="quantization_config" in self.config())

    @property
    def specs(self) -> tuple[TensorSpec, ...]:
        """What every weight is, in send order."""
        return tuple(weight.spec for weight in self.weights)

    def config(self) -> dict[str, Any]:
        """The model's ``config.json``; empty when there is none that can be read."""
        return read_config(self.directory)


def read_config(directory: Path) -> dict[str, Any]:
    """The ``config.json`` of a folder; empty when there is none that can be read."""
    with suppress(OSError, ValueError):
        config = json.loads((directory / "config.json").read_text())
        return config if isinstance(config, dict) else {}
    return {}


class _Reader:
    """Reads tensors of several files and keeps one of them open: the last."""

    def __init__(self) -> None:
        self._path: Path | None = None
        self._file: Any = None
        self._seen: dict[Path, tuple[int, int, int]] = {}

    def plan(self, path: Path) -> Any:
        """Opens a file for its header, and remembers which file it was."""
        self._seen[path] = identity_of(path)
        return _open(path, "plan")

    def read(self, path: Path, name: str) -> torch.Tensor:
        """One tensor; a view of the mapped file, which is gone once the view is."""
        if path != self._path:
            self.close()
            self._file, self._path = _open(path, "transfer"), path
            # Half of one save and half of another is a model that nobody trained.
            refuse_another(path, self._seen.get(path))
        try:
            tensor: torch.Tensor = self._file.get_tensor(name)
        except (OSError, SafetensorError) as error:
            raise _unreadable(path, error, "transfer") from error
        return tensor

    def close(self) -> None:
        """Unmaps the file."""
        self._path = self._file = None


Identity = tuple[int, int, int]


def identity_of(path: Path) -> Identity:
    """What tells a file from another of its name, or from itself before it was written to."""
    try:
        facts = path.stat()
    except OSError as error:
        raise ConfigurationError(
            f"{path} cannot be read any more: {error}", phase="transfer", remedy=_SAVE_AGAIN
        ) from error
    return facts.st_ino, facts.st_size, facts.st_mtime_ns


def refuse_another(path: Path, seen: Identity | None) -> None:
    """Raises ConfigurationError if a file is not the one that was seen when it was planned."""
    if seen != identity_of(path):
        raise ConfigurationError(
            f"{path} was replaced while it was pushed",
            phase="transfer",
            remedy="push a checkpoint that nobody writes to",
        )


def _weights_of(path: Path, reader: _Reader) -> Iterator[Weight]:
    file = reader.plan(path)
    for name in file.offset_keys():
        spec = _spec(path, name, file.get_slice(name))
        yield Weight(spec, _CPU, partial(reader.read, path, name))


def _spec(path: Path, name: str, entry: Any) -> TensorSpec:
    stored = entry.get_dtype()
    if stored not in DTYPES:
        raise ConfigurationError(
            f"{path}: weight {name!r} is stored as {stored}, which cannot be sent",
            phase="plan",
            remedy="dequantise the model, and save it again",
        )
    return TensorSpec(name, DTYPES[stored], tuple(entry.get_shape()))


def _open(path: Path, phase: Phase) -> Any:
    try:
        return safe_open(path, framework="pt")
    except (OSError, SafetensorError) as error:
        raise _unreadable(path, error, phase) from error


def _unreadable(path: Path, error: Exception, phase: Phase) -> ConfigurationError:
    return ConfigurationError(
        f"{path} is no whole safetensors file: {error}", phase=phase, remedy=_SAVE_AGAIN
    )


# -- which files --------------------------------------------------------------------------


def _index_of(directory: Path) -> dict[str, str] | None:
    """Name to file of the index; None when there is no index."""
    path = directory / INDEX
    if not path.is_file():
        return None
    try:
        weight_map = json.loads(path.read_text())["weight_map"]
        index = {str(name): str(file) for name, file in weight_map.items()}
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise ConfigurationError(
            f"{path} cannot be read as an index: {error!r}", phase="plan", remedy=_SAVE_AGAIN
        ) from error
    outside = [file for file in index.values() if Path(file).name != file]
    if outside:
        raise ConfigurationError(f"{path} names a file elsewhere: {outside[0]!r}", phase="plan")
    return index


def _shards_of(directory: Path, index: dict[str, str]) -> list[Path]:
    """The files that an index names, all of them there."""
    if (directory / SINGLE).exists() and SINGLE not in index.values():
        raise ConfigurationError(
            f"{directory} holds both {SINGLE} and {INDEX}: one is left over from another save",
            phase="plan",
            remedy="remove the one that is not the model",
        )
    shards = [directory / name for name in sorted(set(index.values()))]
    _refuse_missing(directory, [shard.name for shard in shards if not shard.exists()])
    return shards


def _files_of(directory: Path) -> list[Path]:
    """The files of a checkpoint without an index."""
    _check_directory(directory)
    if (directory / SINGLE).exists():
        return [directory / SINGLE]
    files = sorted(directory.glob("*.safetensors"))
    if not files:
        raise _nothing_in(directory)
    if (directory / "adapter_config.json").exists():
        raise ConfigurationError(
            f"{directory} holds an adapter, not a model", phase="plan", remedy=_MERGE
        )
    _refuse_missing(directory, _missing_numbers([file.name for file in files]))
    return files


def _check_directory(directory: Path) -> None:
    if directory.is_dir():
        return
    what = "is a file" if directory.exists() else "does not exist"
    remedy = "name the folder that save_pretrained() wrote; a model of a hub is downloaded first"
    raise ConfigurationError(f"checkpoint {directory} {what}", phase="plan", remedy=remedy)


def _nothing_in(directory: Path) -> ConfigurationError:
    others = [file.name for file in sorted(directory.iterdir()) if file.suffix in _OTHER_FORMATS]
    if others:
        return ConfigurationError(
            f"{directory} holds {others[0]}, and no safetensors",
            phase="plan",
            remedy=f"{CONVERT}; a state_dict of the whole model in one file can be named itself",
        )
    return ConfigurationError(
        f"{directory} holds no *.safetensors files",
        phase="plan",
        remedy="name the folder that save_pretrained() wrote",
    )


def _missing_numbers(names: Sequence[str]) -> list[str]:
    """What lacks in a run of numbered shards.

    Example:
        >>> _missing_numbers(["model-00001-of-00002.safetensors"])
        ['model-00002-of-00002.safetensors']
    """
    numbered = [re.fullmatch(r"(.*-)(\d+)(-of-)(\d+)(\.safetensors)", name) for name in names]
    wanted = {
        f"{m[1]}{number:0{len(m[2])}}{m[3]}{m[4]}{m[5]}"
        for m in numbered
        if m
        for number in range(1, int(m[4]) + 1)
    }
    return sorted(wanted - set(names))


def _refuse_missing(directory: Path, missing: Sequence[str]) -> None:
    if missing:
        raise ConfigurationError(
            f"{directory} lacks {len(missing)} shard(s): {some_of(missing)}",
            phase="plan",
            remedy=_SAVE_AGAIN,
        )


# -- what they hold -----------------------------------------------------------------------


def _refuse_duplicates(found: Mapping[Path, Sequence[Weight]]) -> None:
    homes: dict[str, Path] = {}
    for path, weights in found.items():
        for weight in weights:
            first = homes.setdefault(weight.spec.name, path)
            if first != path:
                raise WeightMismatchError(
                    f"{first} and {path.name} both hold {weight.spec.name!r}",
                    phase="plan",
                    remedy="remove the files of another save",
                )


def _match(path: Path, index: Iterable[str], stored: set[str]) -> None:
    named = set(index)
    for names, what in (
        (named - stored, "names weights that its files lack"),
        (stored - named, "does not name weights that its files hold"),
    ):
        if names:
            raise WeightMismatchError(
                f"{path} {what}: {some_of(sorted(names))}", phase="plan", remedy=_SAVE_AGAIN
            )


def refuse_packed(path: Path, specs: Sequence[TensorSpec], *, quantised: bool) -> None:
    """Raises ConfigurationError if there are no weights, or integers stand for some of them.

    Args:
        path: Where they come from.
        specs: All of them.
        quantised: Whether the model says of itself that it is quantised.
    """
    if not specs:
        raise ConfigurationError(f"{path} holds no weights", phase="plan")
    packed = [
        spec
        for spec in specs
        if not (spec.dtype.is_floating_point or spec.dtype.is_complex)
        and ("weight" in spec.name.rpartition(".")[2] or (quantised and len(spec.shape) > 1))
    ]
    if packed:
        raise ConfigurationError(
            f"{path}: weight {packed[0].name!r} is quantised: {packed[0].dtype} of shape "
            f"{packed[0].shape}",
            phase="plan",
            remedy="dequantise the model, and save it again",
        )
