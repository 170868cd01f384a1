"""Trainer and engine on one GPU: CUDA IPC beside one pack and one unpack of all bytes."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from weight_update.bench.gpu.models import BigModel, change
from weight_update.bench.gpu.rounds import Measured, Site, settled, timed_update
from weight_update.bench.rows import Row

GIBIBYTE = 1 << 30
PACK_AND_UNPACK = "one pack, one unpack"

_RANK = 16
_LORA_AIM = 1.5


@dataclass(frozen=True)
class Hand:
    """One way of handing a model over.

    Attributes:
        name: What the job is called.
        scheme: Arguments of the scheme.
        aim: The promised multiple of one pack and one unpack.
        allowed: Memory that either side may take above its model.
    """

    name: str
    scheme: Mapping[str, Any] = field(default_factory=dict)
    aim: float | None = None
    allowed: int | None = None


def hands(nbytes: int) -> tuple[Hand, ...]:
    """The ways, for a model of so many bytes."""
    return (
        Hand("ipc", aim=3.0, allowed=4 * GIBIBYTE),
        Hand("ipc, one bucket", {"bucket_bytes": nbytes}, aim=2.2),
        Hand("ipc, buckets of 512 MiB", {"bucket_bytes": GIBIBYTE // 2}),
        Hand("ipc, one handle a tensor", {"load_format": "tensors"}),
    )


class BareCopies:
    """Copies tensors into one buffer and back, in this process, a plain copy a tensor each way.

    Nothing of the library or of an engine is in it: it is what the memory of the GPU allows
    those who pack and unpack. What comes back is what was there.
    """

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self._tensors = [tensor.detach().view(-1) for tensor in tensors]
        sizes = [tensor.numel() for tensor in self._tensors]
        flat = self._tensors[0].new_empty(sum(sizes))
        self._places = torch.split(flat, sizes)
        self._device = flat.device

    @torch.no_grad()
    def seconds(self) -> float:
        """Seconds of both ways."""
        settled(self._device)
        start = time.perf_counter()
        for place, tensor in zip(self._places, self._tensors, strict=True):
            place.copy_(tensor)
        for place, tensor in zip(self._places, self._tensors, strict=True):
            tensor.copy_(place)
        settled(self._device)
        return time.perf_counter() - start


def colocated_rows(
    model: BigModel, url: str, device: torch.device, rounds: int, identity: Mapping[str, Any]
) -> Iterator[Row]:
    """Hands a model over in each way.

    Args:
        model: The model; its full size promises something on a GPU.
        url: An engine on the same device.
        device: The device.
        rounds: How often each way is measured.
        identity: What identifies the run.
    """
    source = model.build(device)
    bare = BareCopies(list(source.parameters()))
    bare.seconds()
    for hand in hands(model.nbytes):
        scheme = {"transport": "ipc", **hand.scheme}
        site = Site(url, device, source, lambda seed: change(source, seed), scheme)
        promised = model.is_whole and device.type == "cuda"
        yield row_of(
            f"{model.title}, {hand.name}",
            PACK_AND_UNPACK,
            site.measure(rounds, bare.seconds),
            aim=hand.aim if promised else None,
            allowed=hand.allowed,
            identity={**identity, "settings": scheme},
        )


def row_of(
    job: str,
    limit: str,
    measured: Measured,
    *,
    aim: float | None,
    allowed: int | None,
    identity: Mapping[str, Any],
) -> Row:
    """The row of a job whose whole calls were measured."""
    return Row(
        job,
        limit,
        [round.whole for round in measured.rounds],
        aim=aim,
        extra_memory_bytes=measured.memory.trainer,
        engine_memory_bytes=measured.memory.engine,
        allowed_memory_bytes=allowed,
        correct=measured.correct,
        identity={**identity, **measured.identity()},
    )


def lora_rows(
    model: BigModel, url: str, device: torch.device, rounds: int, identity: Mapping[str, Any]
) -> Iterator[Row]:
    """Merges adapters on all linear layers and hands the model over, beside one without any.

    Args:
        model: The model; its full size promises something on a GPU.
        url: An engine on the same device.
        device: The device.
        rounds: How often both are measured.
        identity: What identifies the run.
    """
    import peft

    base = model.build(device)
    plain = {name: parameter.detach() for name, parameter in base.named_parameters()}
    settings = peft.LoraConfig(r=_RANK, lora_alpha=2 * _RANK, target_modules="all-linear")
    adapted = peft.get_peft_model(base, settings)
    adapters = next(p.dtype for name, p in adapted.named_parameters() if "lora_A" in name)
    scheme = {"transport": "ipc"}
    site = Site(url, device, adapted, lambda seed: change(adapted, seed), scheme)
    beside = Site(url, device, plain, lambda _: None, scheme)
    with beside.sender() as sender:
        sender.update_weights()
        measured = site.measure(rounds, lambda: timed_update(sender, device)[0])
    described = {"rank": _RANK, "adapters": str(adapters), **scheme}
    yield row_of(
        f"{model.title}, LoRA r={_RANK} merged, ipc",
        "plain push",
        measured,
        aim=_LORA_AIM if model.is_whole and device.type == "cuda" else None,
        allowed=4 * GIBIBYTE,
        identity={**identity, "settings": described},
    )
