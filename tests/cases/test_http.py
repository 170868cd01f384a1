"""Section J of the case list: proxies, keys and answers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.integration import kit
from tests.integration.kit import CONTINUE, END, INIT, PAUSE, STAMP, UPDATE
from weight_update import EngineRejected, EngineUnreachable, SGLangWeightSyncScheme
from weight_update.engines.sglang.client import SGLangClient
from weight_update.options import HttpOptions
from weight_update.reference_engine import ReferenceEngine
from weight_update.waiting import Deadline

from .fake_http import Answer, Asked, FakeServer

# ---- C12


PROXIES = ("HTTP_PROXY", "http_proxy", "HTTPS_PROXY", "https_proxy", "ALL_PROXY", "all_proxy")


@pytest.fixture
def no_exceptions(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    for name in (*PROXIES, "NO_PROXY", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
    return monkeypatch


@pytest.mark.parametrize("proxy", ["http://127.0.0.1:9", "socks5h://127.0.0.1:9", "127.0.0.1:9"])
def test_c12_no_proxy_of_the_environment_captures_an_update(
    proxy: str, engine: ReferenceEngine, no_exceptions: pytest.MonkeyPatch
) -> None:
    for name in PROXIES:
        no_exceptions.setenv(name, proxy)
    kit.push(engine, kit.llama(0))
    kit.push(engine, kit.llama(1))
    assert kit.served(engine) == kit.tokens_of(1)


def test_c12_an_opted_in_proxy_gets_the_calls(
    engine: ReferenceEngine, no_exceptions: pytest.MonkeyPatch
) -> None:
    log = kit.Log(engine)
    with FakeServer(reply=lambda asked: Answer(502, "<html>")) as proxy:
        no_exceptions.setenv("http_proxy", proxy.url)
        sender = kit.make_sender(engine, use_proxies=True)
        with pytest.raises(EngineRejected, match="502"):
            sender.update_weights(kit.llama(1))
        assert proxy.asked[0].path.startswith(engine.url)
    assert log.records(engine) == []


# ---- C48


def yes(body: Any) -> Answer:
    return Answer(200, body)


ANSWERS = {
    "200 true": (yes({"success": True, "message": "ok"}), True),
    "200 false": (yes({"success": False, "message": "cannot"}), False),
    "200 true as text": (yes({"success": "true"}), False),
    "200 one": (yes({"success": 1}), False),
    "200 null": (yes({"success": None}), False),
    "200 list": (yes([{"success": True}]), False),
    "200 empty": (yes(""), False),
    "200 html": (yes("<html>Welcome</html>"), False),
    "200 cut off": (yes('{"success": tr'), False),
    "201 true": (Answer(201, {"success": True}), False),
    "204 empty": (Answer(204, ""), False),
    "302 true": (Answer(302, {"success": True}), False),
    "400 json": (Answer(400, {"error": {"message": "bad"}}), False),
    "400 true": (Answer(400, {"success": True}), False),
    "500 text": (Answer(500, "Internal Server Error"), False),
}
FLAGGED: dict[str, Callable[[SGLangClient], None]] = {
    INIT: lambda client: client.init_group({}, Deadline(10)),
    UPDATE: lambda client: client.update({}, Deadline(10)),
    END: lambda client: client.end(Deadline(10)),
    STAMP: lambda client: client.stamp("1", Deadline(10)),
}


@pytest.mark.parametrize("path", FLAGGED)
@pytest.mark.parametrize("answer", ANSWERS)
def test_c48_only_a_200_that_says_true_is_a_yes(path: str, answer: str) -> None:
    told, good = ANSWERS[answer]
    with FakeServer(reply=lambda _: told) as server:
        client = SGLangClient(server.url, HttpOptions())
        if good:
            FLAGGED[path](client)
            return
        with pytest.raises(EngineRejected) as caught:
            FLAGGED[path](client)
        assert caught.value.engine == server.url
        assert f"{path} answered {told.status}" in str(caught.value)


UNFLAGGED: dict[str, Callable[[SGLangClient], None]] = {
    PAUSE: lambda client: client.pause("retract", Deadline(10)),
    CONTINUE: lambda client: client.resume(Deadline(10)),
}


@pytest.mark.parametrize("path", UNFLAGGED)
@pytest.mark.parametrize(
    ("told", "good"),
    [
        (yes({"message": "Generation paused successfully.", "status": "ok"}), True),
        (yes({}), True),
        (yes({"success": False}), False),
        (yes("<html>"), False),
        (Answer(400, {"message": "ok"}), False),
    ],
    ids=lambda value: str(getattr(value, "body", value)),
)
def test_c48_pause_and_continue_have_no_flag_and_need_none(
    path: str, told: Answer, good: bool
) -> None:
    with FakeServer(reply=lambda _: told) as server:
        client = SGLangClient(server.url, HttpOptions())
        if good:
            UNFLAGGED[path](client)
            return
        with pytest.raises(EngineRejected, match=path):
            UNFLAGGED[path](client)


@pytest.mark.parametrize(
    "body", ["long " * 5000, {"error": {"message": "x" * 9000}}, b"\xff" * 4000]
)
def test_c48_a_message_holds_a_bounded_part_of_the_body(body: Any) -> None:
    with (
        FakeServer(reply=lambda _: Answer(500, body)) as server,
        pytest.raises(EngineRejected) as caught,
    ):
        SGLangClient(server.url, HttpOptions()).pause("abort", Deadline(10))
    assert len(str(caught.value)) < 800


# ---- C51


KEY = "right-5ecret"
CONTROL = (INIT, PAUSE, UPDATE, END, STAMP, CONTINUE)


def wants_key(asked: Asked) -> Answer | None:
    given = asked.headers.get("Authorization")
    if asked.method == "POST" and given != f"Bearer {KEY}":
        return Answer(403 if given else 401, {"error": "Unauthorized"})
    return None


@pytest.mark.parametrize(("key", "status"), [(None, 401), ("wrong-5ecret", 403)])
@pytest.mark.parametrize("argument", ["api_key", "admin_api_key"])
def test_c51_a_control_route_that_refuses_the_key_is_one_error_before_any_pause(
    argument: str, key: str | None, status: int
) -> None:
    with FakeServer(reply=wants_key) as server:
        scheme = SGLangWeightSyncScheme(server.url, timeout=20.0, **{argument: key})  # type: ignore[arg-type]
        with (
            scheme.create_sender() as sender,
            pytest.raises(EngineRejected, match=str(status)) as caught,
        ):
            sender.update_weights(kit.llama(1))
        assert "admin_api_key=" in str(caught.value)
        assert "5ecret" not in str(caught.value) + repr(caught.value) + repr(sender)
        assert PAUSE not in server.posted()


@pytest.mark.parametrize("only", ["api_key", "admin_api_key"])
def test_c51_every_control_call_carries_the_key(only: str) -> None:
    """Either key alone is sent to control routes."""
    with FakeServer(reply=wants_key) as server:
        client = SGLangClient(server.url, HttpOptions(**{only: KEY}))
        for call in (*FLAGGED.values(), *UNFLAGGED.values()):
            call(client)
        assert set(server.posted()) == set(CONTROL)


def test_c51_a_dead_server_shows_no_key_either() -> None:
    with FakeServer() as server:
        url = server.url
    scheme = SGLangWeightSyncScheme(url, timeout=10.0, api_key=KEY, admin_api_key=KEY)
    with scheme.create_sender() as sender, pytest.raises(EngineUnreachable) as caught:
        sender.update_weights(kit.llama(1))
    assert "5ecret" not in str(caught.value) + repr(caught.value.__cause__)
