"""Trainer and engine on a GPU each: whole updates over NCCL beside one huge broadcast."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from weight_update.bench.gpu.colocated import GIBIBYTE, row_of
from weight_update.bench.gpu.limit import HugeBroadcast
from weight_update.bench.gpu.models import BigModel, Family, change
from weight_update.bench.gpu.rounds import Measured, Site
from weight_update.bench.rows import Pair, Row
from weight_update.bench.torchrl_peer import time_settings
from weight_update.weights.extract import extract_weights

ONE_BROADCAST = "one huge broadcast"
PEER = "TorchRL's settings"

# Promised multiples: of one huge broadcast for the transfer and for the whole call, and of one
# broadcast a tensor with NCCL's P2P and shared memory off, for the whole call.
_AIMS: dict[Family, tuple[float, float, float]] = {
    "llama": (1.15, 1.3, 1 / 50),
    "moe": (1.25, 1.4, 1 / 40),
}


def apart_rows(
    model: BigModel, url: str, devices: list[str], rounds: int, identity: Mapping[str, Any]
) -> Iterator[Row]:
    """Updates an engine on another device.

    Args:
        model: The model; its full size promises something on GPUs.
        url: The engine.
        devices: Device of the trainer, and of the engine.
        rounds: How often everything is measured.
        identity: What identifies the run.
    """
    device = torch.device(devices[0])
    source = model.build(device)
    tensors = [weight.read().detach() for weight in extract_weights(source)]
    site = Site(url, device, source, lambda seed: change(source, seed))
    with HugeBroadcast(sum(tensor.nbytes for tensor in tensors), devices) as limit:
        measured = site.measure(rounds, limit.seconds)
    theirs = time_settings(tensors, devices, rounds)
    promised = model.is_whole and device.type == "cuda"
    aims = _AIMS[model.family] if promised else (None, None, None)
    identity = {**identity, **measured.identity(), "settings": {"verify": "off"}}
    yield from _rows(model.title, measured, theirs, aims, identity)


def _rows(
    title: str,
    measured: Measured,
    theirs: list[float],
    aims: tuple[float | None, ...],
    identity: Mapping[str, Any],
) -> Iterator[Row]:
    transfers = [round.transfer for round in measured.rounds]
    yield Row(
        f"{title}, transfer",
        ONE_BROADCAST,
        transfers,
        aim=aims[0],
        correct=measured.correct,
        identity=identity,
    )
    yield row_of(
        f"{title}, whole update",
        ONE_BROADCAST,
        measured,
        aim=aims[1],
        allowed=4 * GIBIBYTE,
        identity=identity,
    )
    pairs = [Pair(ours.seconds, peer) for ours, peer in zip(measured.rounds, theirs, strict=True)]
    yield Row(f"{title}, against {PEER}", PEER, pairs, aim=aims[2], identity=identity)
