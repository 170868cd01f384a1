"""HTTP to one engine: nothing from the environment, every wait bounded, keys never shown."""

from __future__ import annotations

import copy
import json
import pickle
import socket
import time
import traceback
from collections.abc import Iterator
from concurrent.futures import Future

import pytest
import requests

from weight_update.engines.answers import AnswerReader, json_of
from weight_update.engines.http import EngineHttp
from weight_update.errors import EngineRejected, EngineUnreachable, UpdateTimeout
from weight_update.options import HttpOptions
from weight_update.waiting import Deadline, spawn

KEY, ADMIN_KEY = "key-hunter2", "admin-hunter3"


def client(url: str, **options) -> EngineHttp:
    return EngineHttp(url, HttpOptions(**options))


def reader(url: str, **options) -> AnswerReader:
    return AnswerReader(url, HttpOptions(**options))


def get(engine: EngineHttp, route: str = "/x", *, seconds: float = 5.0, **more):
    return engine.call("GET", route, phase="pause", deadline=Deadline(seconds), **more)


@pytest.fixture
def unused_port() -> Iterator[int]:
    """A port that nobody listens on, and that nobody else can take meanwhile."""
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        yield holder.getsockname()[1]


# -- requests ------------------------------------------------------------------------------


def test_a_call_carries_its_method_route_and_json_body(server) -> None:
    response = client(server.url).call(
        "POST", "/a/b", phase="pause", deadline=Deadline(5), body={"mode": "abort"}
    )

    assert response.status_code == 200
    (asked,) = server.asked
    assert (asked.method, asked.path, asked.body) == ("POST", "/a/b", {"mode": "abort"})
    assert asked.headers["Content-Type"] == "application/json"


def test_an_empty_body_is_still_a_json_object(server) -> None:
    client(server.url).call("POST", "/a", phase="begin", deadline=Deadline(5), body={})

    assert server.asked[0].body == {}


@pytest.mark.parametrize("status", [200, 204, 400, 404, 500, 503])
def test_any_answer_is_an_answer_and_no_error(server, answer, status: int) -> None:
    server.answers["/x"] = answer(status=status, body=b"")

    assert get(client(server.url)).status_code == status


def test_connections_are_used_again(server, monkeypatch) -> None:
    monkeypatch.setattr("weight_update.engines.http._IDLE_SECONDS", 600.0)
    engine = client(server.url)
    for _ in range(5):
        get(engine)

    assert server.connections == 1


def test_a_connection_that_idled_is_not_used_again(server, monkeypatch) -> None:
    """A server closes idle connections; a request sent at that moment has an unknown outcome."""
    engine = client(server.url)
    get(engine)
    monkeypatch.setattr("weight_update.engines.http._IDLE_SECONDS", 0.0)
    time.sleep(0.01)

    get(engine)

    assert server.connections == 2


def test_a_closed_client_can_be_closed_again_and_used_again(server) -> None:
    engine = client(server.url)
    get(engine)
    engine.close()
    engine.close()

    assert get(engine).status_code == 200


def asked_once(answer: bytes, body: object) -> tuple[bytes, Future[requests.Response]]:
    """What one read of a raw server got, and what came of its raw answer."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        engine = client(f"http://127.0.0.1:{listener.getsockname()[1]}/base")
        call = spawn(
            lambda: engine.call("POST", "/x", phase="pause", deadline=Deadline(20), body=body)
        )
        connection, _ = listener.accept()
        with connection:
            asked = connection.recv(1 << 16)
            connection.sendall(answer)
    call.exception(timeout=20)
    return asked, call


def test_a_request_leaves_in_one_piece_so_that_the_server_wakes_once() -> None:
    asked, call = asked_once(b"HTTP/1.1 204 No Content\r\n\r\n", {"mode": "abort"})

    head, _, body = asked.partition(b"\r\n\r\n")
    assert head.startswith(b"POST /base/x HTTP/1.1\r\n")
    assert json.loads(body) == {"mode": "abort"}
    assert call.result().status_code == 204


@pytest.mark.parametrize("length", [20, 10**18])
def test_an_answer_that_ends_before_its_announced_end_is_none(length: int) -> None:
    """And no memory is taken for what never comes."""
    _, call = asked_once(f"HTTP/1.1 200 OK\r\nContent-Length: {length}\r\n\r\nx".encode(), {})

    with pytest.raises(EngineUnreachable, match="/x"):
        call.result()


# -- proxies (C12) -------------------------------------------------------------------------

PROXY_VARIABLES = ["HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"]


@pytest.fixture
def no_exceptions_for_loopback(monkeypatch) -> None:
    for name in ("NO_PROXY", "no_proxy", *PROXY_VARIABLES):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize("variable", PROXY_VARIABLES)
@pytest.mark.usefixtures("no_exceptions_for_loopback")
def test_a_proxy_of_the_environment_is_not_used(server, monkeypatch, variable: str) -> None:
    monkeypatch.setenv(variable, "http://127.0.0.1:9")

    assert get(client(server.url)).status_code == 200


@pytest.mark.parametrize("variable", PROXY_VARIABLES)
@pytest.mark.usefixtures("no_exceptions_for_loopback")
def test_a_proxy_is_used_when_the_user_says_so(
    server, make_server, monkeypatch, variable: str
) -> None:
    proxy = make_server()
    monkeypatch.setenv(variable, proxy.url)

    get(client(server.url, use_proxies=True))

    assert server.asked == []
    assert proxy.asked[0].path == f"{server.url}/x"


def test_credentials_of_a_netrc_file_are_not_used(server, monkeypatch, tmp_path) -> None:
    netrc = tmp_path / "netrc"
    netrc.write_text("machine 127.0.0.1 login me password hunter4\n")
    monkeypatch.setenv("NETRC", str(netrc))

    get(client(server.url))

    assert "Authorization" not in server.asked[0].headers


# -- keys (C51) ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("keys", "control", "sent"),
    [
        ({}, True, None),
        ({"api_key": KEY}, True, KEY),
        ({"api_key": KEY, "admin_api_key": ADMIN_KEY}, True, ADMIN_KEY),
        ({"api_key": KEY, "admin_api_key": ADMIN_KEY}, False, KEY),
        ({"admin_api_key": ADMIN_KEY}, False, ADMIN_KEY),
    ],
)
def test_each_route_gets_the_key_it_needs(server, keys, control: bool, sent: str | None) -> None:
    get(client(server.url, **keys), control=control)

    assert server.asked[0].headers.get("Authorization") == (f"Bearer {sent}" if sent else None)


def all_text_of(error: BaseException) -> str:
    """Everything a log, a debugger's repr or a pickle of an error may show."""
    parts = ["".join(traceback.format_exception(error)), repr(error), repr(vars(error))]
    return "".join([*parts, repr(pickle.dumps(error))])


@pytest.mark.parametrize("status", [400, 401, 403, 500])
def test_a_key_is_in_no_part_of_a_refusal(server, answer, status: int) -> None:
    server.answers["/x"] = answer(status=status, body={"error": "no"})
    keys = {"api_key": KEY, "admin_api_key": ADMIN_KEY}

    error = reader(server.url, **keys).rejection(get(client(server.url, **keys)), phase="pause")

    assert "hunter" not in all_text_of(error)
    assert "hunter" not in repr(vars(error.response.request))
    assert "hunter" not in repr(vars(error.response)) + error.response.text


@pytest.mark.parametrize("fault", ["hang up", "late", "nobody"])
def test_a_key_is_in_no_part_of_an_error_without_an_answer(
    server, answer, unused_port: int, fault: str
) -> None:
    server.answers["/x"] = answer(hang_up=fault == "hang up", delay=30 * (fault == "late"))
    url = f"http://127.0.0.1:{unused_port}" if fault == "nobody" else server.url
    engine = client(url, api_key=KEY, admin_api_key=ADMIN_KEY)

    with pytest.raises((EngineUnreachable, UpdateTimeout)) as caught:
        get(engine, seconds=0.1)

    assert "hunter" not in all_text_of(caught.value)


@pytest.mark.parametrize("status", [401, 403])
def test_a_refused_key_is_answered_with_the_argument_to_pass(server, answer, status: int) -> None:
    server.answers["/x"] = answer(status=status, body={"error": "Unauthorized"})
    engine = client(server.url)

    error = reader(server.url).rejection(get(engine), phase="pause")

    assert "admin_api_key=" in error.remedy
    assert "WEIGHT_UPDATE_API_KEY" in error.remedy


def test_a_redirect_is_not_followed_and_takes_no_key_elsewhere(server, make_server, answer) -> None:
    other = make_server()
    server.answers["/x"] = answer(status=307, headers={"Location": f"{other.url}/x"})
    engine = client(server.url, api_key=KEY)

    response = get(engine)

    assert response.status_code == 307
    assert other.asked == []
    assert "final URL" in reader(server.url).rejection(response, phase="pause").remedy


# -- time ----------------------------------------------------------------------------------


def test_no_answer_before_the_deadline_is_a_timeout_that_names_the_route(server, answer) -> None:
    server.answers["/x"] = answer(delay=30)

    with pytest.raises(UpdateTimeout, match="/x") as caught:
        get(client(server.url), seconds=0.2)

    assert (caught.value.engine, caught.value.phase) == (server.url, "pause")
    assert isinstance(caught.value, TimeoutError)


def test_a_request_is_not_repeated_after_its_time_ran_out(server, answer) -> None:
    server.answers["/x"] = answer(delay=30)
    engine = client(server.url)

    with pytest.raises(UpdateTimeout):
        get(engine, seconds=0.1)

    get(engine, "/next")
    assert [asked.path for asked in server.asked].count("/x") <= 1


def test_a_request_is_not_repeated_after_its_connection_broke(server, answer) -> None:
    server.answers["/x"] = answer(hang_up=True)

    with pytest.raises(EngineUnreachable, match="/x") as caught:
        get(client(server.url))

    assert len(server.asked) == 1
    assert isinstance(caught.value, ConnectionError)


def test_nothing_is_sent_once_the_deadline_has_passed(server) -> None:
    with pytest.raises(UpdateTimeout, match="no time left for /x"):
        get(client(server.url), seconds=0.0)

    assert server.asked == []


def test_a_server_that_is_not_there_is_unreachable_at_once(unused_port: int) -> None:
    url = f"http://127.0.0.1:{unused_port}"
    deadline = Deadline(60)

    with pytest.raises(EngineUnreachable, match="refused") as caught:
        client(url).call("GET", "/x", phase="pause", deadline=deadline)

    assert deadline.remaining() > 30
    assert caught.value.engine == url
    assert caught.value.remedy
    assert "object at 0x" not in str(caught.value)


def test_a_host_name_that_does_not_resolve_is_unreachable() -> None:
    with pytest.raises(EngineUnreachable):
        get(client("http://no-such-host.invalid:1"))


# -- answers (C48) -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({"success": False, "message": "group unknown"}, "group unknown"),
        ({"error": {"message": "deep inside"}}, "deep inside"),
        ({"object": "error", "message": "1 validation errors"}, "1 validation errors"),
        ({"error": "Unauthorized"}, "Unauthorized"),
        ({"detail": "Not Found"}, "Not Found"),
        ("<html>\n  <h1>502 Bad\nGateway</h1></html>", "<html> <h1>502 Bad Gateway</h1></html>"),
        ("", "(empty body)"),
        ("  \n ", "(empty body)"),
        ([1, 2], "[1, 2]"),
        ({"message": ""}, '{"message": ""}'),
        ({"message": 3}, '{"message": 3}'),
        ({"detail": [{"msg": "field required"}]}, '{"detail": [{"msg": "field required"}]}'),
    ],
)
def test_a_refusal_quotes_the_engines_own_words(server, answer, body, words: str) -> None:
    server.answers["/x"] = answer(status=400, body=body)
    engine = client(server.url)

    error = reader(server.url).rejection(get(engine), phase="flush")

    assert isinstance(error, EngineRejected)
    assert error.message == f"/x answered 400: {words}"
    assert (error.engine, error.phase) == (server.url, "flush")
    assert error.response.status_code == 400


@pytest.mark.parametrize("body", ["x" * 100_000, {"message": "x" * 100_000}])
def test_a_refusal_quotes_five_hundred_characters_at_most(server, answer, body) -> None:
    server.answers["/x"] = answer(body=body)

    assert len(reader(server.url).words(get(client(server.url)))) == 500


@pytest.mark.parametrize("body", [b"", b"<html>", b"\xff\xfe\x00", b"{", "nul\0"])
def test_a_body_that_is_no_json_is_none(server, answer, body) -> None:
    server.answers["/x"] = answer(body=body)

    assert json_of(get(client(server.url))) is None


def test_a_refusal_is_also_the_http_error_of_requests(server, answer) -> None:
    server.answers["/x"] = answer(status=500, body="boom")
    engine = client(server.url)

    with pytest.raises(requests.HTTPError, match="boom") as caught:
        raise reader(server.url).rejection(get(engine), phase="pause")

    assert caught.value.response.status_code == 500


@pytest.mark.parametrize("rebuild", [lambda e: pickle.loads(pickle.dumps(e)), copy.deepcopy])
def test_a_refusal_crosses_processes_with_its_answer(server, answer, rebuild) -> None:
    server.answers["/x"] = answer(status=500, body="boom")
    engine = client(server.url, api_key=KEY)
    error = reader(server.url, api_key=KEY).rejection(get(engine), phase="pause")

    twin = rebuild(error)

    assert str(twin) == str(error)
    assert twin.response.status_code == 500
