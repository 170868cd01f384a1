"""Move a trainer's weights into live inference engines: fast, safe and honest.

Example:
    >>> from weight_update import SGLangWeightSyncScheme
    >>> sender = SGLangWeightSyncScheme("http://127.0.0.1:30000").create_sender()
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from weight_update.collectors.sglang_wrapper import SGLangWrapper, WeightVersions, staleness
    from weight_update.delivery.metrics import metrics_of
    from weight_update.errors import (
        ConfigurationError,
        EngineRejected,
        EngineUnreachable,
        MissingSetting,
        NotSupported,
        RefitAborted,
        UpdateTimeout,
        WeightMismatchError,
        WeightUpdateError,
    )
    from weight_update.report import EngineOutcome, EngineState, UpdateReport
    from weight_update.rollouts import (
        is_aborted,
        retry_aborted,
        salted,
        versions_of,
    )
    from weight_update.schemes.fleet import FleetWeightSyncScheme
    from weight_update.schemes.scheme import SGLangWeightSyncScheme
    from weight_update.schemes.sender import SGLangWeightSender
    from weight_update.schemes.transport import SGLangCollectiveTransport
    from weight_update.schemes.vllm import VLLMWeightSender, VLLMWeightSyncScheme
    from weight_update.synchronizers.factory import create_weight_synchronizer
    from weight_update.synchronizers.interface import WeightSynchronizer
    from weight_update.weights.checkpoint import Checkpoint
    from weight_update.weights.extract import get_model_metadata
    from weight_update.weights.extract import get_model_metadata as get_sglang_model_metadata
    from weight_update.weights.saved_state_dict import SavedStateDict
    from weight_update.weights.stream import Stream

__version__ = "0.1.0"

# Names are imported on first use: torchrl takes seconds to import, and the reference engine
# and the command line do without it.
_HOMES = {
    "ConfigurationError": "errors",
    "EngineRejected": "errors",
    "EngineUnreachable": "errors",
    "MissingSetting": "errors",
    "NotSupported": "errors",
    "RefitAborted": "errors",
    "UpdateTimeout": "errors",
    "WeightMismatchError": "errors",
    "WeightUpdateError": "errors",
    "EngineOutcome": "report",
    "EngineState": "report",
    "UpdateReport": "report",
    "is_aborted": "rollouts",
    "retry_aborted": "rollouts",
    "salted": "rollouts",
    "versions_of": "rollouts",
    "SGLangWrapper": "collectors.sglang_wrapper",
    "WeightVersions": "collectors.sglang_wrapper",
    "staleness": "collectors.sglang_wrapper",
    "metrics_of": "delivery.metrics",
    "FleetWeightSyncScheme": "schemes.fleet",
    "SGLangWeightSyncScheme": "schemes.scheme",
    "SGLangWeightSender": "schemes.sender",
    "SGLangCollectiveTransport": "schemes.transport",
    "VLLMWeightSender": "schemes.vllm",
    "VLLMWeightSyncScheme": "schemes.vllm",
    "create_weight_synchronizer": "synchronizers.factory",
    "WeightSynchronizer": "synchronizers.interface",
    "Checkpoint": "weights.checkpoint",
    "SavedStateDict": "weights.saved_state_dict",
    "Stream": "weights.stream",
    "get_model_metadata": "weights.extract",
    "get_sglang_model_metadata": "weights.extract",
}

__all__ = [
    "Checkpoint",
    "ConfigurationError",
    "EngineOutcome",
    "EngineRejected",
    "EngineState",
    "EngineUnreachable",
    "FleetWeightSyncScheme",
    "MissingSetting",
    "NotSupported",
    "RefitAborted",
    "SGLangCollectiveTransport",
    "SGLangWeightSender",
    "SGLangWeightSyncScheme",
    "SGLangWrapper",
    "SavedStateDict",
    "Stream",
    "UpdateReport",
    "UpdateTimeout",
    "VLLMWeightSender",
    "VLLMWeightSyncScheme",
    "WeightMismatchError",
    "WeightSynchronizer",
    "WeightUpdateError",
    "WeightVersions",
    "create_weight_synchronizer",
    "get_model_metadata",
    "get_sglang_model_metadata",
    "is_aborted",
    "metrics_of",
    "retry_aborted",
    "salted",
    "staleness",
    "versions_of",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    attribute = "get_model_metadata" if name == "get_sglang_model_metadata" else name
    value = getattr(import_module(f"{__name__}.{_HOMES[name]}"), attribute)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
