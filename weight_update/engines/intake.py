"""How a server takes weights, by what it and its model's configuration say: pure functions."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from weight_update.engines.json_values import is_count, is_number, texts, word
from weight_update.facts import Intake

_DTYPES = {
    **{name: name for name in ("float16", "bfloat16", "float32", "float64")},
    **{"half": "float16", "float": "float32"},
}
# The part of a configuration that is about the text model, in one that has several.
_TEXT = ("text_config", "llm_config", "language_config")
# More is no size of memory.
_MOST_GIB = 1 << 20
_NOT_QUANTISED = ("", "none", "unquant")
_NO_DRAFT_MODEL = ("", "none", "ngram")


def intake_of(
    info: Mapping[str, Any],
    model: Mapping[str, Any],
    config: Mapping[str, Any],
    *,
    requantises: bool = False,
) -> Intake:
    """How a server takes weights.

    Args:
        info: Its ``/server_info``.
        model: Its ``/model_info``.
        config: ``config.json`` of its model; empty where that cannot be read.
        requantises: Whether the release processes weights again at the end of an update.

    Example:
        >>> intake = intake_of({"dtype": "auto"}, {}, {"dtype": "float32", "vocab_size": 64})
        >>> intake.dtype, intake.vocabulary, intake.quantization
        ('float16', 64, None)
    """
    config = {**config, **_overrides_of(info)}
    quantisation = _quantisation_of(info, config)
    left_out = quantisation.get("ignored_layers") or quantisation.get("modules_to_not_convert")
    return Intake(
        architectures=texts(model.get("architectures")),
        dtype=_dtype_of(info, config),
        vocabulary=_vocabulary_of(config),
        quantization=_kind_of(quantisation),
        block=_block_of(quantisation.get("weight_block_size")),
        unconverted=texts(left_out),
        requantises=requantises,
        drafts=word(info.get("speculative_algorithm")) not in _NO_DRAFT_MODEL,
        partial_modules=not quantisation,
        free_bytes=_free_bytes(info),
        nccl=nccl_of(info),
    )


def nccl_of(info: Mapping[str, Any]) -> dict[str, str]:
    """What a server sets of NCCL where its environment has nothing: by its arguments, on GPUs.

    Example:
        >>> nccl_of({"device": "cuda", "enable_nccl_nvls": True})
        {'NCCL_CUMEM_ENABLE': '0', 'NCCL_NVLS_ENABLE': '1'}
    """
    if word(info.get("device")) != "cuda":
        return {}
    symmetric = info.get("enable_symm_mem") is True
    nvls = symmetric or info.get("enable_nccl_nvls") is True
    return {"NCCL_CUMEM_ENABLE": str(int(symmetric)), "NCCL_NVLS_ENABLE": str(int(nvls))}


def _free_bytes(info: Mapping[str, Any]) -> int | None:
    """What the fullest rank had free when it had started, as 0.5.23 says (in GiB)."""
    told = info.get("internal_states")
    states = told if isinstance(told, list) else []
    usages = [state.get("memory_usage") for state in states if isinstance(state, dict)]
    free: list[Any] = [u.get("startup_available") for u in usages if isinstance(u, dict)]
    known = [gib for gib in free if is_number(gib) and 0 <= gib < _MOST_GIB]
    return int(min(known) * (1 << 30)) if known and len(known) == len(states) else None


def _overrides_of(info: Mapping[str, Any]) -> dict[str, Any]:
    try:
        found = json.loads(info.get("json_model_override_args") or "{}")
    except (TypeError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def _parts_of_text(config: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Where the facts of the text model stand, the likeliest place first."""
    nested = [config[name] for name in _TEXT if isinstance(config.get(name), dict)]
    return [*nested[:1], config]


def _dtype_of(info: Mapping[str, Any], config: Mapping[str, Any]) -> str | None:
    told = word(info.get("dtype"))
    if told != "auto":
        return _DTYPES.get(told)
    parts = _parts_of_text(config)
    kept = [part.get(key) for part in parts for key in ("dtype", "torch_dtype")]
    own = next((dtype for dtype in map(word, kept) if dtype), None)
    if own is None:
        return None
    dtype = _DTYPES.get(own.removeprefix("torch."))
    if dtype != "float32":
        return dtype
    # "auto" serves no model in fp32.
    return "bfloat16" if word(parts[0].get("model_type")).startswith("gemma") else "float16"


def _vocabulary_of(config: Mapping[str, Any]) -> int | None:
    if config.get("model_type") == "mllama":
        return None  # its embedding has more rows than its output layer
    sizes = [part.get("vocab_size") for part in _parts_of_text(config)]
    return next((size for size in sizes if is_count(size) and size > 0), None)


def _quantisation_of(info: Mapping[str, Any], config: Mapping[str, Any]) -> dict[str, Any]:
    """What a server was told of quantisation, or else its checkpoint; empty when there is none."""
    kept = [
        part[key]
        for part in (config, *_parts_of_text(config))
        for key in ("quantization_config", "compression_config")
        if isinstance(part.get(key), dict) and part[key]
    ]
    found = {"quant_method": "a kind that its configuration does not name"}
    found = {**found, **kept[0]} if kept else {}
    told = word(info.get("quantization")) or ("torchao" if info.get("torchao_config") else "")
    if told in _NOT_QUANTISED:
        return found
    # A checkpoint of another kind is converted when it is loaded, and so is a plain one.
    same = word(found.get("quant_method")) == told
    return {**(found if same else {}), "quant_method": told}


def _kind_of(quantisation: Mapping[str, Any]) -> str | None:
    """The word for a kind of quantisation; scales of a format of their own make another kind."""
    kind, scales = quantisation.get("quant_method"), quantisation.get("scale_fmt")
    if not quantisation:
        return None
    return f"{kind} with scales in {scales}" if scales else str(kind)


def _block_of(value: Any) -> tuple[int, int] | None:
    if not isinstance(value, list) or len(value) != 2 or not all(map(is_count, value)):
        return None
    return (value[0], value[1]) if all(value) else None
