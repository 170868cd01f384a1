"""The size of a bucket over NCCL, and whether its tensors are packed: what costs less.

Beyond the wire, an update request costs the same whatever its size, and a tensor that travels by
itself costs a launch. A request is made while the bytes of the one before it travel, so all but the
first cost nothing if those take longer. So requests are as large as memory allows, and few tensors
travel as they are. The costs were measured on H200; that of a request is measured anew for each
fleet.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import ceil

import torch

from weight_update.options import LoadFormat
from weight_update.weights.buckets import DEFAULT_BUCKET_BYTES
from weight_update.weights.cargo import Format, Terms
from weight_update.weights.specs import TensorSpec

REQUEST_SECONDS = 3.5e-3
"""What a request costs where nothing was measured."""
LAUNCH_SECONDS = 19e-6
# The fastest wire: what it does not hide, none does.
_WIRE_BYTES_A_SECOND = 3.7e11
# What packing the first bucket costs; that of all others is hidden behind the wire.
_COPIED_BYTES_A_SECOND = 2.1e12
# What an update takes above the model, on either side, unless the user asks for more.
_ALLOWED_BYTES = 4 << 30
_LEAST_BYTES = DEFAULT_BUCKET_BYTES["cpu"]
# While one bucket travels, the next one is read: two exist on the trainer.
_BUCKETS_AT_ONCE = 2
# What is free is what was free when an engine started: activations have taken some since.
_SHARE = 0.5


@dataclass(frozen=True)
class Rooms:
    """How large a request may be.

    Attributes:
        packed: One whose tensors are packed.
        single: One whose tensors travel as they are.
        tight: Whether one of the two sides has less memory than what an update usually takes.
    """

    packed: int
    single: int
    tight: bool = False


def rooms(terms: Terms, trainer_bytes: int | None) -> Rooms:
    """How large requests may be, by what is free on both sides.

    Args:
        terms: What the user asked for, which wins, and what engines have.
        trainer_bytes: Memory that the trainer has free on the device that sends; None where
            that is not known.

    Example:
        >>> rooms(Terms(), None).packed == 2 << 30
        True
        >>> rooms(Terms(engine_bytes=1 << 30), None)
        Rooms(packed=536870912, single=536870912, tight=True)
    """
    if terms.bucket_bytes is not None:
        return Rooms(terms.bucket_bytes, terms.bucket_bytes)
    usual = DEFAULT_BUCKET_BYTES["cuda"]
    engine = usual if terms.engine_bytes is None else _share_of(terms.engine_bytes)
    trainer = _share_of(trainer_bytes) // _BUCKETS_AT_ONCE
    packed = max(_LEAST_BYTES, min(engine, trainer))
    single = max(_LEAST_BYTES, engine) if terms.in_place else packed
    return Rooms(packed, single, tight=min(engine, trainer) < usual)


def _share_of(free: int | None) -> int:
    return _ALLOWED_BYTES if free is None else min(_ALLOWED_BYTES, int(free * _SHARE))


def nccl_format(
    specs: Sequence[TensorSpec] | None,
    terms: Terms,
    load_format: LoadFormat = "auto",
    trainer_bytes: int | None = None,
) -> Format:
    """Flat buckets or one broadcast a tensor, and how large a request is.

    Args:
        specs: What is sent; None where it is not known yet.
        terms: Under which terms.
        load_format: What the user asked for.
        trainer_bytes: Memory that the trainer has free on the device that sends.

    Example:
        >>> specs = [TensorSpec(f"w{i}", torch.bfloat16, (4096, 4096)) for i in range(300)]
        >>> nccl_format(specs, Terms(engine_bytes=20 << 30, in_place=True)).reason
        'flat buckets: 5 cost 5 ms, one broadcast a tensor would 9 ms (300 tensors)'
    """
    room = rooms(terms, trainer_bytes)
    flat = Format(room.packed, _all)
    single = Format(room.single, _none)
    tight = ", as large as half of the memory that is free" if room.tight else ""
    if load_format != "auto":
        chosen = flat if load_format == "flattened_bucket" else single
        return replace(chosen, reason=f"load_format={load_format!r} was asked for{tight}")
    if specs is None:
        return replace(flat, reason=f"flat buckets, since a stream's tensors are not known{tight}")
    few, many = _costs(specs, room, terms.request_seconds or REQUEST_SECONDS)
    if many.seconds < few.seconds:
        singles = f"{_counted(len(specs), 'tensor')} in {_counted(many.requests, 'request')}"
        return replace(
            single,
            reason=f"one broadcast a tensor: {singles} cost {many}, "
            f"{_counted(few.requests, 'flat bucket')} would {few}{tight}",
        )
    return replace(
        flat,
        reason=f"flat buckets: {few.requests} cost {few}, one broadcast a tensor would {many} "
        f"({_counted(len(specs), 'tensor')}){tight}",
    )


@dataclass(frozen=True)
class _Cost:
    """What an update costs beyond the time of its bytes on the wire."""

    requests: int
    seconds: float

    def __str__(self) -> str:
        return f"{1e3 * self.seconds:.0f} ms"


def _costs(specs: Sequence[TensorSpec], room: Rooms, request: float) -> tuple[_Cost, _Cost]:
    """Of flat buckets, and of one broadcast a tensor."""
    nbytes = sum(spec.nbytes for spec in specs)
    flat, single = (_requests(nbytes, size, request) for size in (room.packed, room.single))
    first = min(nbytes, room.packed) / _COPIED_BYTES_A_SECOND
    return (
        replace(flat, seconds=flat.seconds + first),
        replace(single, seconds=single.seconds + len(specs) * LAUNCH_SECONDS),
    )


def _requests(nbytes: int, size: int, request: float) -> _Cost:
    """What requests of a size cost where one is made while the one before it travels."""
    count = max(1, ceil(nbytes / size))
    hidden = min(request, size / _WIRE_BYTES_A_SECOND)
    return _Cost(count, request + (count - 1) * (request - hidden))


def _counted(count: int, what: str) -> str:
    return f"{count:,} {what}" + ("" if count == 1 else "s")


def _all(_: TensorSpec) -> bool:
    return True


def _none(_: TensorSpec) -> bool:
    return False


def free_bytes(device: torch.device, own: int = 0) -> int | None:
    """Memory of a GPU that buffers may take; None where there is no GPU.

    What torch keeps of memory that nothing uses is free as well.

    Args:
        device: The GPU.
        own: What the buffers have already.
    """
    if device.type != "cuda" or not torch.cuda.is_available():
        return None
    free, _ = torch.cuda.mem_get_info(device)
    known = torch.cuda.memory_stats_as_nested_dict(device)  # all at once, before they are flattened
    reserved, allocated = (
        known[kind]["all"]["current"] for kind in ("reserved_bytes", "allocated_bytes")
    )
    return int(free + reserved - allocated + own)
