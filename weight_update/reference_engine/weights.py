"""Receiving tensors from the trainer and writing them into the model."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
import torch.distributed as dist

from weight_update.reference_engine.faults import Fault, strike

_log = logging.getLogger("reference_engine.weights")

NamedTensors = list[tuple[str, torch.Tensor]]


@dataclass(frozen=True)
class Announcement:
    """What one update request says will be broadcast."""

    names: Sequence[str]
    dtypes: Sequence[str]
    shapes: Sequence[Sequence[int]]
    flattened: bool = False


def receive(
    group: Any, announced: Announcement, device: torch.device, faults: Sequence[Fault] = ()
) -> NamedTensors:
    """Take part in the broadcasts that ``announced`` calls for.

    Raises:
        Exception: Whatever goes wrong; the model is untouched then.
    """
    take = _receive_bucket if announced.flattened else _receive_each
    return take(group, announced, device, faults)


def _receive_each(
    group: Any, announced: Announcement, device: torch.device, faults: Sequence[Fault]
) -> NamedTensors:
    """One broadcast a name; all are posted before the first is waited for."""
    received, works = [], []
    # Lists of unequal length are cut to the shortest, as the real server does.
    lists = (announced.names, announced.dtypes, announced.shapes)
    for name, dtype, shape in zip(*lists, strict=False):
        tensor = torch.empty(list(shape), dtype=getattr(torch, dtype), device=device)
        received.append((name, tensor))
        works.append(dist.broadcast(tensor, src=0, group=group, async_op=True))
    strike(faults, "after_receive", 0, len(works))
    for done, work in enumerate(works, start=1):
        work.wait()
        strike(faults, "after_receive", done, len(works))
    return received


def _receive_bucket(
    group: Any, announced: Announcement, device: torch.device, faults: Sequence[Fault]
) -> NamedTensors:
    """One broadcast of bytes: all tensors back to back, in the order of the names."""
    dtypes, starts = _bucket_layout(announced)
    flat = torch.empty(starts[-1], dtype=torch.uint8, device=device)
    dist.broadcast(flat, src=0, group=group)
    strike(faults, "after_receive", len(dtypes), len(dtypes))
    pieces = zip(announced.names, dtypes, announced.shapes, starts, starts[1:], strict=False)
    return [
        (name, flat[start:end].view(dtype).view(list(shape)))
        for name, dtype, shape, start, end in pieces
    ]


def _bucket_layout(announced: Announcement) -> tuple[list[torch.dtype], list[int]]:
    """Return each tensor's dtype and the byte offsets between them, or raise before joining."""
    if not announced.names:
        raise ValueError("a flattened bucket needs at least one tensor")
    dtypes, starts = [], [0]
    for name, text, shape in zip(announced.names, announced.dtypes, announced.shapes, strict=True):
        dtype = getattr(torch, text)
        if min(shape, default=0) < 0 or starts[-1] % dtype.itemsize:
            raise ValueError(f"{name}: offset {starts[-1]} does not fit {text} {list(shape)}")
        dtypes.append(dtype)
        starts.append(starts[-1] + prod(shape) * dtype.itemsize)
    return dtypes, starts


def load(model: Any, tensors: NamedTensors, faults: Sequence[Fault] = ()) -> None:
    """Copy ``tensors`` into the parameters of their names, in order; unknown names are skipped.

    Raises:
        ValueError: A shape is wrong; the tensors before it are already written.
    """
    parameters = dict(model.named_parameters())
    strike(faults, "after_load", 0, len(tensors))
    for done, (name, tensor) in enumerate(tensors, start=1):
        if name in parameters:
            _copy(name, parameters[name], tensor)
        elif not _is_tied_head(model, name):
            _log.warning("Parameter %s not found in params_dict", name)
        strike(faults, "after_load", done, len(tensors))


def _copy(name: str, parameter: torch.Tensor, tensor: torch.Tensor) -> None:
    if parameter.shape != tensor.shape:
        raise ValueError(
            f"{name}: attempted to load weight {list(tensor.shape)} "
            f"into parameter {list(parameter.shape)}"
        )
    with torch.no_grad():
        parameter.copy_(tensor)


def _is_tied_head(model: Any, name: str) -> bool:
    return name == "lm_head.weight" and bool(model.config.tie_word_embeddings)


def first_rows(model: Any, name: str, count: int) -> list[Any] | None:
    """Return the first ``count`` rows of a parameter, or None if there is no such parameter."""
    parameters = dict(model.named_parameters(remove_duplicate=False))
    if name not in parameters:
        return None
    rows: list[Any] = parameters[name][:count].float().tolist()
    return rows


def checksums(model: Any) -> dict[str, str]:
    """Return a short SHA-256 of each parameter's bytes; a digest of this engine's own kind."""
    return {name: digest(_raw_bytes(tensor)) for name, tensor in model.named_parameters()}


def _raw_bytes(tensor: torch.Tensor) -> bytes:
    flat = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    return bytes(flat.numpy())


def digest(data: bytes) -> str:
    """Return the first 16 hex digits of the SHA-256 of ``data``."""
    return hashlib.sha256(data).hexdigest()[:16]


def load_model(path: str, dtype: str, device: torch.device) -> Any:
    """Load a causal language model for inference from a directory."""
    from transformers import AutoModelForCausalLM

    loader: Callable[..., Any] = AutoModelForCausalLM.from_pretrained
    model = loader(path, dtype=getattr(torch, dtype), local_files_only=True)
    return model.to(device).eval().requires_grad_(False)
