"""Which engine answers at a URL, found out by asking it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import requests

from weight_update.engines.answers import json_of
from weight_update.engines.probing import Asker, ServerFacts, Service, unreachable
from weight_update.engines.sglang.probe import probe_sglang
from weight_update.engines.sglang.router import WORKER_ROUTES, is_list_of_workers, read_workers
from weight_update.engines.vllm.probe import probe_vllm
from weight_update.errors import ConfigurationError, EngineUnreachable, UpdateTimeout
from weight_update.options import HttpOptions

EngineName = Literal["auto", "sglang", "vllm"]


@dataclass(frozen=True)
class Recognised:
    """What answers at a URL.

    Attributes:
        url: The URL.
        service: What it is; None when nothing answered.
        why: What told so, in words.
        workers: URLs of the servers behind a router, as far as it lists them.
    """

    url: str
    service: Service | None
    why: str
    workers: tuple[str, ...] = ()


def recognise(
    url: str, options: HttpOptions, seconds: float, engine: EngineName = "auto"
) -> Recognised:
    """Asks one server what it is.

    Args:
        url: Its URL.
        options: Keys, TLS and proxies.
        seconds: Time for it.
        engine: What it is, for those who know; only routers are asked for then.
    """
    asker = Asker(url, options, seconds)
    try:
        return _recognised(asker, engine)
    except (EngineUnreachable, UpdateTimeout) as error:
        return Recognised(url, None, error.message)
    finally:
        asker.close()


def probe(
    url: str,
    options: HttpOptions,
    seconds: float,
    *,
    engine: EngineName = "auto",
    vectors: Sequence[str] | None = None,
) -> ServerFacts:
    """Asks one server for everything that a diagnosis needs.

    Args:
        url: Its URL.
        options: Keys, TLS and proxies.
        seconds: Time for all of it.
        engine: What it is, for those who know.
        vectors: Names of one-dimensional weights whose lengths tell whether a checkpoint fits;
            None when there is no checkpoint, and the server's names are not asked for either.
    """
    asker = Asker(url, options, seconds)
    try:
        return _probed(asker, engine, vectors)
    except (EngineUnreachable, UpdateTimeout) as error:
        return unreachable(url, error)
    finally:
        asker.close()


def _probed(asker: Asker, engine: EngineName, vectors: Sequence[str] | None) -> ServerFacts:
    answer = asker.either("/model_info", "/get_model_info")
    if 300 <= answer.status_code < 400:
        location = answer.headers.get("Location", "")
        return ServerFacts(asker.url, status=answer.status_code, redirect=location)
    found = _recognised(asker, engine, answer)
    if found.service == "vllm":
        return replace(probe_vllm(asker, vectors), why=found.why)
    if found.service == "sglang":
        return replace(probe_sglang(asker, vectors), why=found.why)
    service: Service = found.service or "other"
    return ServerFacts(asker.url, status=answer.status_code, service=service, why=found.why)


def _recognised(
    asker: Asker, engine: EngineName, model_info: requests.Response | None = None
) -> Recognised:
    # A router passes /model_info on to one of its workers, so it is asked for first.
    router = _as_router(asker)
    if router is not None:
        return router
    if engine != "auto":
        return Recognised(asker.url, engine, f"--engine {engine} says so")
    if model_info is None:
        model_info = asker.either("/model_info", "/get_model_info")
    service, why = _engine_of(asker, model_info)
    return Recognised(asker.url, service, why)


def _as_router(asker: Asker) -> Recognised | None:
    for route in WORKER_ROUTES:
        body = json_of(asker.get(route))
        if is_list_of_workers(route, body):
            why = f"{route} lists the servers behind it"
            return Recognised(asker.url, "router", why, _listed(asker.url, route, body))
    return None


def _listed(url: str, route: str, body: Any) -> tuple[str, ...]:
    try:
        return read_workers(route, body, url=url)
    except ConfigurationError:
        return ()


def _engine_of(asker: Asker, model_info: requests.Response) -> tuple[Service, str]:
    page = model_info.status_code == 200 and not isinstance(json_of(model_info), dict)
    if model_info.status_code == 200 and not page:
        return "sglang", "/model_info describes its model"
    if model_info.status_code != 404 and not page:
        return "sglang", f"/model_info is there, and answered {model_info.status_code}"
    return _without_model_info(asker)


def _without_model_info(asker: Asker) -> tuple[Service, str]:
    models = json_of(asker.get("/v1/models"))
    rows = models.get("data") if isinstance(models, dict) else None
    if isinstance(rows, list) and any(_owner(row) == "vllm" for row in rows):
        return "vllm", "/v1/models says that its models are vLLM's"
    version = json_of(asker.get("/version"))
    if isinstance(version, dict) and isinstance(version.get("version"), str):
        return "vllm", "/version names a release, as vLLM does, and /model_info is missing"
    return "other", "neither /model_info (SGLang) nor /version (vLLM) is there"


def _owner(row: Any) -> Any:
    return row.get("owned_by") if isinstance(row, dict) else None
