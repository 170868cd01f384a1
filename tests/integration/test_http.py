"""Keys, proxies, addresses and servers that are not what they should be."""

from __future__ import annotations

import json
import logging
import socket
import threading
import traceback
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
import torch

from weight_update import (
    ConfigurationError,
    EngineRejected,
    EngineUnreachable,
    SGLangWeightSyncScheme,
    WeightUpdateError,
)
from weight_update.reference_engine import ReferenceEngine

from . import kit
from .kit import ADMIN_KEY, INIT, KEY, PAUSE

WRONG = "wrong-5ecret"
PROXIES = ("HTTP_PROXY", "http_proxy", "HTTPS_PROXY", "https_proxy", "ALL_PROXY", "all_proxy")
WEIGHTS = {"w": torch.zeros(2)}


# ---- keys


def test_keys_given_as_arguments_open_every_route(locked: ReferenceEngine) -> None:
    """C51: control routes get the admin key, the others the ordinary one."""
    with kit.make_sender(locked, api_key=KEY, admin_api_key=ADMIN_KEY) as sender:
        sender.update_weights(kit.llama(1))
    assert kit.served(locked) == kit.tokens_of(1)


def test_keys_come_from_the_environment(
    locked: ReferenceEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """C51: a trailing newline, as a mounted secret has it, does no harm."""
    monkeypatch.setenv("WEIGHT_UPDATE_API_KEY", KEY)
    monkeypatch.setenv("WEIGHT_UPDATE_ADMIN_API_KEY", f"{ADMIN_KEY}\n")
    with kit.make_sender(locked) as sender:
        sender.update_weights(kit.llama(0))
    assert kit.served(locked) == kit.tokens_of(0)


@pytest.mark.parametrize(
    "keys",
    [
        {},
        {"api_key": WRONG},
        {"api_key": KEY},
        {"api_key": KEY, "admin_api_key": WRONG},
    ],
    ids=["none", "wrong", "no admin key", "wrong admin key"],
)
def test_a_wrong_key_is_one_clear_error_before_any_pause(
    keys: dict[str, str], locked: ReferenceEngine, caplog: pytest.LogCaptureFixture
) -> None:
    """C51: and no key is in the error, its traceback, the report, a repr or any log."""
    log = kit.Log(locked)
    sender = kit.make_sender(locked, **keys)
    with caplog.at_level(logging.DEBUG), pytest.raises(EngineRejected, match="401") as caught:
        sender.update_weights(WEIGHTS)
    error = caught.value
    assert error.engine == locked.url
    assert error.phase in ("plan", "connect")
    assert "admin_api_key" in str(error)
    assert log.count(locked, PAUSE) == 0
    seen = [
        "".join(traceback.format_exception(error)),
        repr(error),
        repr(vars(error)),
        repr(vars(error.response)),
        repr(error.response.request.headers),
        repr(vars(sender)),
        repr(sender._scheme.options),
        json.dumps(error.report.to_dict()),
        caplog.text,
    ]
    assert not [text for text in seen if "5ecret" in text]
    sender.shutdown()


def test_no_key_is_in_the_log_of_a_good_update(
    locked: ReferenceEngine, caplog: pytest.LogCaptureFixture
) -> None:
    """C51: not even at debug level."""
    sender = kit.make_sender(locked, api_key=KEY, admin_api_key=ADMIN_KEY)
    with caplog.at_level(logging.DEBUG), sender:
        report = sender.update_weights(kit.llama(1))
    assert "5ecret" not in caplog.text + str(report) + repr(sender._scheme.options)


# ---- proxies


@pytest.mark.parametrize("variables", [PROXIES[:1], PROXIES[1:2], PROXIES[4:], PROXIES])
def test_proxies_of_the_environment_do_not_capture_control_calls(
    variables: tuple[str, ...], engine: ReferenceEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """C12: nothing listens on port 9."""
    for variable in variables:
        monkeypatch.setenv(variable, "http://127.0.0.1:9")
    monkeypatch.delenv("NO_PROXY", raising=False)
    monkeypatch.delenv("no_proxy", raising=False)
    kit.push(engine, kit.llama(1))
    assert kit.served(engine) == kit.tokens_of(1)


def test_a_proxy_is_used_when_asked_for(
    engine: ReferenceEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """C12: it is dead, so the update fails, typed and before a pause."""
    for variable in PROXIES:
        monkeypatch.setenv(variable, "http://127.0.0.1:9")
    monkeypatch.setenv("NO_PROXY", "")
    monkeypatch.setenv("no_proxy", "")
    log = kit.Log(engine)
    with kit.make_sender(engine, use_proxies=True) as sender:
        with pytest.raises(EngineUnreachable) as caught:
            sender.update_weights(kit.llama(1))
        assert caught.value.engine == engine.url
    assert log.records(engine) == []


# ---- addresses


def has_ipv6() -> bool:
    try:
        with socket.socket(socket.AF_INET6) as probe:
            probe.bind(("::1", 0))
    except OSError:
        return False
    return True


@pytest.mark.skipif(not has_ipv6(), reason="this host has no IPv6 loopback")
def test_an_engine_is_updated_over_ipv6() -> None:
    """C45: the URL in brackets, the rendezvous on ::1."""
    with ReferenceEngine(kit.llama(0), host="::1") as engine:
        assert engine.url.startswith("http://[::1]:")
        log = kit.Log(engine)
        with kit.make_sender(engine) as sender:
            sender.update_weights(kit.llama(1))
            assert kit.served(engine) == kit.tokens_of(1)
            (body,) = log.bodies(engine, INIT)
            assert body["master_address"] == "::1"


@pytest.fixture
def closed_port() -> Iterator[int]:
    """A port that nobody listens on, and that nobody else can take meanwhile."""
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        yield int(holder.getsockname()[1])


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "no-such-host.invalid"])
def test_an_engine_that_is_not_there_is_a_typed_error_at_once(host: str, closed_port: int) -> None:
    url = f"http://{host}:{closed_port}"
    sender = SGLangWeightSyncScheme(url, timeout=60).create_sender()
    with kit.takes_at_most(30), pytest.raises(EngineUnreachable) as caught:
        sender.update_weights(WEIGHTS)
    assert caught.value.engine == url
    assert caught.value.report.engines[url].state == "unreachable"
    sender.shutdown()


def test_connecting_to_an_engine_that_is_not_there_is_a_typed_error_at_once(
    closed_port: int,
) -> None:
    url = f"http://127.0.0.1:{closed_port}"
    sender = SGLangWeightSyncScheme(url, timeout=60).create_sender()
    with kit.takes_at_most(30), pytest.raises(EngineUnreachable) as caught:
        sender.init_all_workers_group()
    assert caught.value.engine == url


def test_one_missing_engine_of_three_is_named_before_any_is_paused(
    three: list[ReferenceEngine], closed_port: int
) -> None:
    """C22: nothing is done to the others."""
    missing = f"http://127.0.0.1:{closed_port}"
    log = kit.Log(*three)
    sender = SGLangWeightSyncScheme([e.url for e in three] + [missing]).create_sender()
    with kit.takes_at_most(30), pytest.raises(EngineUnreachable) as caught:
        sender.update_weights(WEIGHTS)
    assert caught.value.engine == missing
    assert [log.count(engine, PAUSE) for engine in three] == [0, 0, 0]
    sender.shutdown()


# ---- layouts and releases


class FakeServer:
    """Answers the questions that are asked before a group is made, as told; has every route.

    Args:
        info: The JSON of ``/server_info``.
        missing: Routes that answer 404.
        redirect: Where every call is sent instead.
    """

    def __init__(
        self,
        info: dict[str, Any] | None = None,
        missing: tuple[str, ...] = (),
        redirect: str | None = None,
    ) -> None:
        self.seen: list[tuple[str, str]] = []
        fake = self

        class Handler(BaseHTTPRequestHandler):
            def answer(self) -> None:
                fake.seen.append((self.command, self.path))
                self.rfile.read(int(self.headers.get("Content-Length", 0)))
                status, body = fake.reply(self.path, info or {}, missing)
                self.send_response(307 if redirect else status)
                if redirect:
                    self.send_header("Location", redirect + self.path)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            do_GET = do_POST = do_OPTIONS = answer

            def log_message(self, format: str, *args: Any) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True).start()

    @staticmethod
    def reply(path: str, info: dict[str, Any], missing: tuple[str, ...]) -> tuple[int, bytes]:
        if path in missing:
            return 404, b"{}"
        body = {"/server_info": info, "/model_info": {"weight_version": "default"}}
        return 200, json.dumps(body.get(path, {"success": True})).encode()

    def __enter__(self) -> FakeServer:
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()

    def posted(self) -> list[str]:
        return [path for method, path in self.seen if method == "POST"]


def refused(server: FakeServer, **options: Any) -> WeightUpdateError:
    """The error of an update that must fail before anything is posted."""
    scheme = SGLangWeightSyncScheme(server.url, timeout=60, **options)
    with scheme.create_sender() as sender, pytest.raises(WeightUpdateError) as caught:
        sender.update_weights(WEIGHTS)
    assert server.posted() == []
    assert caught.value.engine in (server.url, None)
    return caught.value


@pytest.mark.parametrize(
    ("info", "words"),
    [
        ({"version": "0.5.23", "tp_size": 1, "pp_size": 2}, "2 pipeline stages"),
        ({"version": "0.5.23", "tp_size": 1, "dp_size": 2}, "2 data-parallel replicas"),
    ],
    ids=["pipeline", "replicas"],
)
def test_a_layout_that_cannot_join_a_group_is_refused_a_broadcast_with_advice(
    info: dict[str, Any], words: str
) -> None:
    """C04: before any group is made or anything is paused."""
    with FakeServer(info) as server:
        error = refused(server, transport="broadcast", pause_mode="abort")
    assert isinstance(error, ConfigurationError)
    assert words in str(error)
    assert "transport='disk'" in str(error)
    assert "name the URL of each" in str(error)


def test_pipeline_stages_are_refused_a_pause_that_does_not_stop_them() -> None:
    with FakeServer({"version": "0.5.23", "tp_size": 1, "pp_size": 2}) as server:
        error = refused(server)
    assert isinstance(error, ConfigurationError)
    assert "use 'abort'" in str(error)


def test_a_wrong_number_of_ranks_is_refused_before_a_group_is_made(
    engine: ReferenceEngine,
) -> None:
    """C04: with both numbers, and the engine is not even told."""
    log = kit.Log(engine)
    with kit.make_sender(engine, num_gpus=2) as sender:
        with pytest.raises(ConfigurationError, match=r"num_gpus=2.*run 1 rank") as caught:
            sender.update_weights(kit.llama(1))
        assert caught.value.phase == "connect"
    assert log.count(engine, INIT) == log.count(engine, PAUSE) == 0


@pytest.mark.parametrize("given", [1, None])
def test_the_right_number_of_ranks_is_accepted(given: int | None, engine: ReferenceEngine) -> None:
    with kit.make_sender(engine, num_gpus=given) as sender:
        sender.update_weights(kit.llama(1))
        assert sender._transport.world_size == 2


def test_a_server_that_does_not_say_its_ranks_needs_to_be_told() -> None:
    with FakeServer({"version": "0.5.23"}) as server:
        assert "set num_gpus=" in str(refused(server))


@pytest.mark.parametrize(
    ("info", "missing"),
    [
        ({"version": "0.4.6.post1", "tp_size": 1}, ("/pause_generation",)),
        ({"version": "0.5.3", "tp_size": 1}, ()),
        ({"version": "0.5.23", "tp_size": 1}, ("/pause_generation",)),
    ],
    ids=["0.4.6", "0.5.3", "no pause route"],
)
def test_a_release_without_pause_modes_is_refused(
    info: dict[str, Any], missing: tuple[str, ...]
) -> None:
    """C03: a clear error at connect, with what is needed."""
    with FakeServer(info, missing) as server:
        error = refused(server)
    assert isinstance(error, ConfigurationError)
    assert "0.5.6 or later" in str(error)


def test_a_server_that_is_no_engine_is_refused() -> None:
    """C48: every route answers 200 with JSON that means nothing."""
    missing = ("/server_info", "/get_server_info", "/model_info", "/get_model_info")
    with FakeServer({}, missing) as server:
        assert isinstance(refused(server), WeightUpdateError)


def test_redirects_are_not_followed() -> None:
    """C51: the keys would go to another host."""
    with FakeServer() as other, FakeServer(redirect=other.url) as server:
        error = refused(server, api_key=KEY)
        assert isinstance(error, EngineRejected)
        assert "redirects are not followed" in str(error)
        assert other.seen == []
