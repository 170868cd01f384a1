"""A router is told from a server by how it lists its workers, and refused when it cannot."""

from __future__ import annotations

import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weight_update.engines.sglang.router import WORKER_ROUTES, is_list_of_workers, read_workers
from weight_update.errors import ConfigurationError

ROUTER = "http://router:30000"
A, B = "http://a:30001", "http://b:30002"


def well(*urls: str) -> list[dict[str, Any]]:
    return [{"id": str(i), "url": url, "is_healthy": True} for i, url in enumerate(urls)]


@pytest.mark.parametrize(
    ("route", "body", "urls"),
    [
        ("/workers", {"workers": well(A, B), "total": 2, "stats": {}}, (A, B)),
        ("/workers", {"workers": [{"url": A}]}, (A,)),
        ("/workers", {"workers": well(f"{A}/")}, (A,)),
        ("/workers", {"workers": well(f"{A}@0", f"{A}@1", B)}, (A, B)),
        ("/workers", {"workers": well("https://a")}, ("https://a",)),
        ("/list_workers", {"urls": [A, B]}, (A, B)),
    ],
    ids=["workers", "no word of health", "a slash", "rank by rank", "TLS", "an older router"],
)
def test_the_workers_of_a_router_are_found(
    route: str, body: dict[str, Any], urls: tuple[str, ...]
) -> None:
    assert is_list_of_workers(route, body)
    assert read_workers(route, body, url=ROUTER) == urls


@pytest.mark.parametrize(
    ("route", "body", "words"),
    [
        ("/workers", {"workers": []}, "lists no workers"),
        ("/workers", {"workers": None}, "lists no workers"),
        ("/workers", {"workers": {"a": A}}, "lists no workers"),
        ("/workers", {"workers": [{"id": "a"}]}, "lists no workers"),
        ("/workers", {"workers": [*well(A), {"url": "grpc://b:1"}]}, "grpc://b:1"),
        ("/workers", {"workers": [*well(A), {"url": "http://"}]}, "http://"),
        ("/list_workers", {"urls": []}, "lists no workers"),
        ("/list_workers", {"urls": [A, 7]}, "lists no workers"),
    ],
)
def test_a_router_whose_workers_cannot_all_be_reached_is_refused_with_advice(
    route: str, body: dict[str, Any], words: str
) -> None:
    with pytest.raises(ConfigurationError, match=re.escape(words)) as caught:
        read_workers(route, body, url=ROUTER)

    assert (caught.value.engine, caught.value.phase) == (ROUTER, "connect")
    assert "URL of each server behind it" in caught.value.remedy


@pytest.mark.parametrize("body", [{"detail": "Not Found"}, {"success": True}, [], "html", None, {}])
@pytest.mark.parametrize("route", WORKER_ROUTES)
def test_any_other_answer_is_no_list_of_workers(route: str, body: Any) -> None:
    assert not is_list_of_workers(route, body)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.sampled_from([A, "x", f"{A}@3"]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["workers", "urls", "url", "is_healthy"]), inner)
    ),
    max_leaves=10,
)


@given(st.sampled_from(sorted(WORKER_ROUTES)), JSON)
def test_any_json_is_a_list_of_urls_a_refusal_or_no_list(route: str, body: Any) -> None:
    if not is_list_of_workers(route, body):
        return
    try:
        found = read_workers(route, body, url=ROUTER)
    except ConfigurationError:
        return
    assert found
    assert all(url.startswith("http") for url in found)


def test_a_worker_that_its_router_calls_unhealthy_is_a_worker_still() -> None:
    """A server that is paused, or held, fails the health checks of its router."""
    body = {"workers": [*well(A), {"url": B, "is_healthy": False}]}

    assert read_workers("/workers", body, url="http://router") == (A, B)
