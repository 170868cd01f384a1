"""Reading a folder that a trainer wrote, as far as a loader needs it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from safetensors import safe_open

from weight_update.reference_engine.weights import Arrival


def read_folder(path: Path) -> list[Arrival]:
    """Return the tensors of all files that the index names, or of all files without one.

    Raises:
        Exception: There is no such folder, it has no safetensors, or one that is named lacks.
    """
    files = sorted(path.glob("*.safetensors"))
    index = path / "model.safetensors.index.json"
    if index.is_file():
        named = {path / name for name in json.loads(index.read_bytes())["weight_map"].values()}
        if missing := sorted(named - set(files)):
            raise RuntimeError(f"{index.name} references {len(missing)} missing shard file(s)")
        files = sorted(named)
    if not files:
        raise RuntimeError(f"Cannot find any model weights with `{path}`")
    return [arrival for file in files for arrival in _arrivals(file)]


def _arrivals(file: Path) -> list[Arrival]:
    opened: Any = safe_open(file, "pt")
    with opened as tensors:
        names = list(tensors.keys())
        pairs = [(name, tensors.get_tensor(name)) for name in names]
    return [(name, list(tensor.shape), tensor.reshape(-1)) for name, tensor in pairs]
