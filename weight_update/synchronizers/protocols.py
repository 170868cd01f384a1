"""What synchronizers ask of a trainer, of engines and of clusters: NeMo-RL's names, and ours.

Methods of NeMo-RL's objects may return references of Ray, futures or plain values, in a list or
alone; :func:`~weight_update.synchronizers.resolve.resolve` waits for them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from weight_update.delivery.delivery import Delivery


class Policy(Protocol):
    """A trainer."""

    def offload_before_refit(self) -> object:
        """Frees memory that the engines need during a refit."""

    def offload_after_refit(self) -> object:
        """Ends what :meth:`offload_before_refit` began."""

    def prepare_refit_info(self) -> Any:
        """Names, shapes and dtypes of what will be sent."""

    def get_free_memory_bytes(self) -> Any:
        """Memory that is free for a buffer, of the worker that has the least."""


class Generation(Protocol):
    """Engines."""

    def prepare_for_generation(self, *, tags: Sequence[str]) -> object:
        """Takes memory back for ``"weights"`` or ``"kv_cache"``; may be repeated."""

    def prepare_refit_info(self, info: Any, /) -> object:
        """Learns what will come."""


class ReadablePolicy(Policy, Protocol):
    """A trainer whose weights can be read here, such as a :class:`TorchPolicy`."""

    def source(self) -> Any:
        """What a delivery takes: a module, a mapping, a checkpoint or a stream."""


class ReachableGeneration(Generation, Protocol):
    """Engines that can be spoken to from here, such as a :class:`SGLangGeneration`.

    Attributes:
        urls: Where they are.
    """

    urls: Sequence[str]

    def delivery(self, *, colocated: bool, timeout_s: float | None, policy: Any) -> Delivery:
        """What brings a policy's weights to them."""


class Cluster(Protocol):
    """Where workers run."""

    def world_size(self) -> int:
        """How many ranks there are."""

    def get_master_address_and_port(self) -> tuple[str, int]:
        """Where a group can meet; a new port at every call."""


@dataclass(frozen=True)
class CollectiveSenderSpec:
    """How engines want a collective's bytes.

    Attributes:
        nccl_peer: Whose handshake they speak, ``"nemo"`` or ``"vllm"``; the wrong one hangs.
        buffer_size_bytes: Size of a packed buffer; None leaves it to the sender.
        num_buffers: How many of them; None leaves it to the sender.
    """

    nccl_peer: str = "nemo"
    buffer_size_bytes: int | None = None
    num_buffers: int | None = None
