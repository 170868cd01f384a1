"""Synchronizers: one factory that picks the path for a deployment."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from weight_update.synchronizers.interface import Timer, WeightSynchronizer

if TYPE_CHECKING:
    from weight_update.synchronizers.facades.cluster import StaticCluster
    from weight_update.synchronizers.facades.dynamo import DynamoGeneration
    from weight_update.synchronizers.facades.sglang import SGLangGeneration
    from weight_update.synchronizers.facades.torch_policy import TorchPolicy
    from weight_update.synchronizers.facades.vllm import VLLMGeneration
    from weight_update.synchronizers.factory import create_weight_synchronizer
    from weight_update.synchronizers.membership import (
        NoSurvivingShards,
        RefitMembership,
        plan_refit_membership,
    )
    from weight_update.synchronizers.protocols import CollectiveSenderSpec
    from weight_update.synchronizers.rows.dynamo import DynamoWeightSynchronizer
    from weight_update.synchronizers.rows.sglang import (
        SGLangColocatedWeightSynchronizer,
        SGLangDisaggregatedWeightSynchronizer,
    )
    from weight_update.synchronizers.rows.vllm import (
        CollectiveWeightSynchronizer,
        IPCWeightSynchronizer,
    )

# Names are imported on first use: a row needs no other row's engine.
_HOMES = {
    "StaticCluster": "facades.cluster",
    "DynamoGeneration": "facades.dynamo",
    "SGLangGeneration": "facades.sglang",
    "TorchPolicy": "facades.torch_policy",
    "VLLMGeneration": "facades.vllm",
    "create_weight_synchronizer": "factory",
    "NoSurvivingShards": "membership",
    "RefitMembership": "membership",
    "plan_refit_membership": "membership",
    "CollectiveSenderSpec": "protocols",
    "DynamoWeightSynchronizer": "rows.dynamo",
    "SGLangColocatedWeightSynchronizer": "rows.sglang",
    "SGLangDisaggregatedWeightSynchronizer": "rows.sglang",
    "CollectiveWeightSynchronizer": "rows.vllm",
    "IPCWeightSynchronizer": "rows.vllm",
}

__all__ = [
    "CollectiveSenderSpec",
    "CollectiveWeightSynchronizer",
    "DynamoGeneration",
    "DynamoWeightSynchronizer",
    "IPCWeightSynchronizer",
    "NoSurvivingShards",
    "RefitMembership",
    "SGLangColocatedWeightSynchronizer",
    "SGLangDisaggregatedWeightSynchronizer",
    "SGLangGeneration",
    "StaticCluster",
    "Timer",
    "TorchPolicy",
    "VLLMGeneration",
    "WeightSynchronizer",
    "create_weight_synchronizer",
    "plan_refit_membership",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
