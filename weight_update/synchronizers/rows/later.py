"""Deployments that are not there yet, and what works instead."""

from __future__ import annotations

from weight_update.errors import ConfigurationError, NotSupported, WeightUpdateError

_COLLECTIVE = "backend 'vllm' or 'sglang' with colocated=False"


def checkpoint_engine(transport: str, backend: str, *, colocated: bool) -> WeightUpdateError:
    """Why a checkpoint engine cannot bring the weights."""
    if colocated:
        return ConfigurationError(
            f"refit_transport={transport!r} is only supported where trainer and engines do not "
            "share their devices",
            remedy="set refit_transport=None: weights are handed over in memory that both open",
        )
    what = "" if backend == "vllm" else f", and by its design for vLLM alone, not {backend!r}"
    return _later(
        f"refit_transport={transport!r} (a checkpoint engine) is not there yet{what}",
        f"set refit_transport=None, with {_COLLECTIVE}",
    )


def nccl_reshard() -> WeightUpdateError:
    """Why shards cannot travel from rank to rank."""
    return _later(
        "refit_transport='nccl_reshard' is not there yet",
        "set refit_transport=None: shards are gathered bucket by bucket, and broadcast",
    )


def megatron() -> WeightUpdateError:
    """Why Megatron's engines cannot be updated."""
    return _later("generation by Megatron is not there yet", f"use {_COLLECTIVE}")


def trtllm() -> WeightUpdateError:
    """Why TensorRT-LLM cannot be updated."""
    return _later("TensorRT-LLM is not there yet", f"use {_COLLECTIVE}")


def colocated_dynamo() -> WeightUpdateError:
    """Why dynamo cannot open a trainer's memory."""
    return _later(
        "dynamo on the trainer's own devices is not there yet",
        "use colocated=False, which is a collective, or backend 'vllm'",
    )


def _later(what: str, instead: str) -> NotSupported:
    return NotSupported(what, remedy=instead)
