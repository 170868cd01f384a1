"""Keys go to the host that the user named, and to no other."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.cases.fake_http import Answer, Asked, FakeServer
from tests.integration import kit
from tests.integration.kit import ADMIN_KEY, BEGIN, INIT, KEY, PAUSE
from weight_update import SGLangWeightSyncScheme, WeightUpdateError
from weight_update.engines.recognition import probe
from weight_update.engines.sglang.client import SGLangClient
from weight_update.options import HttpOptions
from weight_update.waiting import Deadline

KEYS = HttpOptions(api_key=KEY, admin_api_key=ADMIN_KEY)


@pytest.fixture
def other() -> Iterator[FakeServer]:
    """Another host, which records what it is asked."""
    with FakeServer() as server:
        yield server


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
@pytest.mark.parametrize("path", ["/server_info", "/model_info", INIT])
def test_an_update_follows_no_redirect_to_another_host(
    status: int, path: str, other: FakeServer
) -> None:
    def redirect(asked: Asked) -> Answer | None:
        to = {"Location": f"{other.url}{asked.path}"}
        return Answer(status, "", to) if asked.path == path else None

    with FakeServer(reply=redirect) as server:
        scheme = SGLangWeightSyncScheme(
            server.url, timeout=5.0, api_key=KEY, admin_api_key=ADMIN_KEY
        )
        with scheme.create_sender() as sender, pytest.raises(WeightUpdateError) as caught:
            sender.update_weights(kit.llama(1))
    assert other.asked == []
    assert "redirects are not followed" in str(caught.value)


@pytest.mark.parametrize("status", [301, 307])
@pytest.mark.parametrize("path", [PAUSE, BEGIN, "/update_weight_version", "/flush_cache"])
def test_no_control_call_follows_one_either(status: int, path: str, other: FakeServer) -> None:
    to = {"Location": f"{other.url}/elsewhere"}
    with FakeServer(reply=lambda _: Answer(status, "", to)) as server:
        client = SGLangClient(server.url, KEYS)
        calls = {
            PAUSE: lambda: client.pause("abort", Deadline(5)),
            BEGIN: lambda: client.begin(Deadline(5)),
            "/update_weight_version": lambda: client.stamp("1", Deadline(5)),
        }
        if path == "/flush_cache":
            assert client.flush(Deadline(5)).status_code == status
        else:
            with pytest.raises(WeightUpdateError):
                calls[path]()
    assert other.asked == []


def test_a_diagnosis_follows_none_and_names_the_place(other: FakeServer) -> None:
    to = {"Location": f"{other.url}/x"}
    with FakeServer(reply=lambda _: Answer(302, "", to)) as server:
        facts = probe(server.url, KEYS, 10.0)
    assert other.asked == []
    assert facts.redirect == f"{other.url}/x"


def test_a_cookie_that_a_server_sets_is_not_carried_to_another(other: FakeServer) -> None:
    cookie = {"Set-Cookie": "session=5ecret; Path=/"}
    with FakeServer(reply=lambda _: Answer(200, {"success": True}, cookie)) as server:
        SGLangClient(server.url, KEYS).pause("abort", Deadline(5))
        SGLangClient(other.url, HttpOptions()).pause("abort", Deadline(5))
    (asked,) = other.asked
    assert "Cookie" not in asked.headers
    assert "Authorization" not in asked.headers


def test_the_workers_of_a_router_are_hosts_of_the_users_fleet_only_where_it_lists_them(
    other: FakeServer,
) -> None:
    """A plain server that names somebody in its answers gets nobody called."""

    def boast(asked: Asked) -> Answer | None:
        info = {"version": "0.5.23", "tp_size": 1, "pp_size": 2, "next": other.url}
        return Answer(200, info) if asked.path == "/server_info" else None

    with FakeServer(reply=boast) as server:
        scheme = SGLangWeightSyncScheme(server.url, timeout=5.0, api_key=KEY)
        with scheme.create_sender() as sender, pytest.raises(WeightUpdateError):
            sender.update_weights(kit.llama(1))
    assert other.asked == []
