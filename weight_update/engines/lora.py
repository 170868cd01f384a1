"""What a push of one LoRA adapter hands to engines: its config, its name and its values."""

from __future__ import annotations

import base64
import hashlib
import json
import pickle
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch

from weight_update.errors import ConfigurationError


@dataclass(frozen=True)
class AdapterParcel:
    """One adapter, in the trainer's memory.

    Attributes:
        config: What PEFT saves as ``adapter_config.json``.
        tensors: What it saves as ``adapter_model.safetensors``; CPU values that nothing changes.
    """

    config: Mapping[str, Any]
    tensors: Mapping[str, torch.Tensor] = field(repr=False)

    @cached_property
    def form(self) -> tuple[str, tuple[tuple[str, torch.dtype, torch.Size], ...]]:
        """All but the values: an engine that took one adapter takes another of equal form."""
        layout = tuple((name, t.dtype, t.shape) for name, t in self.tensors.items())
        return json.dumps(self.config, sort_keys=True), layout

    @cached_property
    def pickled(self) -> str:
        """The tensors by name, by value, as servers unpickle them."""
        return base64.b64encode(pickle.dumps(dict(self.tensors))).decode("ascii")

    @cached_property
    def sums(self) -> dict[str, str]:
        """SHA-256 of each tensor's bytes."""
        return {name: _sum(tensor) for name, tensor in self.tensors.items()}


class AdapterCourier:
    """The adapter of the update that runs, on its way from the trainer to every engine.

    1. :meth:`announce` when the update is planned: engines may object.
    2. :meth:`pack` before anything is paused.
    3. Each engine's session takes :attr:`parcel`, which is kept until the next is packed.

    Args:
        lora_name: The name that requests ask for.
    """

    def __init__(self, lora_name: str) -> None:
        self.lora_name = lora_name
        self.config: Mapping[str, Any] | None = None
        self._parcel: AdapterParcel | None = None

    @property
    def parcel(self) -> AdapterParcel:
        """The adapter, values included."""
        if self._parcel is None:
            raise ConfigurationError("no adapter was packed", phase="transfer")
        return self._parcel

    def announce(self, config: Mapping[str, Any]) -> None:
        """Says what kind of adapter comes."""
        self.config = config

    def pack(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Takes the values."""
        self._parcel = AdapterParcel(self.config or {}, tensors)


def modules_of(names: Mapping[str, Any]) -> list[str]:
    """Names of the modules that an adapter's tensors belong to.

    Example:
        >>> modules_of({"base_model.model.model.layers.0.mlp.up_proj.lora_A.weight": None})
        ['up_proj']
    """
    paths = (name.partition(".lora_")[0] for name in names if ".lora_" in name)
    return sorted({path.rpartition(".")[2] for path in paths})


def _sum(tensor: torch.Tensor) -> str:
    raw = tensor.contiguous().reshape(-1).view(torch.uint8)
    return hashlib.sha256(raw.numpy().tobytes()).hexdigest()
