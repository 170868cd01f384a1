"""A PyTorch trainer as a synchronizer's policy side."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from weight_update.delivery.delivery import default_device, provided
from weight_update.errors import ConfigurationError
from weight_update.synchronizers.facades.optimizer_state import OptimizerState
from weight_update.transports.sizing import free_bytes
from weight_update.weights.extract import device_of, extract_weights
from weight_update.weights.stream import Stream


class TorchPolicy:
    """A trainer that holds a torch model: plain, behind DDP, FSDP2, or with LoRA adapters.

    Of a sharded model every rank makes one, and calls the synchronizer; of one that each rank holds
    whole (DDP), one rank does.

    Args:
        model: The training model, or a function that returns what to send, asked at every update.
        optimizer: Whose state is moved out of the way while engines need the memory: anything
            with a ``state`` like that of torch's optimizers.
        cfg: A configuration that synchronizers may look at.

    Raises:
        ConfigurationError: There is nothing that could be sent, or no state in the optimizer.

    Example:
        >>> policy = TorchPolicy(nn.Linear(2, 1))
        >>> policy.prepare_refit_info()
        {'weight': ((1, 2), torch.float32), 'bias': ((1,), torch.float32)}
    """

    def __init__(
        self,
        model: nn.Module | Callable[[], Any],
        optimizer: Any = None,
        *,
        cfg: Mapping[str, Any] | None = None,
    ) -> None:
        if isinstance(model, nn.Module):
            device_of(model)
        elif not callable(model) or isinstance(model, type):
            raise ConfigurationError(
                f"a torch module is needed, not {type(model).__name__}",
                remedy="pass the model, or a function that returns what to send",
            )
        if optimizer is not None and not isinstance(getattr(optimizer, "state", None), Mapping):
            raise ConfigurationError(
                f"{type(optimizer).__name__} has no optimizer's state",
                remedy="pass the optimizer itself, or None",
            )
        self.cfg = {} if cfg is None else cfg
        self._model = model
        module = model if isinstance(model, nn.Module) else None
        self._state = OptimizerState(optimizer, module)

    def source(self) -> Any:
        """What an update sends; adapters are merged and shards gathered on the way."""
        return self._model if isinstance(self._model, nn.Module) else self._model()

    def prepare_refit_info(self) -> dict[str, tuple[tuple[int, ...], torch.dtype]] | None:
        """Shape and dtype of everything that an update sends, by name; None for a stream."""
        given = provided(self.source())
        if isinstance(given, Stream):
            return None
        specs = (weight.spec for weight in extract_weights(given))
        return {spec.name: (tuple(spec.shape), spec.dtype) for spec in specs}

    def offload_before_refit(self) -> None:
        """Moves the optimizer's state to pinned memory of the host, and returns when it is there.

        What torch keeps of the GPU's memory for later is given back as well, so that engines of
        other processes can have it. Gradients stay: drop them before. Without CUDA there is
        nothing to do: the state is in the host's memory. It may be repeated.

        Raises:
            WeightUpdateError: It could not be moved; everything is where it was.
        """
        self._state.to_host()
        torch.cuda.empty_cache()

    def offload_after_refit(self) -> None:
        """Moves the optimizer's state back to where it was, and returns when it is there.

        It may be repeated, and called again after it failed.

        Raises:
            WeightUpdateError: A GPU has not the memory any more; nothing is lost.
        """
        self._state.to_devices()

    def get_free_memory_bytes(self) -> int:
        """Memory that buffers of an update may take, here.

        Of the GPUs that hold the model, the least that one has: what the driver has free, and what
        torch keeps unused. Without GPUs, what the host has free, within this container's bound. Of
        a sharded trainer, each rank counts its own.
        """
        gpus = {device for device in self._devices() if device.type == "cuda"}
        free = [size for gpu in gpus if (size := free_bytes(gpu)) is not None]
        return min(free) if free else free_host_bytes()

    def _devices(self) -> Iterator[torch.device]:
        if not isinstance(self._model, nn.Module):
            yield default_device()
            return
        for tensor in (*self._model.parameters(), *self._model.buffers()):
            yield tensor.device


def free_host_bytes(root: Path = Path("/")) -> int:
    """Memory of the host that could be had without swapping.

    Args:
        root: Where ``proc`` and ``sys`` are.
    """
    meminfo = (root / "proc/meminfo").read_text()
    lines = (line.partition(":") for line in meminfo.splitlines())
    sizes = {name: int(size.split()[0]) * 1024 for name, _, size in lines if size.split()}
    bound = _left_in_cgroup(root / "sys/fs/cgroup")
    available = sizes["MemAvailable"]
    return available if bound is None else min(available, bound)


def _left_in_cgroup(folder: Path) -> int | None:
    """What a container's bound leaves; files that it has cached could be dropped."""
    try:
        limit = int((folder / "memory.max").read_text())
        used = int((folder / "memory.current").read_text())
        stat = (folder / "memory.stat").read_text()
        rows = (row.split() for row in stat.splitlines() if row)
        cached = {name: int(size) for name, size in rows}.get("inactive_file", 0)
    except (OSError, ValueError):  # no bound ("max"), or none that can be read
        return None
    return max(0, limit - used + cached)
