"""A ``state_dict`` on disk as a source of weights: mapped, and never run as code."""

from __future__ import annotations

import os
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch

from weight_update.errors import ConfigurationError, WeightMismatchError, some_of
from weight_update.weights.checkpoint import (
    CONVERT,
    Checkpoint,
    identity_of,
    read_config,
    refuse_another,
    refuse_packed,
)
from weight_update.weights.names import bare_name
from weight_update.weights.shards.gather import is_shard
from weight_update.weights.specs import TensorSpec, Weight

_CPU = torch.device("cpu")
_NESTS = ("model", "state_dict", "module", "model_state_dict")
_DDP = "module."
_PEFT = "base_model.model."
_EXTRA = "_extra_state"
_ZIP = b"PK\x03\x04"
_SAVE = "save model.state_dict() with torch.save, or write safetensors with save_pretrained()"
_WORDS = 300


class SavedStateDict:
    """The weights of a file that ``torch.save(model.state_dict(), path)`` wrote.

    The file is read with ``weights_only=True``: nothing in it is run. It is mapped into memory,
    so that values are read when their bucket is packed; a file in the format of before torch
    1.6 cannot be mapped and is held whole. A training checkpoint may hold the ``state_dict``
    one level down (``model``, ``state_dict``, ``module`` or ``model_state_dict``). Names lose
    what wrappers put in: infixes of compiled and checkpointed layers, and the ``module.`` of DDP
    if all of them have it. Tied weights are sent as they are stored.

    Args:
        path: The file.

    Attributes:
        path: The file.
        weights: The weights, in the order in which they were saved.

    Raises:
        ConfigurationError: There is no readable ``state_dict`` of a whole, unquantised model.
        WeightMismatchError: An entry is no tensor, or two have the same name.

    Example:
        >>> import tempfile
        >>> folder = tempfile.TemporaryDirectory()
        >>> torch.save({"module.a": torch.ones(2)}, folder.name + "/model.pt")
        >>> [weight.spec for weight in SavedStateDict(folder.name + "/model.pt").weights]
        [TensorSpec(name='a', dtype=torch.float32, shape=(2,))]
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        _check_file(self.path)
        self._seen = identity_of(self.path)
        tensors = _named(self.path, _state_dict_in(self.path, _load(self.path)))
        self.weights: tuple[Weight, ...] = tuple(
            Weight(_spec(self.path, name, tensor), _CPU, partial(self._read, tensor))
            for name, tensor in tensors.items()
        )
        refuse_packed(self.path, self.specs, quantised="quantization_config" in self.config())

    @property
    def specs(self) -> tuple[TensorSpec, ...]:
        """What every weight is, in send order."""
        return tuple(weight.spec for weight in self.weights)

    def config(self) -> dict[str, Any]:
        """The ``config.json`` beside the file; empty when there is none that can be read."""
        return read_config(self.path.parent)

    def _read(self, tensor: torch.Tensor) -> torch.Tensor:
        # A mapped file that is written to shows what is written.
        refuse_another(self.path, self._seen)
        return tensor.detach()


def open_weights(path: Path) -> Checkpoint | SavedStateDict:
    """What a path names: the folder of a checkpoint, or the file of a ``state_dict``.

    Raises:
        ConfigurationError: It is neither, or cannot be pushed.
        WeightMismatchError: What it holds contradicts itself.
    """
    return SavedStateDict(path) if path.is_file() else Checkpoint(path)


def _check_file(path: Path) -> None:
    if path.is_dir():
        raise ConfigurationError(
            f"{path} is a folder",
            phase="plan",
            remedy="name the file; a folder of safetensors is a Checkpoint",
        )
    if not path.is_file():
        raise ConfigurationError(
            f"{path} does not exist",
            phase="plan",
            remedy=f"name the file that torch.save() wrote, here from {Path.cwd()}",
        )
    if path.suffix == ".safetensors":
        raise ConfigurationError(
            f"{path} is a safetensors file, and no state_dict",
            phase="plan",
            remedy="name its folder, which is a Checkpoint",
        )


def _load(path: Path) -> Any:
    try:
        with path.open("rb") as file:
            mapped = file.read(len(_ZIP)) == _ZIP
        return torch.load(path, map_location=_CPU, weights_only=True, mmap=mapped)
    except Exception as error:  # bytes of any origin fail in any way
        raise ConfigurationError(
            f"torch.load(weights_only=True) does not take {path}: {_words(error)}",
            phase="plan",
            remedy=f"{_SAVE}; or {CONVERT}",
        ) from error


def _words(error: Exception) -> str:
    """What torch says went wrong, without its advice to trust the file.

    Example:
        >>> print(_words(ValueError("Load failed. You may" + chr(10) + "error: no GLOBAL x.y")))
        error: no GLOBAL x.y
    """
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    telling = [line for line in lines if "error:" in line or "GLOBAL" in line]
    words = (*telling, *lines, "")[0][:_WORDS]
    return words if len(words.split()) > 1 else f"{type(error).__name__} {words}".rstrip()


def _state_dict_in(path: Path, loaded: Any) -> Mapping[Any, Any]:
    if not isinstance(loaded, Mapping):
        raise ConfigurationError(
            f"{path} holds {type(loaded).__name__}, and no state_dict", phase="plan", remedy=_SAVE
        )
    nests = [key for key in _NESTS if isinstance(loaded.get(key), Mapping)]
    if len(nests) > 1:
        raise ConfigurationError(
            f"{path} holds several state_dicts: {some_of(nests)}", phase="plan", remedy=_SAVE
        )
    if "param_groups" in loaded and "state" in loaded:
        raise ConfigurationError(
            f"{path} holds the state of an optimizer, and no model", phase="plan", remedy=_SAVE
        )
    found: Mapping[Any, Any] = loaded[nests[0]] if nests else loaded
    return found


def _named(path: Path, state: Mapping[Any, Any]) -> dict[str, torch.Tensor]:
    """The tensors under the bare model's names."""
    kept = {name: value for name, value in state.items() if not str(name).endswith(_EXTRA)}
    wrong = [
        str(name)
        for name, value in kept.items()
        if not isinstance(name, str) or not isinstance(value, torch.Tensor)
    ]
    if wrong:
        raise WeightMismatchError(
            f"{path}: not tensors: {some_of(wrong)}",
            phase="plan",
            remedy=f"{_SAVE}; one level down, it is looked for under {', '.join(_NESTS)} only",
        )
    if any(name.startswith(_PEFT) and ".lora_" in name for name in kept):
        raise ConfigurationError(
            f"{path} holds the state_dict of a PEFT model, with adapters beside their base",
            phase="plan",
            remedy="push the model itself, or save the state_dict of merge_and_unload()",
        )
    names = {name: bare_name(name) for name in kept}
    if all(name.startswith(_DDP) for name in names.values()):
        names = {stored: name.removeprefix(_DDP) for stored, name in names.items()}
    if len(set(names.values())) < len(names):
        raise WeightMismatchError(f"{path}: two weights have the same bare name", phase="plan")
    return {names[stored]: value for stored, value in kept.items()}


def _spec(path: Path, name: str, tensor: torch.Tensor) -> TensorSpec:
    what = None
    if is_shard(tensor):
        what = "a shard of a distributed tensor"
    elif tensor.is_quantized or tensor.layout is not torch.strided:
        what = f"quantised ({tensor.dtype})" if tensor.is_quantized else f"{tensor.layout}"
    elif tensor.is_meta:
        what = "on the meta device, and has no value"
    if what is not None:
        raise ConfigurationError(
            f"{path}: weight {name!r} is {what}, and cannot be sent", phase="plan", remedy=_SAVE
        )
    return TensorSpec(name, tensor.dtype, tuple(tensor.shape))
