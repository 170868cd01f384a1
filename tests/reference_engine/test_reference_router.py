"""The stand-in for a router: it lists its workers in two ways, and passes requests on in turn."""

from __future__ import annotations

import pytest
import requests

from weight_update.reference_engine import ReferenceRouter

GONE = "http://127.0.0.1:9"  # the discard port, where nobody listens


def asked(router, path, method="GET", **more):
    return requests.request(method, f"{router.url}{path}", timeout=60, **more)


def generate(router, prompt):
    params = {"max_new_tokens": 4, "temperature": 0}
    body = {"input_ids": prompt, "sampling_params": params}
    return asked(router, "/generate", "POST", json=body)


@pytest.fixture(scope="module")
def router(engine):
    with ReferenceRouter([engine.url, GONE], unhealthy=[GONE]) as running:
        yield running


def test_it_lists_its_workers_and_how_they_are(router, engine):
    assert asked(router, "/workers").json() == {
        "workers": [
            {"id": "0", "url": engine.url, "is_healthy": True},
            {"id": "1", "url": GONE, "is_healthy": False},
        ],
        "total": 2,
    }


def test_an_older_one_lists_their_urls_elsewhere(engine):
    with ReferenceRouter([engine.url], older=True) as router:
        assert asked(router, "/list_workers").json() == {"urls": [engine.url]}
        assert asked(router, "/workers").status_code == 404


def test_one_without_workers_says_so_and_serves_nobody(kit):
    with ReferenceRouter([]) as router:
        assert asked(router, "/workers").json() == {"workers": [], "total": 0}
        assert generate(router, kit.PROMPT).status_code == 503


@pytest.mark.parametrize("path", ["/list_workers", "/model_info", "/server_info", "/health"])
def test_there_is_nothing_else(router, path):
    assert asked(router, path).status_code == 404


def test_requests_go_to_a_healthy_worker_and_its_answer_comes_back(router, engine, kit):
    answers = [generate(router, kit.PROMPT) for _ in range(2)]

    own = engine.generate(kit.PROMPT, max_new_tokens=4)["output_ids"]
    assert [answer.json()["output_ids"] for answer in answers] == [own, own]


def test_a_refusal_of_a_worker_comes_back_as_it_is(router):
    refused = generate(router, [])

    assert refused.status_code == 400
    assert "must be given" in refused.json()["error"]["message"]


def test_requests_take_turns(engine, kit):
    with ReferenceRouter([engine.url, GONE]) as router:
        assert [generate(router, kit.PROMPT).status_code for _ in range(4)] == [200, 502] * 2


def test_workers_may_come_and_go(engine):
    with ReferenceRouter([]) as router:
        router.workers.append(engine.url)
        router.unhealthy.add(engine.url)
        (row,) = asked(router, "/workers").json()["workers"]
        assert (row["url"], row["is_healthy"]) == (engine.url, False)
