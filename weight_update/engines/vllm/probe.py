"""What a vLLM server says of itself, asked without changing anything."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from weight_update.engines.answers import json_of
from weight_update.engines.probing import Asker, ServerFacts
from weight_update.engines.vllm.capabilities import PROBED_ROUTES
from weight_update.engines.vllm.client import (
    MODELS_ROUTE,
    PAUSE_ROUTE,
    PAUSED_ROUTE,
    RANKS_ROUTE,
    WEIGHT_INFO_ROUTE,
)
from weight_update.engines.vllm.facts import folder_of, keeps_memory, read_facts
from weight_update.errors import UpdateTimeout

_PARALLEL = {
    "tp_size": "tensor_parallel_size",
    "pp_size": "pipeline_parallel_size",
    "dp_size": "data_parallel_size",
}


def probe_vllm(asker: Asker, vectors: Sequence[str] | None) -> ServerFacts:
    """Asks a server, of which it is known that it is vLLM, for everything.

    Args:
        asker: Sends the requests.
        vectors: None when there is no checkpoint to compare the server's weights with.
    """
    models = asker.get(MODELS_ROUTE)
    health = asker.get("/health")
    facts = ServerFacts(
        asker.url,
        service="vllm",
        dead=health.status_code >= 500,
        info={"version": _object(asker, "/version").get("version")},
        routes={route: asker.has(route) for route in (PAUSE_ROUTE, *PROBED_ROUTES)},
        ordinary_key=asker.key_state(MODELS_ROUTE, models, control=False),
    )
    if not facts.routes[PAUSE_ROUTE] or facts.dead:
        return facts
    facts = _with_workers(asker, facts)
    return _with_configuration(asker, facts, _cards(json_of(models)), vectors)


def _with_workers(asker: Asker, facts: ServerFacts) -> ServerFacts:
    """What only the workers tell; an update in progress blocks them."""
    try:
        paused = asker.get(PAUSED_ROUTE, control=True)
        label = _object(asker, WEIGHT_INFO_ROUTE).get("weight_version")
        asleep = _object(asker, "/is_sleeping").get("is_sleeping")
    except UpdateTimeout:
        return replace(facts, busy=True)
    told = json_of(paused)
    is_paused = told.get("is_paused") if isinstance(told, dict) else None
    return replace(
        facts,
        control_key=asker.key_state(PAUSED_ROUTE, paused, control=True),
        ready=None if is_paused is None else not is_paused,
        model={"weight_version": label},
        info={**facts.info, "asleep": asleep},
    )


def _with_configuration(
    asker: Asker,
    facts: ServerFacts,
    cards: list[dict[str, Any]],
    vectors: Sequence[str] | None,
) -> ServerFacts:
    told = _configuration(asker)
    served = read_facts(told, cards)
    model, parallel = (told.get(name) or {} for name in ("model_config", "parallel_config"))
    known = {
        "ranks": _object(asker, f"{RANKS_ROUTE}?include_dp=true").get("world_size"),
        "device": _device(told),
        "dtype": served.intake.dtype,
        "quantization": model.get("quantization"),
        "backend": served.backend,
        "extension": served.extension if told else None,
        "lora": served.lora,
        "never_sleeps": keeps_memory(told),
        "fp8_cache": served.fp8_cache,
        **{ours: parallel.get(theirs) for ours, theirs in _PARALLEL.items()},
    }
    why = "" if served.loaded else "the folder of its model cannot be read here"
    compared = vectors is not None and served.loaded
    return replace(
        facts,
        info={**facts.info, **known},
        model={**facts.model, "model_path": folder_of(told, cards), "tied": served.tied},
        names=served.loaded if compared else None,
        names_unknown=why,
    )


def _configuration(asker: Asker) -> Mapping[str, Any]:
    """``/server_info``, for which a server takes seconds the first time; empty without one."""
    try:
        answer = asker.get("/server_info?config_format=json", control=True, seconds=None)
    except UpdateTimeout:
        return {}
    body = json_of(answer)
    config = body.get("vllm_config") if isinstance(body, dict) else None
    return config if isinstance(config, dict) else {}


def _device(told: Mapping[str, Any]) -> str | None:
    device = told.get("device_config")
    device = device.get("device_type") or device.get("device") if isinstance(device, dict) else None
    return None if device is None else str(device)


def _object(asker: Asker, route: str) -> Mapping[str, Any]:
    answer = asker.get(route)
    body = json_of(answer)
    return body if answer.status_code == 200 and isinstance(body, dict) else {}


def _cards(body: Any) -> list[dict[str, Any]]:
    rows = body.get("data") if isinstance(body, dict) else None
    return [row for row in rows if isinstance(row, dict)] if isinstance(rows, list) else []
