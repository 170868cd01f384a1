"""What a server's answers say of it: pure functions that survive any JSON."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeGuard

from weight_update.engines.sglang.capabilities import replicas_of, stages_of
from weight_update.engines.sglang.names import are_names_known
from weight_update.facts import Digests, Intake, Part

# Fields of /server_info that a start makes anew: the seed unless it was given, and how long
# each step of the start took (0.5.23).
_ANEW = ("random_seed", "startup_time")
# What decides which bytes a rank holds, and how they are digested.
_LAYOUT = ("version", "tp_size", "dtype", "device")
_LAYOUT_OPTIONS = ("quantization", "ep_size", "enable_lora", "speculative_algorithm")
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


@dataclass(frozen=True)
class SGLangModel:
    """What is served, as far as it matters for comparing weights.

    Attributes:
        architectures: Of the model; empty when the server does not say.
        layout: Equal for servers that hold equal weights in equal parts; None when unknown.
        plain: Weights are served as they came: not quantised, and not under other names.
        names_known: Names that the server shows can be compared with those of a checkpoint.
    """

    architectures: tuple[str, ...] = ()
    layout: str | None = None
    plain: bool = False
    names_known: bool = False


def model_of(info: Mapping[str, Any], model: Mapping[str, Any]) -> SGLangModel:
    """What ``/server_info`` and ``/model_info`` say of the model.

    Example:
        >>> info = {"version": "0.5.23", "tp_size": 1, "dtype": "bfloat16", "device": "cuda"}
        >>> model_of(info, {"architectures": ["LlamaForCausalLM"]}).layout
        'version=0.5.23, tp_size=1, dtype=bfloat16, device=cuda, architectures=LlamaForCausalLM'
    """
    found = _texts(model.get("architectures"))
    if stages_of(info) > 1:  # the first of them answers, and shows its own weights only
        return SGLangModel(found)
    return SGLangModel(
        found,
        _layout_of(info, found),
        plain=bool(info) and not info.get("quantization"),
        names_known=bool(info) and are_names_known(info, found),
    )


def _layout_of(info: Mapping[str, Any], architectures: tuple[str, ...]) -> str | None:
    fields = {name: info.get(name) for name in _LAYOUT}
    if not architectures or any(value in (None, "") for value in fields.values()):
        return None
    fields |= {name: info[name] for name in _LAYOUT_OPTIONS if info.get(name)}
    if (replicas := replicas_of(info)) > 1:  # each of them shows its digests
        fields["replicas"] = replicas
    if fields["dtype"] == "auto":  # then the folder of the model decides it
        fields["model_path"] = info.get("model_path")
    fields["architectures"] = "+".join(architectures)
    return ", ".join(f"{name}={value}" for name, value in fields.items())


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
        architectures=_texts(model.get("architectures")),
        dtype=_dtype_of(info, config),
        vocabulary=_vocabulary_of(config),
        quantization=_kind_of(quantisation),
        block=_block_of(quantisation.get("weight_block_size")),
        unconverted=_texts(left_out),
        requantises=requantises,
        drafts=_word(info.get("speculative_algorithm")) not in _NO_DRAFT_MODEL,
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
    if _word(info.get("device")) != "cuda":
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
    known = [gib for gib in free if _is_number(gib) and 0 <= gib < _MOST_GIB]
    return int(min(known) * (1 << 30)) if known and len(known) == len(states) else None


def _overrides_of(info: Mapping[str, Any]) -> dict[str, Any]:
    try:
        found = json.loads(info.get("json_model_override_args") or "{}")
    except (TypeError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def _word(value: Any) -> str:
    return value.lower() if isinstance(value, str) else ""


def _texts(value: Any) -> tuple[str, ...]:
    return tuple(row for row in value if isinstance(row, str)) if isinstance(value, list) else ()


def _parts_of_text(config: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Where the facts of the text model stand, the likeliest place first."""
    nested = [config[name] for name in _TEXT if isinstance(config.get(name), dict)]
    return [*nested[:1], config]


def _dtype_of(info: Mapping[str, Any], config: Mapping[str, Any]) -> str | None:
    told = _word(info.get("dtype"))
    if told != "auto":
        return _DTYPES.get(told)
    parts = _parts_of_text(config)
    kept = [part.get(key) for part in parts for key in ("dtype", "torch_dtype")]
    own = next((dtype for dtype in map(_word, kept) if dtype), None)
    if own is None:
        return None
    dtype = _DTYPES.get(own.removeprefix("torch."))
    if dtype != "float32":
        return dtype
    # "auto" serves no model in fp32.
    return "bfloat16" if _word(parts[0].get("model_type")).startswith("gemma") else "float16"


def _vocabulary_of(config: Mapping[str, Any]) -> int | None:
    if config.get("model_type") == "mllama":
        return None  # its embedding has more rows than its output layer
    sizes = [part.get("vocab_size") for part in _parts_of_text(config)]
    return next((size for size in sizes if _is_count(size) and size > 0), None)


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
    told = _word(info.get("quantization")) or ("torchao" if info.get("torchao_config") else "")
    if told in _NOT_QUANTISED:
        return found
    # A checkpoint of another kind is converted when it is loaded, and so is a plain one.
    same = _word(found.get("quant_method")) == told
    return {**(found if same else {}), "quant_method": told}


def _kind_of(quantisation: Mapping[str, Any]) -> str | None:
    """The word for a kind of quantisation; scales of a format of their own make another kind."""
    kind, scales = quantisation.get("quant_method"), quantisation.get("scale_fmt")
    if not quantisation:
        return None
    return f"{kind} with scales in {scales}" if scales else str(kind)


def _block_of(value: Any) -> tuple[int, int] | None:
    if not isinstance(value, list) or len(value) != 2 or not all(map(_is_count, value)):
        return None
    return (value[0], value[1]) if all(value) else None


def label_of(model: Mapping[str, Any]) -> str | None:
    """The version label in a ``/model_info`` answer."""
    label = model.get("weight_version")
    return None if label is None else str(label)


def instance_of(info: Mapping[str, Any]) -> str | None:
    """What this start of the server has of its own, in a ``/server_info`` answer.

    Example:
        >>> instance_of({"random_seed": 5}) == instance_of({"random_seed": 5, "port": 1})
        True
        >>> instance_of({"port": 1}) is None
        True
    """
    anew = {name: info[name] for name in _ANEW if info.get(name) is not None}
    text = json.dumps(anew, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16] if anew else None


def digests_of(body: Any) -> Digests | None:
    """The digests in a ``/weights_checker`` answer; None when it has none.

    Example:
        >>> digests_of({"success": True, "ranks": [{"checksums": {"norm": "0a"}}]}).ranks
        ({'norm': '0a'},)
    """
    rows = body.get("ranks") if isinstance(body, dict) else None
    if not isinstance(rows, list) or not rows or not all(isinstance(row, dict) for row in rows):
        return None
    rows = sorted(rows, key=_place_of)  # replicas answer in any order
    ranks = [row.get("checksums") for row in rows]
    if not all(isinstance(rank, dict) and _are_texts(rank.values()) for rank in ranks):
        return None
    parts, dtypes = [_parts_of(row) for row in rows], {str(row.get("dtype")) for row in rows}
    described = [each for each in parts if each is not None]
    if len(described) < len(rows) or len(dtypes) > 1:
        return Digests(tuple(ranks))
    return Digests(tuple(ranks), tuple(described), dtypes.pop())


def _place_of(row: Mapping[str, Any]) -> tuple[int, ...]:
    told = row.get("parallelism_info")
    place = told[0] if isinstance(told, list) and told else None
    if not isinstance(place, dict):
        return ()
    found = (place.get(key) for key in ("dp_rank", "pp_rank", "tp_rank"))
    return tuple(rank if _is_count(rank) else 0 for rank in found)


def _are_texts(values: Any) -> bool:
    return all(isinstance(value, str) for value in values)


def _parts_of(row: Mapping[str, Any]) -> dict[str, Part] | None:
    """Which parts a rank digested, if it says so of each of its weights."""
    told = row.get("parts")
    described = row.get("digest") == "sha256" and isinstance(row.get("dtype"), str)
    if not described or not isinstance(told, dict) or set(told) != set(row["checksums"]):
        return None
    parts = {name: _part_of(part) for name, part in told.items()}
    return None if None in parts.values() else {n: p for n, p in parts.items() if p is not None}


def _part_of(part: Any) -> Part | None:
    """One part.

    Example:
        >>> _part_of({"dim": 0, "start": 4, "length": 4})
        Part(dim=0, start=4, length=4)
        >>> _part_of({"dim": "x"}) is None
        True
    """
    if not isinstance(part, dict):
        return None
    dim, start, length = part.get("dim"), part.get("start"), part.get("length")
    if not (dim is None or _is_count(dim)) or not _is_count(start) or not _is_count(length):
        return None
    return Part(dim, start, length)


def _is_count(value: Any) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def first_row_of(body: Any, replicas: int = 1) -> tuple[float, ...] | None:
    """The start of a weight in a ``/get_weights_by_name`` answer; None when it has none.

    Several replicas answer in a list. Where they differ, none of the values is a number: no
    weight is equal to that.

    Example:
        >>> first_row_of([[0.5, 1.0], [2.0, 3.0]])
        (0.5, 1.0)
        >>> first_row_of([0.5])
        (0.5,)
        >>> first_row_of([[[0.5, 1.0]], [[0.5, 2.0]]], replicas=2)
        (nan, nan)
        >>> first_row_of({"error": {"message": "Get parameter by name failed"}}) is None
        True
    """
    several = replicas > 1 and isinstance(body, list) and len(body) == replicas
    rows = [_row_of(answer) for answer in (body if several else [body])]
    if replicas > len(rows) or rows[0] is None:
        return None
    return rows[0] if rows.count(rows[0]) == len(rows) else (math.nan,) * len(rows[0])


def _row_of(body: Any) -> tuple[float, ...] | None:
    # Several leaders of data-parallel attention answer in a list around their rows.
    while isinstance(body, list) and body and isinstance(body[0], list):
        body = body[0]
    if not isinstance(body, list) or not body or not all(_is_number(value) for value in body):
        return None
    return tuple(float(value) for value in body)


def _is_number(value: Any) -> bool:
    small = isinstance(value, int) and not isinstance(value, bool) and value.bit_length() < 1000
    return small or isinstance(value, float)
