"""The folder of the model that a server names, where it can be read here."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

_SCALE = "_scale_inv"
_SINGLE, _INDEX = "model.safetensors", "model.safetensors.index.json"
# Where trainers write what servers read.
_PUSHED = re.compile(r"/weight-update-[^/]+/version-[0-9a-f]{32}/?$")
_WEIGHTS = frozenset(
    (".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".gguf", ".h5", ".msgpack", ".onnx")
)
_CONFIG_BYTES = 16 << 20
_INDEX_BYTES = 256 << 20


def folder_of(info: Mapping[str, Any], model: Mapping[str, Any]) -> Any:
    """The path of the model that a server shows, as far as it leads to a checkpoint.

    An update from disk moves the path, and only ``/model_info`` tells. What it moved to is gone
    once the trainer has ended: then the tokenizer's folder, which is the one that the server
    started from unless it was told another one, tells of a model of the same architecture.

    Args:
        info: Its ``/server_info``.
        model: Its ``/model_info``.

    Example:
        >>> folder_of({"model_path": "/models/a"}, {"model_path": "/models/b"})
        '/models/b'
    """
    shown, start = model.get("model_path") or info.get("model_path"), model.get("tokenizer_path")
    if not isinstance(shown, str) or not _PUSHED.search(shown) or read_config(shown):
        return shown
    served = model.get("architectures")
    return start if served and read_config(start).get("architectures") == served else shown


def link_rest(model_path: Any, folder: Path) -> None:
    """Has everything but the weights of a model's folder appear in another one, where readable.

    The engines of a fleet do so at the same time, and links that are there already are left.
    """
    home = _folder(model_path)
    try:
        files = [] if home is None else [file for file in home.iterdir() if _is_beside(file)]
    except OSError:
        return
    for file in files:
        with suppress(OSError):
            (folder / file.name).symlink_to(file.resolve())


def _is_beside(file: Path) -> bool:
    weights = file.suffix in _WEIGHTS or file.name.endswith(".index.json")
    return not weights and not file.name.startswith(".") and file.is_file()


def read_config(model_path: Any) -> dict[str, Any]:
    """``config.json`` of a model's folder; empty where that cannot be read here.

    ModelOpt may tell of its quantisation in a file of its own, which is read too.

    Only an absolute path is looked at: a name on a hub, or a path from the server's own working
    directory, may mean something else on this machine.

    Example:
        >>> read_config("/nowhere"), read_config("org/name"), read_config(None)
        ({}, {}, {})
    """
    folder = _folder(model_path)
    return _quantisation_beside(folder) | _object(folder, "config.json", _CONFIG_BYTES)


def read_scaled(model_path: Any) -> frozenset[str] | None:
    """Names of the weights that a model's folder holds with scales; None if it shows none."""
    folder = _folder(model_path)
    weight_map = _object(folder, _INDEX, _INDEX_BYTES).get("weight_map")
    names: Iterable[str] = weight_map if isinstance(weight_map, dict) else _header(folder, _SINGLE)
    return frozenset(n.removesuffix(_SCALE) for n in names if n.endswith(_SCALE)) or None


def _quantisation_beside(folder: Path | None) -> dict[str, Any]:
    found = _object(folder, "hf_quant_config.json", _CONFIG_BYTES).get("quantization")
    kind = found.get("quant_algo") if isinstance(found, dict) else None
    return {"quantization_config": {"quant_method": f"modelopt {kind}"}} if kind else {}


def read_shapes(model_path: Any) -> dict[str, tuple[int, ...]]:
    """Shapes of the weights that a model's folder holds, from its files' headers, by name.

    Example:
        >>> read_shapes("/nowhere")
        {}
    """
    folder = _folder(model_path)
    weight_map = _object(folder, _INDEX, _INDEX_BYTES).get("weight_map")
    files = set(map(str, weight_map.values())) if isinstance(weight_map, dict) else {_SINGLE}
    entries = (entry for file in sorted(files) for entry in _header(folder, file).items())
    shapes = {name: _shape_of(entry) for name, entry in entries}
    return {name: shape for name, shape in shapes.items() if shape is not None}


def _shape_of(entry: Any) -> tuple[int, ...] | None:
    shape = entry.get("shape") if isinstance(entry, dict) else None
    if not isinstance(shape, list) or not all(type(size) is int for size in shape):
        return None
    return tuple(shape)


def _folder(model_path: Any) -> Path | None:
    path = Path(model_path) if isinstance(model_path, str) else None
    return path if path is not None and path.is_absolute() else None


def _object(folder: Path | None, name: str, limit: int) -> dict[str, Any]:
    """A JSON object in a file; empty if it is none, or too large to be what it is called."""
    if folder is None:
        return {}
    try:
        file = folder / name
        if not file.is_file() or file.stat().st_size > limit:
            return {}
        found = json.loads(file.read_bytes())
    except (OSError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def _header(folder: Path | None, name: str) -> dict[str, Any]:
    """What a file of weights says of each; empty if it cannot be read."""
    if folder is None:
        return {}
    try:
        with open(folder / name, "rb") as file:
            size = int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(size)) if size <= _INDEX_BYTES else {}
    except (OSError, ValueError, RecursionError):
        return {}
    found = header if isinstance(header, dict) else {}
    return {name: entry for name, entry in found.items() if name != "__metadata__"}
