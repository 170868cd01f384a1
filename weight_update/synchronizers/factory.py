"""The factory: which synchronizer a deployment takes, by one table.

Everything that cannot work fails here, and not at the first refit.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from weight_update.errors import ConfigurationError
from weight_update.options import check_flag, check_positive
from weight_update.synchronizers.base import DeliverySynchronizer
from weight_update.synchronizers.buffer_size import check_buffer_size
from weight_update.synchronizers.interface import WeightSynchronizer
from weight_update.synchronizers.protocols import Cluster, Generation, Policy
from weight_update.synchronizers.rows import later
from weight_update.synchronizers.rows.dynamo import DynamoWeightSynchronizer
from weight_update.synchronizers.rows.sglang import (
    SGLangColocatedWeightSynchronizer,
    SGLangDisaggregatedWeightSynchronizer,
)
from weight_update.synchronizers.rows.vllm import (
    CollectiveWeightSynchronizer,
    IPCWeightSynchronizer,
)

BACKENDS = ("dynamo", "sglang", "vllm")
LATER = ("megatron", "trtllm")
_RESHARD = "nccl_reshard"
_ROWS: dict[tuple[str, bool], type[DeliverySynchronizer]] = {
    ("sglang", True): SGLangColocatedWeightSynchronizer,
    ("sglang", False): SGLangDisaggregatedWeightSynchronizer,
    ("vllm", True): IPCWeightSynchronizer,
}
_COLLECTIVES = {"vllm": CollectiveWeightSynchronizer, "dynamo": DynamoWeightSynchronizer}


def create_weight_synchronizer(
    policy: Policy,
    generation: Generation,
    generation_backend: str,
    colocated: bool,
    train_cluster: Cluster | None = None,
    inference_cluster: Cluster | None = None,
    refit_buffer_size_gb: float | None = None,
    refit_timeout_s: float | None = None,
) -> WeightSynchronizer:
    """Makes the synchronizer that fits a deployment.

    Args:
        policy: The trainer: a ``TorchPolicy``, or NeMo-RL's own.
        generation: The engines: a ``SGLangGeneration``, a ``VLLMGeneration``, or NeMo-RL's own.
        generation_backend: ``"sglang"``, ``"vllm"`` or ``"dynamo"``.
        colocated: Whether trainer and engines share their devices.
        train_cluster: Where the trainer's workers run; needed where devices are not shared,
            except for SGLang, which has a group of its own.
        inference_cluster: Where the engines' workers run; likewise.
        refit_buffer_size_gb: Size of a buffer, in GiB; None takes a share of the free memory.
        refit_timeout_s: Seconds for one refit; None takes the default, which is finite.

    Raises:
        ConfigurationError: A ``ValueError``: an argument is wrong, or missing.
        NotSupported: A ``NotImplementedError``: this deployment is not there yet, and the text
            names what works instead.

    Example:
        >>> create_weight_synchronizer(None, None, "sgl", colocated=False)
        Traceback (most recent call last):
        weight_update.errors.ConfigurationError: Unknown generation backend 'sgl'; supported: ...
    """
    asked = _Asked(policy, generation, generation_backend, colocated)
    asked.check(refit_buffer_size_gb, refit_timeout_s)
    row = _ROWS.get((generation_backend, colocated))
    if row is not None:
        return row(policy, generation, refit_buffer_size_gb, refit_timeout_s=refit_timeout_s)
    clusters = asked.checked_clusters(train_cluster, inference_cluster)
    return _COLLECTIVES[generation_backend](
        policy,
        generation,
        *clusters,
        refit_timeout_s,
        release_grads_before_refit=asked.releases,
        refit_buffer_size_gb=refit_buffer_size_gb,
    )


@dataclass(frozen=True)
class _Asked:
    """A deployment that is asked for, and what speaks against it."""

    policy: Policy
    generation: Generation
    backend: str
    colocated: bool

    @property
    def releases(self) -> bool:
        """Whether the trainer is to free gradients before a refit."""
        return _setting(self.policy, "release_grads_before_refit") is True

    @property
    def _transport(self) -> Any:
        told = _setting(self.generation, "refit_transport")
        return told if isinstance(told, str) else None

    def check(self, gigabytes: float | None, seconds: float | None) -> None:
        """Raises what speaks against it, in the table's order."""
        self._check_backend()
        check_flag("colocated", self.colocated)
        if self.releases:
            self._check_release()
        self._check_transport()
        if gigabytes is not None:
            check_buffer_size(gigabytes)
        if seconds is not None:
            check_positive("refit_timeout_s", seconds, number=float)
        if self.backend == "megatron":
            raise later.megatron()
        if self.colocated and self.backend == "dynamo":
            raise later.colocated_dynamo()
        if self.colocated and self.backend == "trtllm":
            raise later.trtllm()

    def _check_backend(self) -> None:
        """Raises unless the backend is known, and the one that the engines are of."""
        if self.backend not in (*BACKENDS, *LATER):
            raise ConfigurationError(
                f"Unknown generation backend {self.backend!r}; supported: {', '.join(BACKENDS)}; "
                f"later: {', '.join(LATER)}"
            )
        fits = getattr(type(self.generation), "backends", (self.backend,))
        if self.backend not in fits:
            raise ConfigurationError(
                f"generation_backend={self.backend!r}, and a {type(self.generation).__name__} "
                f"is for {' or '.join(map(repr, fits))}"
            )

    def _check_release(self) -> None:
        """Raises if gradients are to be freed where that does not help."""
        if not _setting(self.policy, "megatron_cfg", "enabled"):
            raise ConfigurationError("release_grads_before_refit needs a Megatron policy")
        if self.colocated or self.backend not in ("vllm", "trtllm"):
            raise ConfigurationError(
                "release_grads_before_refit needs vLLM or TensorRT-LLM with colocated=False"
            )
        if self._transport not in (None, _RESHARD):
            raise ConfigurationError(
                f"release_grads_before_refit does not go with refit_transport={self._transport!r}",
                remedy=f"set refit_transport to None or {_RESHARD!r}",
            )

    def _check_transport(self) -> None:
        """Raises if a checkpoint engine is to bring the weights."""
        if self._transport not in (None, _RESHARD):
            raise later.checkpoint_engine(self._transport, self.backend, colocated=self.colocated)

    def checked_clusters(
        self, train_cluster: Cluster | None, inference_cluster: Cluster | None
    ) -> tuple[Cluster, Cluster]:
        """Both clusters, if one group can span trainer and engines; raises if not."""
        if train_cluster is None or inference_cluster is None:
            raise ConfigurationError(
                "train_cluster and inference_cluster are required where trainer and engines do "
                "not share their devices",
                remedy="pass a StaticCluster for each, or NeMo-RL's own",
            )
        if self._transport == _RESHARD:
            raise later.nccl_reshard()
        if self.backend == "trtllm":
            raise later.trtllm()
        return train_cluster, inference_cluster


def _setting(side: Any, *path: str) -> Any:
    """A setting of NeMo-RL's configuration; None where a side has none."""
    value = getattr(side, "cfg", None)
    for key in path:
        value = value.get(key) if isinstance(value, Mapping) else None
    return value
