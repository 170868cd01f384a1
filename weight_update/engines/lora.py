"""What a push of one LoRA adapter hands to engines: its config, its name and its values."""

from __future__ import annotations

import base64
import hashlib
import json
import pickle
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from tempfile import mkdtemp
from typing import Any, Protocol
from uuid import uuid4

import torch
from safetensors.torch import save_file

from weight_update.errors import ConfigurationError, EngineRejected
from weight_update.waiting import Deadline
from weight_update.weights.buckets import Bucket
from weight_update.weights.cargo import Cargo

# The new one, the one before, and one of an update that failed in between.
_KEPT_FOLDERS = 3

MERGE = "push with lora='merge'"
"""The way out where an adapter cannot be served."""


@dataclass(frozen=True)
class AdapterParcel:
    """One adapter, in the trainer's memory.

    Attributes:
        config: What PEFT saves as ``adapter_config.json``.
        tensors: What it saves as ``adapter_model.safetensors``; CPU values that nothing changes.
        sums: SHA-256 of each tensor's bytes, for engines that compare them.
    """

    config: Mapping[str, Any]
    tensors: Mapping[str, torch.Tensor] = field(repr=False)
    sums: Mapping[str, str] = field(default_factory=dict, repr=False)

    @cached_property
    def form(self) -> tuple[str, tuple[tuple[str, torch.dtype, torch.Size], ...]]:
        """All but the values: an engine that took one adapter takes another of equal form."""
        layout = tuple((name, t.dtype, t.shape) for name, t in self.tensors.items())
        return json.dumps(self.config, sort_keys=True), layout

    @cached_property
    def pickled(self) -> str:
        """The tensors by name, by value, as servers unpickle them."""
        return base64.b64encode(pickle.dumps(dict(self.tensors))).decode("ascii")


class AdapterCourier:
    """The adapter of the update that runs, on its way from the trainer to every engine.

    1. :meth:`announce` when the update is planned: engines may object.
    2. :meth:`pack` before anything is paused.
    3. Each engine's session takes :attr:`parcel`.
    4. :meth:`forget` once every engine has it; after a failure it is kept until the next comes.

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
        """Takes the values, and encodes them while nothing is paused yet."""
        sums = {name: _sum(tensor) for name, tensor in tensors.items()}
        self._parcel = parcel = AdapterParcel(self.config or {}, tensors, sums)
        parcel.pickled  # noqa: B018 - computed once, for all engines

    def forget(self) -> None:
        """Frees the values."""
        self._parcel = None


class AdapterFolders(AdapterCourier):
    """A courier for engines that read adapters from a folder which they and the trainer see.

    Every adapter gets a folder of its own, complete as soon as it is there: engines tell
    adapters apart by path. The one before is kept, since requests in flight may read it again.

    Args:
        lora_name: The name that requests ask for.
        directory: Where the folders are made; its path must be the same for the engines.
    """

    def __init__(self, lora_name: str, directory: Path) -> None:
        super().__init__(lora_name)
        self._directory = directory.absolute()
        self._written: list[Path] = []

    @property
    def place(self) -> Path:
        """The folder of the adapter that was packed last."""
        return self._written[-1]

    def pack(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Writes the values."""
        self._parcel = AdapterParcel(self.config or {}, tensors)
        self._directory.mkdir(parents=True, exist_ok=True)
        unfinished = Path(mkdtemp(prefix=".unfinished-", dir=self._directory))
        unfinished.chmod(0o755)  # engines may run as another user
        config = json.dumps(self.parcel.config, indent=2)
        (unfinished / "adapter_config.json").write_text(config)
        save_file(dict(tensors), unfinished / "adapter_model.safetensors", {"format": "pt"})
        place = self._directory / f"adapter-{uuid4().hex}"
        unfinished.rename(place)
        self._written.append(place)
        for old in self._written[:-_KEPT_FOLDERS]:
            shutil.rmtree(old, ignore_errors=True)
        del self._written[:-_KEPT_FOLDERS]


@dataclass
class HeldAdapter:
    """What an engine is known to have taken since it started.

    Attributes:
        form: Form of the last adapter that it accepted; None before the first.
        sums: Those of the adapter that it holds; None when it is unsure which that is.
    """

    form: object = None
    sums: Mapping[str, str] | None = field(default_factory=dict)


class Desk(Protocol):
    """Where the adapters of one engine are loaded and unloaded."""

    def load(self, name: str, parcel: AdapterParcel, deadline: Deadline) -> None:
        """Loads an adapter under a name that is free."""

    def unload(self, name: str, deadline: Deadline) -> None:
        """Unloads one; a name that is not loaded is no error."""


class AdapterSession:
    """Replaces the adapter of one engine: tried out under another name, then swapped.

    What an engine refuses it refuses in the trial, while the adapter before is still loaded. An
    adapter of a form that it took before is not tried again.
    """

    def __init__(self, desk: Desk, courier: AdapterCourier, held: HeldAdapter) -> None:
        self._desk, self._courier, self._held = desk, courier, held
        self._trial = f"{courier.lora_name}.trial"

    def open(self, deadline: Deadline) -> bool:
        """Nothing: adapters need no session."""
        return False

    def apply(
        self, bucket: Bucket, cargo: Cargo, *, group_name: str, flush: bool, deadline: Deadline
    ) -> None:
        """Replaces the adapter; returns when requests get the new one.

        Raises:
            EngineRejected: Refused; its ``applied`` says whether the adapter before is loaded.
        """
        parcel, name = self._courier.parcel, self._courier.lora_name
        if self._held.form != parcel.form:
            self._try(parcel, deadline)
        self._held.form, self._held.sums = parcel.form, None
        try:
            self._desk.unload(name, deadline)
            self._desk.load(name, parcel, deadline)
        except EngineRejected as error:
            error.applied = "partly"  # the adapter before is gone
            raise
        self._held.sums = parcel.sums

    def close(self, deadline: Deadline) -> None:
        """Nothing: the swap is the update."""

    def recover(self, deadline: Deadline) -> None:
        """Leaves no trial behind; an adapter that is gone comes back with the next update."""
        self._desk.unload(self._trial, deadline)

    def _try(self, parcel: AdapterParcel, deadline: Deadline) -> None:
        self._desk.unload(self._trial, deadline)  # of a trainer that died
        try:
            self._desk.load(self._trial, parcel, deadline)
        except EngineRejected as error:
            error.applied = "nothing"
            error.remedy = error.remedy or f"the adapter before is served on; {MERGE}"
            raise
        self._desk.unload(self._trial, deadline)


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
