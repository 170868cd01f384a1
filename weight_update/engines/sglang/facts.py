"""What a server's answers say of it: pure functions that survive any JSON."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from weight_update.engines.json_values import is_count, is_number, texts
from weight_update.engines.sglang.capabilities import replicas_of, stages_of
from weight_update.engines.sglang.names import are_names_known
from weight_update.facts import Digests, Part

# Fields of /server_info that a start makes anew: the seed unless it was given, and how long
# each step of the start took (0.5.23).
_ANEW = ("random_seed", "startup_time")
# What decides which bytes a rank holds, and how they are digested.
_LAYOUT = ("version", "tp_size", "dtype", "device")
_LAYOUT_OPTIONS = ("quantization", "ep_size", "enable_lora", "speculative_algorithm")


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
    found = texts(model.get("architectures"))
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
    return tuple(rank if is_count(rank) else 0 for rank in found)


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
    if not (dim is None or is_count(dim)) or not is_count(start) or not is_count(length):
        return None
    return Part(dim, start, length)


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
    if not isinstance(body, list) or not body or not all(is_number(value) for value in body):
        return None
    return tuple(float(value) for value in body)
