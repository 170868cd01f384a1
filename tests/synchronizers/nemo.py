"""Stand-ins for NeMo-RL's own policy, generation and cluster: its method names and signatures.

They stand for NeMo-RL's objects, which are not installed here; nothing of them is NeMo-RL's code.
Workers' answers are futures, as Ray's references are in NeMo-RL. Every call is noted in one
journal, and can be told to fail.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import torch

from weight_update.synchronizers.protocols import CollectiveSenderSpec

INFO = {"a.weight": ((2, 3), torch.bfloat16), "b.weight": ((4,), torch.float32)}
INFO_BYTES = 28
FREE_BYTES = 1000


@dataclass
class Journal:
    """What was called, in order, by short names.

    Attributes:
        faults: By name of a call, what its next calls raise.
        futures: By name of a call, what it returns instead of a future that is done.
        arguments: By name of a call, those of the last one.
    """

    calls: list[str] = field(default_factory=list)
    faults: dict[str, list[Exception]] = field(default_factory=dict)
    futures: dict[str, Any] = field(default_factory=dict)
    arguments: dict[str, dict[str, Any]] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def fail(self, call: str, *, times: int = 1, words: str = "broke") -> None:
        self.faults[call] = [RuntimeError(f"{call} {words}") for _ in range(times)]

    def note(self, call: str, **arguments: Any) -> None:
        with self._lock:
            self.calls.append(call)
            self.arguments[call] = arguments
            planned = self.faults.get(call)
            error = planned.pop(0) if planned else None
        if error is not None:
            raise error

    def worked(self, call: str, result: Any = None, **arguments: Any) -> Any:
        """What workers answer: a list of futures."""
        self.note(call, **arguments)
        return self.futures.get(call, [done(result)])

    def take(self) -> list[str]:
        """What was called since the last time."""
        with self._lock:
            taken, self.calls = self.calls, []
        return taken

    def count(self, call: str) -> int:
        return Counter(self.calls)[call]


def done(result: Any) -> Future[Any]:
    future: Future[Any] = Future()
    future.set_result(result)
    return future


def failed(error: Exception) -> Future[Any]:
    future: Future[Any] = Future()
    future.set_exception(error)
    return future


class NemoPolicy:
    """A policy of workers, as NeMo-RL's."""

    def __init__(self, journal: Journal, cfg: Mapping[str, Any] | None = None) -> None:
        self.journal = journal
        self.cfg = cfg or {"megatron_cfg": {"enabled": False}}

    def offload_before_refit(self) -> None:
        self.journal.note("P.offload")

    def offload_after_refit(self) -> None:
        self.journal.note("P.restore")

    def prepare_refit_info(self) -> dict[str, Any] | None:
        self.journal.note("P.info")
        return dict(INFO)

    def get_free_memory_bytes(self) -> int:
        self.journal.note("P.free")
        return FREE_BYTES

    def stream_weights_via_ipc_zmq(
        self, buffer_size_bytes: int, kv_scales: dict[str, float] | None = None
    ) -> list[Any]:
        return self.journal.worked(
            "P.stream", buffer_size_bytes=buffer_size_bytes, kv_scales=kv_scales
        )

    def init_collective(
        self, ip: str, port: int, world_size: int, *, train_world_size: int, nccl_peer: str = "nemo"
    ) -> list[Any]:
        return self.journal.worked(
            "P.init", port=port, world_size=world_size, train=train_world_size, peer=nccl_peer
        )

    def broadcast_weights_for_collective(
        self,
        kv_scales: dict[str, float] | None = None,
        *,
        buffer_size_bytes: int | None = None,
        num_buffers: int | None = None,
        refit_timeout_s: float | None = None,
    ) -> list[Any]:
        return self.journal.worked(
            "P.broadcast",
            kv_scales=kv_scales,
            buffer_size_bytes=buffer_size_bytes,
            num_buffers=num_buffers,
            refit_timeout_s=refit_timeout_s,
        )

    def connect_sglang_rollout_engines(
        self, *, engine_gpu_counts: Sequence[int], engine_gpu_offsets: Sequence[int]
    ) -> None:
        self.journal.note("P.connect", counts=engine_gpu_counts, offsets=engine_gpu_offsets)

    def connect_sglang_rollout_engines_distributed(
        self, *, rollout_engines: list[Any], engine_gpu_counts: Sequence[int]
    ) -> None:
        self.journal.note("P.connect", engines=rollout_engines, counts=engine_gpu_counts)

    def update_weights_to_sglang_colocated(
        self,
        *,
        rollout_engines: list[Any],
        buffer_size_bytes: int,
        target_precision: str = "bf16",
        sglang_quantization_cfg: dict[str, Any] | None = None,
    ) -> list[Any]:
        return self.journal.worked(
            "P.send",
            engines=rollout_engines,
            buffer_size_bytes=buffer_size_bytes,
            precision=target_precision,
            quantization=sglang_quantization_cfg,
        )

    def update_weights_to_sglang_distributed(
        self,
        *,
        rollout_engines: list[Any],
        rollout_engine_lock: Any,
        buffer_size_bytes: int,
        target_precision: str = "bf16",
        sglang_quantization_cfg: dict[str, Any] | None = None,
    ) -> list[Any]:
        return self.journal.worked(
            "P.send",
            engines=rollout_engines,
            lock=rollout_engine_lock,
            buffer_size_bytes=buffer_size_bytes,
            precision=target_precision,
            quantization=sglang_quantization_cfg,
        )


class NemoGeneration:
    """What every generation of NeMo-RL has."""

    def __init__(self, journal: Journal) -> None:
        self.journal = journal
        self.cfg: dict[str, Any] = {}

    def prepare_for_generation(self, *, tags: Sequence[str]) -> bool:
        self.journal.note(f"G.prepare {tags[0]}")
        return True

    def prepare_refit_info(self, info: Any) -> None:
        self.journal.note("G.info", info=info)


class NemoSGLang(NemoGeneration):
    """SGLang engines as Ray actors, in the form whose accessor gives a lock as well."""

    def __init__(self, journal: Journal, new: int = 2) -> None:
        super().__init__(journal)
        self.sglang_cfg: dict[str, Any] = {
            "sglang_cfg": {"quantization": {"scheme": "bf16", "group_size": 16}}
        }
        self.pause_generation_mode = "retract"
        self.rollout_engine_lock = "the lock"
        self.engines: list[Any] = ["engine 0", "engine 1"]
        self.new = new
        self.flushes = True

    def get_updatable_engines_and_lock(self) -> tuple[Any, ...]:
        self.journal.note("G.engines")
        return self.engines, self.rollout_engine_lock, self.new, [2, 2], [0, 2]

    def clear_updatable_num_new_engines(self) -> None:
        self.journal.note("G.clear")
        self.new = 0

    def recover_updatable_engines(self) -> None:
        self.journal.note("G.recover")

    def pause_generation(self, mode: str) -> None:
        self.journal.note("G.pause", mode=mode)

    def continue_generation(self) -> None:
        self.journal.note("G.continue")

    def begin_weight_update(self) -> None:
        self.journal.note("G.begin")

    def end_weight_update(self) -> None:
        self.journal.note("G.end")

    def invalidate_kv_cache(self) -> bool:
        self.journal.note("G.invalidate")
        return self.flushes


class LaterNemoSGLang(NemoSGLang):
    """The later form: four items, and no lock among them."""

    get_updatable_engines_and_lock = None  # type: ignore[assignment]

    def get_updatable_engines(self) -> tuple[Any, ...]:
        self.journal.note("G.engines")
        return self.engines, self.new, [2, 2], [0, 2]


class Workers:
    """The generation's workers: `dp_size` shards of two."""

    def __init__(self, dp_size: int) -> None:
        self.dp_size = dp_size
        self.workers = [object() for _ in range(2 * dp_size)]


class NemoVLLM(NemoGeneration):
    """vLLM engines as Ray actors."""

    def __init__(self, journal: Journal, dp_size: int = 2) -> None:
        super().__init__(journal)
        self.worker_group = Workers(dp_size)
        self.spec = CollectiveSenderSpec()
        self.verdict: Any = True
        self.membership: Any = None

    def update_weights_via_ipc_zmq(self) -> list[Any]:
        return self.journal.worked("G.open", self.verdict)

    def init_collective(
        self, ip: str, port: int, world_size: int, *, train_world_size: int
    ) -> list[Any]:
        return self.journal.worked(
            "G.init", port=port, world_size=world_size, train=train_world_size
        )

    def rebuild_collective(self, membership: Any, ip: str, port: int) -> list[Any]:
        assert self.membership is membership, "set_refit_membership() comes first"
        return self.journal.worked("G.rebuild", membership=membership, port=port)

    def set_refit_membership(self, membership: Any) -> None:
        self.journal.note("G.member")
        self.membership = membership

    def update_weights_from_collective(self, refit_timeout_s: float | None = None) -> list[Any]:
        return self.journal.worked("G.receive", self.verdict, refit_timeout_s=refit_timeout_s)

    def get_collective_sender_spec(self) -> CollectiveSenderSpec:
        return self.spec

    def get_inference_world_size(self) -> int | None:
        return None


class NemoCluster:
    """A cluster of workers; every call gives another port."""

    def __init__(self, world_size: int) -> None:
        self._world_size = world_size
        self._port = 29500

    def world_size(self) -> int:
        return self._world_size

    def get_master_address_and_port(self) -> tuple[str, int]:
        self._port += 1
        return "10.0.0.1", self._port
