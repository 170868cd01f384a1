"""What an optimizer keeps on GPUs, moved to the host's memory and back."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from weight_update.errors import WeightUpdateError

_GPUS = frozenset({"cuda"})
# Of an optimizer: to step, and to tell its state.
_GUARDED = ("register_step_pre_hook", "register_state_dict_pre_hook")


@dataclass(frozen=True)
class _Hosted:
    """Memory of a GPU that was given up, and the bytes that were in it."""

    storage: torch.UntypedStorage
    copy: torch.Tensor

    @classmethod
    def copied(cls, storage: torch.UntypedStorage) -> _Hosted:
        pinned = storage.device.type == "cuda"
        copy = torch.empty(storage.nbytes(), dtype=torch.uint8, pin_memory=pinned)
        copy.copy_(_bytes_of(storage), non_blocking=True)
        return cls(storage, copy)

    def restore(self) -> None:
        self.storage.resize_(self.copy.numel())
        _bytes_of(self.storage).copy_(self.copy, non_blocking=True)


class OptimizerState:
    """Moves the state of an optimizer to pinned memory of the host, and back.

    Only the memory behind the tensors is exchanged. They stay the same objects, of the same dtype
    on the same device: views of one buffer, tensors that are there twice, and the local parts of
    DTensors included. What is on the host anyway (step counters, most often) is not touched, and
    neither is memory that weights or gradients live in too. Until it is back, the optimizer refuses
    to step and to tell its state. A CUDA graph that was captured over
    an optimizer's step does not survive it.

    Args:
        optimizer: Anything with a ``state``, or with an ``optimizer`` that has one; None has none.
        model: What must stay where it is.
        devices: Kinds of devices whose memory is given up.
    """

    def __init__(
        self, optimizer: Any, model: nn.Module | None, devices: Collection[str] = _GPUS
    ) -> None:
        self._optimizer = getattr(optimizer, "optimizer", optimizer)
        self._model, self._devices = model, devices
        self._hosted: list[_Hosted] = []
        self._guards: list[RemovableHandle] = []

    @property
    def hosted_bytes(self) -> int:
        """How much is on the host now."""
        return sum(hosted.copy.numel() for hosted in self._hosted)

    def to_host(self) -> None:
        """Gives the GPUs' memory up; what is given up already is left alone.

        Raises:
            WeightUpdateError: It could not be copied; everything is where it was.
        """
        try:
            hosted = [_Hosted.copied(storage) for storage in self._movable()]
            _synchronize(one.storage.device for one in hosted)
        except RuntimeError as error:
            raise WeightUpdateError(
                f"the optimizer's state was not moved to the host: {error}",
                phase="plan",
                remedy="the host needs as much free memory as the state takes on its GPUs",
            ) from error
        self._guard()
        for one in hosted:
            one.storage.resize_(0)
        self._hosted += hosted

    def to_devices(self) -> None:
        """Takes everything back that was given up; may be called again after a failure.

        Raises:
            WeightUpdateError: A GPU has not the memory any more; the values are kept.
        """
        try:
            for one in self._hosted:
                one.restore()
            _synchronize(one.storage.device for one in self._hosted)
        except RuntimeError as error:
            for one in self._hosted:  # all of it is on the host, and none of it in two places
                one.storage.resize_(0)
            raise WeightUpdateError(
                f"the optimizer's state did not get back from the host: {error}",
                phase="continue",
                remedy="free memory of the GPU, and call offload_after_refit() again",
            ) from error
        self._hosted = []
        while self._guards:
            self._guards.pop().remove()

    def _guard(self) -> None:
        """Refuses what would read memory that is not there, and end the process."""
        if not self._guards:
            registers = (getattr(self._optimizer, name, None) for name in _GUARDED)
            self._guards = [register(_refuse) for register in registers if register is not None]

    def _movable(self) -> Iterator[torch.UntypedStorage]:
        """Memory of GPUs that belongs to the state alone, each once."""
        seen = {storage.data_ptr() for storage in _storages(_kept_by(self._model))}
        for storage in _storages(getattr(self._optimizer, "state", {})):
            there = storage.device.type in self._devices and storage.nbytes()
            if there and storage.resizable() and storage.data_ptr() not in seen:
                seen.add(storage.data_ptr())
                yield storage


def _refuse(*_: Any) -> None:
    raise WeightUpdateError(
        "the optimizer's state is on the host", remedy="call offload_after_refit() first"
    )


def _kept_by(model: nn.Module | None) -> list[torch.Tensor]:
    if model is None:
        return []
    parameters = list(model.parameters())
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    return [*parameters, *gradients, *model.buffers()]


def _storages(value: Any) -> Iterator[torch.UntypedStorage]:
    """The memory of all tensors in nested containers, as often as it is named."""
    if isinstance(value, torch.Tensor):
        yield from _storages_of(value)
    elif isinstance(value, Mapping):
        for inner in value.values():
            yield from _storages(inner)
    elif isinstance(value, (list, tuple)):
        for inner in value:
            yield from _storages(inner)


def _storages_of(tensor: torch.Tensor) -> Iterator[torch.UntypedStorage]:
    flatten = getattr(tensor, "__tensor_flatten__", None)
    if flatten is not None:  # DTensor, quantised states: tensors around tensors
        for name in flatten()[0]:
            yield from _storages(getattr(tensor, name))
    elif tensor.layout is torch.strided:
        yield tensor.untyped_storage()


def _bytes_of(storage: torch.UntypedStorage) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def _synchronize(devices: Iterable[torch.device]) -> None:
    for device in {device for device in devices if device.type == "cuda"}:
        torch.cuda.synchronize(device)
