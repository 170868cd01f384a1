"""What a recording holds, and how it is kept on disk.

A recording is a list of scenarios. Each is a list of events in the order in which they
happened: a request leaves (``ask``), its answer comes (``answer``), or a request was seen to
run (``running``). Requests overlap as they did. The tensors that were broadcast while an update
request was open are named by it and kept, each once, in one archive.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

HOME = Path(__file__).parent / "sglang-0.5.23"
MODEL = HOME / "model"

PROMPT = [5, 9, 17, 33, 2, 40, 41, 8]
LONG = "long"  # the id of the request that is in flight during an update

#: Of answers with many fields, those that clients read.
KEPT: dict[str, tuple[str, ...]] = {
    "/server_info": (
        *("version", "tp_size", "pp_size", "dp_size", "ep_size", "attn_dp_size"),
        *("enable_dp_attention", "disaggregation_mode", "weight_version", "dtype", "device"),
    ),
    "/model_info": ("weight_version", "is_generation", "model_type", "architectures"),
    "/v1/loads": ("version",),
}
META = (
    *("finish_reason", "prompt_tokens", "completion_tokens", "cached_tokens"),
    *("weight_version", "weight_versions", "num_retractions"),
)


@dataclass
class Scenario:
    """One update made with the library, and what was asked around it."""

    name: str
    events: list[dict[str, Any]] = field(default_factory=list)

    def answer(self, number: int) -> dict[str, Any]:
        """The answer to a request."""
        return next(e for e in self.events if e["event"] == "answer" and e["number"] == number)


def kept(path: str, body: Any) -> Any:
    """What is kept, and compared, of an answer."""
    if path == "/generate" and isinstance(body, dict) and "meta_info" in body:
        meta = {key: body["meta_info"].get(key) for key in META}
        return {"output_ids": body["output_ids"], "meta_info": meta}
    if isinstance(body, dict) and path in KEPT and set(KEPT[path]) & set(body):
        return {key: body.get(key) for key in KEPT[path]}
    return body


def decoded(text: str) -> Any:
    """JSON, or the text itself."""
    try:
        return json.loads(text)
    except ValueError:
        return text


class Tensors:
    """Tensors by the digest of their bytes."""

    def __init__(self) -> None:
        self.known: dict[str, np.ndarray[Any, Any]] = {}

    def add(self, tensor: torch.Tensor) -> str:
        """Keep a tensor and return its name."""
        array = tensor.numpy().copy()
        name = hashlib.sha256(str(array.dtype).encode() + array.tobytes()).hexdigest()[:16]
        self.known[name] = array
        return name

    def get(self, name: str) -> torch.Tensor:
        """A tensor that was kept."""
        return torch.from_numpy(self.known[name].copy())


def save(scenarios: Sequence[Scenario], tensors: Tensors) -> None:
    """Write a recording."""
    plain = [{"name": scenario.name, "events": scenario.events} for scenario in scenarios]
    # One event a line, so that a new recording shows as a readable difference.
    text = json.dumps(plain).replace('{"event"', '\n{"event"').replace('{"name"', '\n\n{"name"')
    (HOME / "traffic.json").write_text(text + "\n")
    np.savez_compressed(HOME / "tensors.npz", **tensors.known)  # type: ignore[arg-type]


def load() -> tuple[list[Scenario], Tensors]:
    """Read the recording."""
    plain = json.loads((HOME / "traffic.json").read_text())
    tensors = Tensors()
    with np.load(HOME / "tensors.npz") as archive:
        tensors.known = {name: archive[name] for name in archive.files}
    return [Scenario(**scenario) for scenario in plain], tensors
