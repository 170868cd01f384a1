"""Whatever a server answers becomes a value or one of the library's own errors."""

from __future__ import annotations

import json
import socket
import string
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import requests
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from weight_update.engines import recognition
from weight_update.engines.answers import Answer, AnswerReader, json_of
from weight_update.engines.http import EngineHttp
from weight_update.engines.probing import Asker, ServerFacts
from weight_update.engines.sglang import facts as sglang_facts
from weight_update.engines.sglang import names as sglang_names
from weight_update.engines.sglang import router as sglang_router
from weight_update.engines.sglang.capabilities import (
    PROBED_ROUTES,
    SGLangCapabilities,
    read_capabilities,
    read_layout,
    release_number,
    running_requests,
)
from weight_update.engines.sglang.client import SGLangClient
from weight_update.engines.sglang.engine import SGLangEngine
from weight_update.engines.sglang.session import SGLangSession
from weight_update.errors import WeightUpdateError
from weight_update.facts import Digests
from weight_update.options import HttpOptions, Way
from weight_update.update.versions import next_version
from weight_update.waiting import Clock, Deadline
from weight_update.weights.buckets import Bucket
from weight_update.weights.cargo import Cargo

URL = "http://engine:1"

# ---- answers

#: Keys that the parsers look for, so that what is made looks like an answer now and then.
KEYS = [
    *("success", "message", "error", "detail", "object", "version", "weight_version"),
    *("tp_size", "pp_size", "dp_size", "enable_dp_attention", "disaggregation_mode", "device"),
    *("dtype", "quantization", "random_seed", "startup_time", "architectures", "model_path"),
    *("loads", "num_reqs", "num_waiting_reqs", "num_running_reqs", "enable_lora", "ep_size"),
    *("ranks", "checksums", "parts", "digest", "dim", "start", "length", "parallelism_info"),
    *("workers", "urls", "url", "is_healthy", "data", "owned_by", "lm_head.weight"),
]
TEXTS = [
    *(
        "sha256",
        "float32",
        "auto",
        "null",
        "prefill",
        "0.5.23",
        "v0.5",
        "http://a:1",
        "http://[",
        "",
    ),
    *("LlamaForCausalLM", "already open", "Weights were updated", "partially updated", "9" * 30),
    *(
        "model.norm.weight",
        "no weight-update session",
        "Failed to receive",
        "²",
        "٣",
        "\x00",
        "\ud800",
    ),
]
NUMBERS = st.integers() | st.floats() | st.sampled_from([0, 1, -1, 2**63, 10**400, 1e308])
SCALARS = st.none() | st.booleans() | NUMBERS | st.sampled_from(TEXTS) | st.text(max_size=8)
JSON = st.recursive(
    SCALARS,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.sampled_from(KEYS) | st.text(max_size=4), inner, max_size=6)
    ),
    max_leaves=16,
)
STATUSES = st.sampled_from(
    [200, 201, 204, 302, 400, 401, 403, 404, 405, 409, 422, 500, 502, 503]
) | (st.integers(100, 999))
DEEP = [b"[" * 100_000, b'{"a":' * 100_000, b"[" * 5_000 + b"]" * 5_000]
LONG = [
    b"9" * 6_000,
    b'{"success": ' + b"1" * 6_000 + b"}",
    b'{"version": "0.' + b"9" * 6_000 + b'"}',
]
BODIES = (
    st.binary(max_size=80)
    | JSON.map(lambda value: json.dumps(value).encode())
    | JSON.map(lambda value: json.dumps(value).encode()[:-1])
    | JSON.map(lambda value: json.dumps(value).encode("utf-16"))
)
CHARSETS = ["utf-8", "utf-16", "hex", "unicode_escape", "nonsense", "", "utf-7"]
TYPES = st.sampled_from([None, "application/json", *(f"text/html; charset={c}" for c in CHARSETS)])


class Puppet:
    """Answers every request with what it is told, without a network."""

    def __init__(self, answers: list[tuple[int, bytes, str | None]]) -> None:
        self._answers = answers
        self._turn = 0

    def ask(self, *_: Any, **__: Any) -> Answer:
        status, body, kind = self._answers[self._turn % len(self._answers)]
        self._turn += 1
        return Answer(status, "", [] if kind is None else [("Content-Type", kind)], body)

    def close(self) -> None: ...


ANSWERS = st.lists(st.tuples(STATUSES, BODIES, TYPES), min_size=1, max_size=4)


def attach(client: SGLangClient, answers: list[tuple[int, bytes, str | None]]) -> SGLangClient:
    client._calls._connections = Puppet(answers)  # type: ignore[assignment]
    return client


def soon() -> Deadline:
    """A deadline of a few waits, none of which takes any time."""
    now = [0.0]

    def sleep(seconds: float) -> None:
        now[0] += max(seconds, 0.5)

    def tick() -> float:
        now[0] += 0.01
        return now[0]

    return Deadline(5.0, Clock(tick, sleep))


def answered(call: Callable[[], Any]) -> Any:
    """The value of a call, or its error, which must be the library's own and printable."""
    try:
        return call()
    except WeightUpdateError as error:
        caught = error
    assert 0 < len(str(caught)) < 4_000
    assert repr(caught)
    return caught


quick = settings(max_examples=40, suppress_health_check=list(HealthCheck))

# ---- the client: one method an endpoint


CALLS: dict[str, Callable[[SGLangClient], Any]] = {
    "has": lambda c: c.has("/pause_generation", soon()),
    "server_info": lambda c: c.server_info(soon()),
    "model_info": lambda c: c.model_info(soon()),
    "ready": lambda c: c.ready(soon()),
    "workers": lambda c: c.workers(soon()),
    "checksums": lambda c: c.checksums(soon(), "verify"),
    "first_row": lambda c: c.first_row("model.norm.weight", soon()),
    "loads": lambda c: c.loads("/v1/loads", soon()),
    "init_group": lambda c: c.init_group({}, soon()),
    "destroy_group": lambda c: c.destroy_group("g", soon()),
    "pause": lambda c: c.pause("abort", soon()),
    "resume": lambda c: c.resume(soon()),
    "begin": lambda c: c.begin(soon()),
    "end": lambda c: c.end(soon()),
    "update": lambda c: c.update({}, soon()),
    "flush": lambda c: c.words(c.flush(soon())),
    "stamp": lambda c: c.stamp("1", soon()),
    "session": lambda c: SGLangSession(c, needed=True).open(soon()),
    "recover": lambda c: SGLangSession(c, needed=True).recover(soon()),
}


@pytest.mark.parametrize("name", CALLS)
@quick
@given(answers=ANSWERS)
@example(answers=[(200, DEEP[0], None)])
@example(answers=[(400, LONG[1], "application/json")])
@example(answers=[(500, b"\xff\xfe", "text/html; charset=utf-32")])
@example(answers=[(500, b"\xe4", "text/html; charset=hex")])
def test_any_answer_to_any_call_is_a_value_or_a_typed_error(
    name: str, answers: list[tuple[int, bytes, str | None]]
) -> None:
    client = attach(SGLangClient(URL, HttpOptions(api_key="k")), answers)
    result = answered(lambda: CALLS[name](client))
    if name == "update" and isinstance(result, WeightUpdateError):
        assert result.applied in ("nothing", "partly", "all", "unknown")  # type: ignore[attr-defined]


ENGINE: dict[str, Callable[[SGLangEngine], Any]] = {
    "inspect": lambda e: e.inspect(soon()),
    "observe": lambda e: e.observe(soon()),
    "label": lambda e: e.label(soon()),
    "workers": lambda e: e.workers(soon()),
    "check_names": lambda e: e.check_names(["model.norm.weight", "x"], soon()),
    "digests": lambda e: e.digests(soon()),
    "first_values": lambda e: e.first_values("model.layers.0.self_attn.o_proj.weight", soon()),
    "drain": lambda e: e.drain("abort", soon()),
    "flush": lambda e: e.flush(soon()),
    "flush_once": lambda e: e.flush_once(soon()),
    "apply": lambda e: _apply(e, "broadcast"),
    "load": lambda e: _apply(e, "disk"),
}


def _apply(engine: SGLangEngine, way: Way) -> None:
    cargo = Cargo(folder=Path("/nowhere"))
    engine.session(way).apply(Bucket(()), cargo, group_name="g", flush=True, deadline=soon())


def healthy_engine() -> SGLangEngine:
    """An engine that was inspected with good answers."""
    engine = SGLangEngine(URL, HttpOptions())
    info = {
        **{"version": "0.5.23", "tp_size": 1, "dtype": "float32", "device": "cpu"},
        "architectures": ["LlamaForCausalLM"],
    }
    attach(engine._client, [(200, json.dumps(info).encode(), None)])
    engine.inspect(soon())
    return engine


@pytest.mark.parametrize("name", ENGINE)
@quick
@given(answers=ANSWERS)
@example(answers=[(200, LONG[2], None)])
def test_any_answer_to_an_engine_that_was_inspected_is_a_value_or_a_typed_error(
    name: str, answers: list[tuple[int, bytes, str | None]]
) -> None:
    engine = healthy_engine()
    attach(engine._client, answers)
    answered(lambda: ENGINE[name](engine))


@pytest.mark.parametrize("engine", ["auto", "sglang", "vllm"])
@quick
@given(answers=ANSWERS, vectors=st.none() | st.just(["model.norm.weight"]))
def test_any_answer_to_a_diagnosis_is_facts(
    engine: str, answers: list[tuple[int, bytes, str | None]], vectors: list[str] | None
) -> None:
    asker = Asker(URL, HttpOptions(api_key="k"), 5.0)
    for http in (asker._http, asker._keyless):
        http._connections = Puppet(answers)  # type: ignore[assignment]
    facts = answered(lambda: recognition._probed(asker, engine, vectors))
    assert isinstance(facts, (ServerFacts, WeightUpdateError))


# ---- the parsers alone


@given(JSON)
@example(body=[[[[]]]])
@example(body=[10**400])
@example(body={"loads": [{"num_reqs": 10**400, "num_waiting_reqs": -(10**400)}]})
def test_parsers_of_any_json_give_a_value_or_nothing(body: Any) -> None:
    running = running_requests(body)
    assert running is None or isinstance(running, int)
    row = sglang_facts.first_row_of(body)
    assert row is None or all(isinstance(value, float) for value in row)
    digests = sglang_facts.digests_of(body)
    if digests is not None:
        assert isinstance(digests, Digests)
        names = sglang_names.runtime_names(digests)
        check = sglang_names.check_names(["x", "a.q_proj.weight"], names, ["LlamaForCausalLM"])
        assert check.known


MAPPINGS = st.dictionaries(st.sampled_from(KEYS), JSON, max_size=12)


@given(info=MAPPINGS, model=MAPPINGS)
@example(info={"version": "0." + "9" * 6_000}, model={})
@example(info={}, model={"weight_version": "9" * 6_000})
def test_what_a_server_says_of_itself_is_read_or_refused(
    info: dict[str, Any], model: dict[str, Any]
) -> None:
    found = sglang_facts.model_of(info, model)
    assert found.layout is None or isinstance(found.layout, str)
    label, instance = sglang_facts.label_of(model), sglang_facts.instance_of(info)
    assert label is None or isinstance(label, str)
    assert instance is None or isinstance(instance, str)
    answered(lambda: read_layout(info))
    release = info.get("version")
    routes: dict[str, bool | None] = dict.fromkeys(PROBED_ROUTES)
    result = answered(
        lambda: read_capabilities(release if isinstance(release, str) else "", routes, url=URL)
    )
    assert isinstance(result, (SGLangCapabilities, WeightUpdateError))


@given(st.text(max_size=30) | st.text(string.digits + "v.²٣", max_size=30))
@example("0." + "9" * 6_000)
@example("v0.5.²")
def test_any_text_is_a_release_or_none(text: str) -> None:
    number = release_number(text)
    assert number is None or len(number) == 3


@given(current=st.integers(0, 10**9), labels=st.lists(st.none() | st.text(max_size=12), max_size=4))
@example(current=3, labels=["9" * 6_000])
@example(current=3, labels=["²", "٣"])
def test_any_label_leads_to_a_version_above_the_last(
    current: int, labels: list[str | None]
) -> None:
    assert next_version(current, labels) > current


@given(route=st.sampled_from(sorted(sglang_router.WORKER_ROUTES)), body=JSON)
@example(route="/workers", body={"workers": [{"url": "http://[", "is_healthy": True}]})
@example(route="/workers", body={"workers": [{"url": "http://a:1", "is_healthy": []}]})
def test_any_list_of_workers_is_urls_or_refused(route: str, body: Any) -> None:
    if sglang_router.is_list_of_workers(route, body):
        result = answered(lambda: sglang_router.read_workers(route, body, url=URL))
        assert isinstance(result, (tuple, WeightUpdateError))
        if isinstance(result, tuple):
            assert all(url.startswith(("http://", "https://")) for url in result)


@given(BODIES, TYPES)
@example(DEEP[1], None)
@example(DEEP[0], "application/json")
def test_any_body_is_json_or_nothing_and_has_words(body: bytes, kind: str | None) -> None:
    client = attach(SGLangClient(URL, HttpOptions()), [(500, body, kind)])
    response = client._calls.call("GET", "/x", phase="connect", deadline=soon())
    json_of(response)
    words = client.words(response)
    assert 0 < len(words) <= 500


@pytest.mark.parametrize(
    "charset", ["idna", "punycode", "hex", "zip", "rot13", "mbcs", "undefined"]
)
def test_a_charset_that_cannot_replace_what_it_cannot_read_breaks_no_message(charset: str) -> None:
    kind = f"text/html; charset={charset}"
    client = attach(SGLangClient(URL, HttpOptions()), [(500, b"\x80 no", kind)])
    assert isinstance(answered(lambda: client.pause("abort", soon())), WeightUpdateError)


# ---- bytes on the wire


class RawServer:
    """Answers every connection with the same bytes and hangs up."""

    def __init__(self) -> None:
        self.answer = b""
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            with connection:
                try:
                    connection.recv(65_536)
                    connection.sendall(self.answer)
                except OSError:
                    continue

    def close(self) -> None:
        self._listener.close()


@pytest.fixture(scope="module")
def raw() -> Iterator[RawServer]:
    server = RawServer()
    yield server
    server.close()


HEAD = b"HTTP/1.1 200 OK\r\n"
LINES = st.sampled_from(
    [
        b"Content-Length: 5\r\n",
        b"Content-Length: -1\r\n",
        b"Content-Length: x\r\n",
        b"Content-Length: 99999999999999999999\r\n",
        b"Transfer-Encoding: chunked\r\n",
        b"Content-Encoding: gzip\r\n",
        b"Content-Encoding: deflate\r\n",
        b"Content-Type: application/json; charset=idna\r\n",
        b"Location: http://[\r\n",
        b"Set-Cookie: \x00=\xff\r\n",
        b"Connection: close\r\n",
        b"no colon\r\n",
        b"\xff\xfe: \x80\r\n",
    ]
)
WIRE = st.binary(max_size=60) | st.builds(
    lambda head, lines, body: head + b"".join(lines) + b"\r\n" + body,
    st.sampled_from(
        [
            HEAD,
            b"HTTP/1.1 999 ?\r\n",
            b"HTTP/9.9 200 OK\r\n",
            b"HTTP/1.1 -1 x\r\n",
            b"ICY 200 OK\r\n",
        ]
    ),
    st.lists(LINES, max_size=3),
    st.binary(max_size=20)
    | st.sampled_from([b"5\r\nhello\r\n0\r\n\r\n", b"zz\r\n", b'{"success": true}']),
)


@settings(max_examples=100, suppress_health_check=list(HealthCheck))
@given(answer=WIRE)
@example(answer=HEAD + b"Content-Encoding: gzip\r\n\r\nnot gzip")
@example(answer=HEAD + b"Transfer-Encoding: chunked\r\n\r\nzz\r\n")
@example(answer=HEAD + b"X: y\r\n" * 200 + b"\r\n")
@example(answer=HEAD + b"X: " + b"y" * 70_000 + b"\r\n\r\n")
@example(answer=b"HTTP/1.1 302 Found\r\nLocation: http://[\r\n\r\n")
@example(answer=b"HTTP/1.1 302 Found\r\nLocation: \xff\xfe\r\nContent-Length: 0\r\n\r\n")
@example(answer=b"HTTP/1.1 100 Continue\r\n\r\n" * 50)
@example(answer=HEAD + b"Set-Cookie: a=b; Domain=[; Expires=x\r\nContent-Length: 0\r\n\r\n")
def test_any_bytes_on_the_wire_are_an_answer_or_a_typed_error(
    answer: bytes, raw: RawServer
) -> None:
    raw.answer = answer
    options = HttpOptions(api_key="k")
    http = EngineHttp(raw.url, options)
    result = answered(lambda: http.call("GET", "/x", phase="connect", deadline=Deadline(5.0)))
    if isinstance(result, requests.Response):
        error = AnswerReader(raw.url, options).rejection(result, phase="connect")
        assert len(str(error)) < 4_000
    http.close()
