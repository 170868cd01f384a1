"""A server that wants an API key is sampled from as any other.

Pins: TorchRL's client sends no key, so such a server answered 401 when the policy was made.
"""

from __future__ import annotations

import pickle
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import requests
from torchrl.modules.llm import AsyncSGLang

from tests.cases.fake_http import Answer, Asked, FakeServer
from tests.collectors import llm_kit
from tests.engines.models import save_tiny_model
from tests.security.test_keys import everything_of
from weight_update import ConfigurationError, EngineRejected
from weight_update.options import API_KEY_VARIABLE
from weight_update.reference_engine import ReferenceEngine

KEY = "a-key-that-nobody-may-read"
SAMPLING = {"max_new_tokens": 5, "temperature": 0.0, "ignore_eos": True}


@pytest.fixture(scope="module")
def keyed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ReferenceEngine]:
    directory = save_tiny_model(tmp_path_factory.mktemp("keyed") / "model", seed=1)
    with ReferenceEngine(str(directory), api_key=KEY) as engine:
        yield engine


def sampled(policy: Any) -> Any:
    return policy(llm_kit.asked())["tokens", "response"]


def test_a_policy_with_the_key_samples(keyed: ReferenceEngine) -> None:
    policy = llm_kit.policy(keyed.url, api_key=KEY)
    assert [len(response) for response in sampled(policy)] == [5] * llm_kit.ENVS


def test_the_key_of_the_environment_is_taken(
    keyed: ReferenceEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(API_KEY_VARIABLE, KEY)
    assert len(sampled(llm_kit.policy(keyed.url))) == llm_kit.ENVS


def test_a_policy_with_a_key_goes_to_another_process(keyed: ReferenceEngine) -> None:
    policy = pickle.loads(pickle.dumps(llm_kit.policy(keyed.url, api_key=KEY)))
    assert len(sampled(policy)) == llm_kit.ENVS


def test_a_policy_with_a_key_shows_the_engine_that_it_asks(keyed: ReferenceEngine) -> None:
    """And not the key."""
    model = llm_kit.policy(keyed.url, api_key=KEY).model
    assert model.server_url == keyed.url
    assert model.get_tp_size() * model.get_dp_size() == 1
    assert KEY not in repr(model) + repr(vars(model.engine))


@pytest.mark.parametrize("more", [{}, {"top_k": 4, "stop_token_ids": [9]}, {"max_tokens": 7}])
@pytest.mark.parametrize("log_probs", [True, False])
def test_with_a_key_the_same_is_asked_as_without(more: dict[str, Any], log_probs: bool) -> None:
    """So that both sample alike."""
    options = {"generate_kwargs": {**SAMPLING, **more}, "return_log_probs": log_probs}
    refusal = Answer(500, "no")
    with FakeServer(reply=lambda a: refusal if a.path == "/generate" else None) as server:
        for key in ({}, {"api_key": KEY}):
            with pytest.raises(EngineRejected):
                llm_kit.policy(server.url, **options, **key)(llm_kit.asked(["w3"]))
    without, with_key = [asked.body for asked in server.asked if asked.path == "/generate"]
    assert with_key == without


@pytest.mark.parametrize("key", ["another", None])
def test_a_wrong_key_or_none_is_refused_at_construction(
    keyed: ReferenceEngine, key: str | None
) -> None:
    with pytest.raises(requests.HTTPError, match="401"):
        llm_kit.policy(keyed.url, api_key=key)


ENDS = {
    "refused": Answer(500, "no"),
    "refused with its key": Answer(500, f"no to {KEY}", {"X-Asked-With": KEY}),
    "sent elsewhere": Answer(307, "", {"Location": "http://127.0.0.1:9/generate"}),
    "answered by something else": Answer(200, f"<p>{KEY}</p>"),
    "answered with no object": Answer(200, [KEY]),
}


@pytest.mark.parametrize("end", ENDS.values(), ids=ENDS)
def test_what_a_server_says_instead_of_an_answer_is_told_without_the_key(end: Answer) -> None:
    """A redirect might lead the key astray."""
    with FakeServer(reply=lambda asked: end if asked.path == "/generate" else None) as server:
        policy = llm_kit.policy(server.url, api_key=KEY)
        with pytest.raises(EngineRejected, match=f"/generate answered {end.status}") as caught:
            sampled(policy)
    assert not [shown for shown in everything_of(caught.value) if KEY in shown]


def test_a_proxy_of_the_environment_gets_no_key(
    keyed: ReferenceEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    with FakeServer() as proxy:
        for name in ("http_proxy", "all_proxy"):
            monkeypatch.setenv(name, proxy.url)
        monkeypatch.delenv("no_proxy", raising=False)
        monkeypatch.delenv("NO_PROXY", raising=False)
        assert len(sampled(llm_kit.policy(keyed.url, api_key=KEY))) == llm_kit.ENVS
    assert not proxy.asked


def test_the_error_of_a_server_that_is_gone_has_no_key() -> None:
    with FakeServer() as server:
        policy = llm_kit.policy(server.url, api_key=KEY)
    with pytest.raises(requests.ConnectionError) as caught:
        sampled(policy)
    assert not [shown for shown in everything_of(caught.value) if KEY in shown]


@pytest.mark.parametrize("option", [{"api_key": KEY}, {"timeout": 3.0}])
def test_what_a_client_has_of_its_own_is_refused_beside_it(
    option: dict[str, Any], talker: ReferenceEngine
) -> None:
    with pytest.raises(ConfigurationError, match="named by its URL"):
        llm_kit.policy(AsyncSGLang.connect(talker.url), **option)


@pytest.mark.parametrize("key", [None, KEY])
def test_a_response_gets_the_time_that_the_policy_was_given(key: str | None) -> None:
    released = threading.Event()

    def reply(asked: Asked) -> Answer | None:
        if asked.path == "/generate":
            released.wait(60.0)
        return None

    with FakeServer(reply=reply) as server:
        policy = llm_kit.policy(server.url, api_key=key, timeout=0.3)
        with pytest.raises(requests.Timeout):
            sampled(policy)
        released.set()
