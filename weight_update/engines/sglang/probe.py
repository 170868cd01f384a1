"""What can be learned of a server without changing anything: a fixed set of GETs and OPTIONS.

Not every GET of SGLang is harmless (``GET /flush_cache`` flushes). Those used here were read in
its source: none pauses, flushes, loads or writes anything.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import requests

from weight_update.engines.http import EngineHttp, json_of
from weight_update.engines.sglang.capabilities import PROBED_ROUTES, running_requests
from weight_update.engines.sglang.facts import digests_of
from weight_update.engines.sglang.names import runtime_names
from weight_update.engines.sglang.router import WORKER_ROUTES, is_list_of_workers
from weight_update.errors import EngineUnreachable, UpdateTimeout
from weight_update.options import HttpOptions
from weight_update.waiting import Deadline

KeyState = Literal["open", "accepted", "missing", "refused", "forbidden", "unknown"]
Service = Literal["sglang", "router", "vllm", "other"]

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
_QUICK_SECONDS = 5.0


@dataclass(frozen=True)
class ServerFacts:
    """What a server said of itself.

    Attributes:
        url: Its URL.
        unreachable: Why no answer came; empty when one did.
        advice: What to do about that.
        status: Status of ``/model_info``.
        words: What it said there, if that was no yes.
        redirect: Where it sent us instead, if it did.
        service: What answers there.
        busy: The scheduler did not answer in time, although the server did.
        info: The fields of ``/server_info`` that matter here.
        model: The fields of ``/model_info`` that matter here.
        routes: For each probed route whether it is there.
        ordinary_key: How ordinary routes take our key.
        control_key: How control routes take our key.
        ready: What ``/ready`` says; None when there is no such route.
        running: Running requests; None when that is not known.
        names: Names of the weights that it holds (fused as it fuses them); None when not known.
        names_unknown: Why they are not.
        lengths: Lengths of some one-dimensional weights, by name.
    """

    url: str
    unreachable: str = ""
    advice: str = ""
    status: int = 200
    words: str = ""
    redirect: str | None = None
    service: Service = "sglang"
    busy: bool = False
    info: Mapping[str, Any] = field(default_factory=dict)
    model: Mapping[str, Any] = field(default_factory=dict)
    routes: Mapping[str, bool | None] = field(default_factory=dict)
    ordinary_key: KeyState = "open"
    control_key: KeyState = "open"
    ready: bool | None = None
    running: int | None = None
    names: frozenset[str] | None = None
    names_unknown: str = ""
    lengths: Mapping[str, int] = field(default_factory=dict)


def probe(
    url: str, options: HttpOptions, seconds: float, *, vectors: Sequence[str] | None = None
) -> ServerFacts:
    """Asks one server for everything that a diagnosis needs.

    Args:
        url: Its URL.
        options: Keys, TLS and proxies.
        seconds: Time for all of it.
        vectors: Names of one-dimensional weights whose lengths tell whether a checkpoint fits;
            None when there is no checkpoint, and the server's names are not asked for either.
    """
    asker = _Asker(url, options, Deadline(seconds))
    try:
        return asker.facts(vectors)
    except (EngineUnreachable, UpdateTimeout) as error:
        return ServerFacts(url, unreachable=error.message, advice=_advice(url, error))
    finally:
        asker.close()


class _Asker:
    def __init__(self, url: str, options: HttpOptions, deadline: Deadline) -> None:
        self._url = url
        self._keys = bool(options.api_key or options.admin_api_key)
        self._http = EngineHttp(url, options)
        self._keyless = EngineHttp(url, replace(options, api_key=None, admin_api_key=None))
        self._deadline = deadline

    def close(self) -> None:
        self._http.close()
        self._keyless.close()

    def facts(self, vectors: Sequence[str] | None) -> ServerFacts:
        answer = self._either("/model_info", "/get_model_info")
        facts = ServerFacts(self._url, status=answer.status_code)
        if answer.status_code != 200:
            facts = replace(facts, words=self._http.words(answer))
        if 300 <= answer.status_code < 400:
            return replace(facts, redirect=answer.headers.get("Location", ""))
        facts = replace(
            facts,
            model=_kept(json_of(answer), _KEPT_OF_MODEL),
            routes={route: self._has(route) for route in PROBED_ROUTES},
            service=self._service(answer),
            ordinary_key=self._key_state("/model_info", answer, control=False),
        )
        if facts.service != "sglang" or facts.status != 200:
            return facts
        facts = self._with_scheduler(facts)
        return facts if vectors is None else self._with_weights(facts, vectors)

    def _with_scheduler(self, facts: ServerFacts) -> ServerFacts:
        control = self._get(_CONTROL_ROUTE, control=True)
        ready = self._get("/ready")
        facts = replace(
            facts,
            control_key=self._key_state(_CONTROL_ROUTE, control, control=True),
            ready=None if ready.status_code == 404 else ready.status_code == 200,
            running=self._running(facts.routes),
        )
        try:
            info = self._either("/server_info", "/get_server_info")
        except UpdateTimeout:
            return replace(facts, busy=True)
        return replace(facts, info=_kept(json_of(info), _KEPT))

    def _with_weights(self, facts: ServerFacts, vectors: Sequence[str]) -> ServerFacts:
        if facts.busy or facts.control_key not in ("open", "accepted"):
            return replace(facts, names_unknown="the server does not answer control routes now")
        try:
            answer = self._get("/weights_checker", control=True, seconds=None)
        except UpdateTimeout:
            return replace(facts, names_unknown="it took the server too long to read its weights")
        digests = digests_of(json_of(answer)) if answer.status_code == 200 else None
        names = None if digests is None else runtime_names(digests).names
        if names is None:
            said = f"{answer.status_code}: {self._http.words(answer)}"
            facts = replace(facts, names_unknown=f"/weights_checker answered {said}")
        return replace(facts, names=names, lengths=self._lengths(facts, names, vectors))

    def _lengths(
        self, facts: ServerFacts, names: frozenset[str] | None, vectors: Sequence[str]
    ) -> dict[str, int]:
        """Asked for one short weight only: the server turns a whole one into a list."""
        answers = set(facts.model.get("architectures") or ()) & set(_ANSWER_BY_NAME)
        name = next((name for name in vectors if name in (names or ())), None)
        if name is None or not answers:
            return {}
        body = {"name": name, "truncate_size": 1 << 30}
        rows = json_of(self._get(_CONTROL_ROUTE, control=True, body=body))
        flat = isinstance(rows, list) and not any(isinstance(row, list) for row in rows)
        return {name: len(rows)} if flat else {}

    def _running(self, routes: Mapping[str, bool | None]) -> int | None:
        for route in ("/v1/loads", "/get_load"):
            if routes.get(route) is not False:
                answer = self._get(route)
                return running_requests(json_of(answer)) if answer.status_code == 200 else None
        return None

    def _service(self, model_info: requests.Response) -> Service:
        # A router passes /model_info on to one of its workers, so it is asked for first.
        if any(is_list_of_workers(route, json_of(self._get(route))) for route in WORKER_ROUTES):
            return "router"
        page = model_info.status_code == 200 and not isinstance(json_of(model_info), dict)
        if model_info.status_code != 404 and not page:
            return "sglang"
        models = json_of(self._get("/v1/models"))
        rows = models.get("data") if isinstance(models, dict) else None
        if isinstance(rows, list) and any(_owner(row) == "vllm" for row in rows):
            return "vllm"
        return "other"

    def _key_state(self, route: str, answer: requests.Response, *, control: bool) -> KeyState:
        refused = _refusal(answer, had_key=self._keys)
        if refused is not None:
            return refused
        if answer.status_code in (404, 405) or answer.status_code >= 500:
            return "unknown"
        if not self._keys:
            return "open"
        bare = self._call(self._keyless, "GET", route, control=control)
        return "accepted" if bare.status_code in (401, 403) else "open"

    def _either(self, route: str, older: str) -> requests.Response:
        answer = self._get(route)
        return self._get(older) if answer.status_code == 404 else answer

    def _has(self, route: str) -> bool | None:
        status = self._call(self._http, "OPTIONS", route, control=True).status_code
        if status == 404:
            return False
        return True if status in (200, 204, 405) else None

    def _get(
        self,
        route: str,
        *,
        control: bool = False,
        body: dict[str, Any] | None = None,
        seconds: float | None = _QUICK_SECONDS,
    ) -> requests.Response:
        return self._call(self._http, "GET", route, control=control, body=body, seconds=seconds)

    def _call(
        self,
        http: EngineHttp,
        method: str,
        route: str,
        *,
        control: bool,
        body: dict[str, Any] | None = None,
        seconds: float | None = _QUICK_SECONDS,
    ) -> requests.Response:
        deadline = self._deadline if seconds is None else self._deadline.at_most(seconds)
        return http.call(
            method, route, phase="connect", deadline=deadline, body=body, control=control
        )


def _kept(body: Any, fields: Sequence[str]) -> dict[str, Any]:
    return {name: body[name] for name in fields if name in body} if isinstance(body, dict) else {}


def _refusal(answer: requests.Response, *, had_key: bool) -> KeyState | None:
    if answer.status_code == 401:
        return "refused" if had_key else "missing"
    return "forbidden" if answer.status_code == 403 else None


def _owner(row: Any) -> Any:
    return row.get("owned_by") if isinstance(row, dict) else None


def _advice(url: str, error: EngineUnreachable | UpdateTimeout) -> str:
    if "CERTIFICATE_VERIFY_FAILED" in error.message:
        return "name the certificate authority with --ca-file"
    # How a server that speaks TLS ends a plain connection.
    closed = any(words in error.message for words in ("without response", "reset by peer"))
    if closed and url.startswith("http://"):
        return "if the server speaks TLS, write https://; else look at the server's log"
    return error.remedy or "check that the server runs and that its address is right"
