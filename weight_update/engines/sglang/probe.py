"""What an SGLang server says of itself, asked without changing anything."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from weight_update.engines.answers import json_of
from weight_update.engines.probing import Asker, ServerFacts, kept
from weight_update.engines.sglang.capabilities import PROBED_ROUTES, running_requests
from weight_update.engines.sglang.facts import digests_of
from weight_update.engines.sglang.names import runtime_names
from weight_update.errors import UpdateTimeout

# What is kept of /server_info, whose answer holds the server's own keys.
_KEPT = (
    *("version", "tp_size", "pp_size", "dp_size", "enable_dp_attention", "disaggregation_mode"),
    *("device", "dtype", "quantization", "host", "port", "weight_cache_mode"),
    *("enable_lora", "speculative_algorithm", "enable_symm_mem", "enable_nccl_nvls"),
)
_KEPT_OF_MODEL = ("model_path", "weight_version", "model_type", "architectures")
# A route of the control kind that can be asked by GET; without a body it is refused after the
# key was checked and before anything is read.
_CONTROL_ROUTE = "/get_weights_by_name"
# Only these models answer by name; others log an error, which a diagnosis must not cause.
_ANSWER_BY_NAME = ("LlamaForCausalLM",)


def probe_sglang(asker: Asker, vectors: Sequence[str] | None) -> ServerFacts:
    """Asks a server, of which it is known that it is no other engine, for everything.

    Args:
        asker: Sends the requests.
        vectors: Names of one-dimensional weights whose lengths tell whether a checkpoint fits;
            None when there is no checkpoint, and the server's names are not asked for either.
    """
    answer = asker.either("/model_info", "/get_model_info")
    facts = ServerFacts(
        asker.url,
        status=answer.status_code,
        words="" if answer.status_code == 200 else asker.words(answer),
        model=kept(json_of(answer), _KEPT_OF_MODEL),
        routes={route: asker.has(route) for route in PROBED_ROUTES},
        ordinary_key=asker.key_state("/model_info", answer, control=False),
    )
    if facts.status != 200:
        return facts
    facts = _with_scheduler(asker, facts)
    return facts if vectors is None else _with_weights(asker, facts, vectors)


def _with_scheduler(asker: Asker, facts: ServerFacts) -> ServerFacts:
    control = asker.get(_CONTROL_ROUTE, control=True)
    ready = asker.get("/ready")
    facts = replace(
        facts,
        control_key=asker.key_state(_CONTROL_ROUTE, control, control=True),
        ready=None if ready.status_code == 404 else ready.status_code == 200,
        running=_running(asker, facts.routes),
    )
    try:
        info = asker.either("/server_info", "/get_server_info")
    except UpdateTimeout:
        return replace(facts, busy=True)
    return replace(facts, info=kept(json_of(info), _KEPT))


def _with_weights(asker: Asker, facts: ServerFacts, vectors: Sequence[str]) -> ServerFacts:
    if facts.busy or facts.control_key not in ("open", "accepted"):
        return replace(facts, names_unknown="the server does not answer control routes now")
    try:
        answer = asker.get("/weights_checker", control=True, seconds=None)
    except UpdateTimeout:
        return replace(facts, names_unknown="it took the server too long to read its weights")
    digests = digests_of(json_of(answer)) if answer.status_code == 200 else None
    names = None if digests is None else runtime_names(digests).names
    if names is None:
        said = f"{answer.status_code}: {asker.words(answer)}"
        facts = replace(facts, names_unknown=f"/weights_checker answered {said}")
    return replace(facts, names=names, lengths=_lengths(asker, facts, names, vectors))


def _lengths(
    asker: Asker, facts: ServerFacts, names: frozenset[str] | None, vectors: Sequence[str]
) -> dict[str, int]:
    """Asked for one short weight only: the server turns a whole one into a list."""
    answers = set(facts.model.get("architectures") or ()) & set(_ANSWER_BY_NAME)
    name = next((name for name in vectors if name in (names or ())), None)
    if name is None or not answers:
        return {}
    body = {"name": name, "truncate_size": 1 << 30}
    rows = json_of(asker.get(_CONTROL_ROUTE, control=True, body=body))
    flat = isinstance(rows, list) and not any(isinstance(row, list) for row in rows)
    return {name: len(rows)} if flat else {}


def _running(asker: Asker, routes: Mapping[str, bool | None]) -> int | None:
    for route in ("/v1/loads", "/get_load"):
        if routes.get(route) is not False:
            answer = asker.get(route)
            return running_requests(json_of(answer)) if answer.status_code == 200 else None
    return None
