"""Recorded updates of the real server, played to the reference engine.

The requests leave and the answers come in the recorded order, and the recorded bytes travel.
The reference engine must answer what the real server answered, and generate what it generated.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from concurrent.futures import Future
from typing import Any

import pytest
import requests
import torch
from transformers import LlamaForCausalLM

from weight_update.reference_engine import ReferenceEngine
from weight_update.transports.process_group import UpdateGroup
from weight_update.waiting import spawn

from .recording import LONG, MODEL, Scenario, Tensors, decoded, kept, load

SECONDS = 60.0
INIT = "/init_weights_update_group"
UPDATE = "/update_weights_from_distributed"

SCENARIOS, TENSORS = load()


class Replay:
    """Plays the events of a scenario to an engine and keeps what it answers."""

    def __init__(self, url: str, tensors: Tensors) -> None:
        self.answers: dict[int, dict[str, Any]] = {}
        self._url = url
        self._tensors = tensors
        self._asked: dict[int, tuple[str, Future[requests.Response]]] = {}
        self._group: UpdateGroup | None = None

    def play(self, scenario: Scenario) -> None:
        """Every event in its turn."""
        turns = {"ask": self._ask, "answer": self._answer, "running": self._wait_until_running}
        for event in scenario.events:
            turns[event["event"]](event)
        if self._group is not None:
            self._group.give_up()

    def _ask(self, event: dict[str, Any]) -> None:
        path, body = event["path"], event["body"]
        if path == INIT:
            self._group = UpdateGroup(
                address="127.0.0.1",
                port=None,
                world_size=body["world_size"],
                device=torch.device("cpu"),
                name=body["group_name"],
            )
            body = {**body, "master_port": self._group.port}
        call = spawn(self._request, event["method"], path, body)
        self._asked[event["number"]] = path, call
        if self._group is not None and path == INIT:
            self._group.join()
        if self._group is not None and path == UPDATE:
            self._group.broadcast([self._tensors.get(name) for name in event["wire"]])

    def _answer(self, event: dict[str, Any]) -> None:
        path, call = self._asked[event["number"]]
        answer = call.result(SECONDS)
        body = kept(path, decoded(answer.text))
        self.answers[event["number"]] = {"status": answer.status_code, "body": body}
        while path == UPDATE and self._group is not None and self._group.moving():
            time.sleep(0.001)

    def _wait_until_running(self, _: dict[str, Any]) -> None:
        deadline = time.monotonic() + SECONDS
        while not self._request("GET", "/v1/loads", None).json()["loads"][0]["num_running_reqs"]:
            assert time.monotonic() < deadline
            time.sleep(0.005)

    def _request(self, method: str, path: str, body: Any) -> requests.Response:
        data = None if body is None else json.dumps(body)
        headers = {"Content-Type": "application/json"}
        return requests.request(
            method, self._url + path, data=data, headers=headers, timeout=SECONDS
        )


@pytest.fixture(scope="module")
def played() -> dict[str, Replay]:
    """All scenarios, in the recorded order, on one engine: each begins where the last ended."""
    replays = {}
    with ReferenceEngine(MODEL, release="0.5.23") as engine:
        for scenario in SCENARIOS:
            replays[scenario.name] = Replay(engine.url, TENSORS)
            replays[scenario.name].play(scenario)
    return replays


@pytest.fixture(params=SCENARIOS, ids=lambda scenario: scenario.name)
def scenario(request: pytest.FixtureRequest) -> Scenario:
    return request.param  # type: ignore[no-any-return]


def asked(scenario: Scenario) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    """Every request, with its recorded answer."""
    for event in scenario.events:
        if event["event"] == "ask":
            yield event, scenario.answer(event["number"])


def is_long(event: dict[str, Any]) -> bool:
    return event["path"] == "/generate" and event["body"].get("rid") == LONG


def test_every_answer_is_the_real_servers(scenario: Scenario, played: dict[str, Replay]) -> None:
    """Status and body; what was generated included, but for the request that was cut."""
    answers = played[scenario.name].answers
    different = [
        (event["method"], event["path"], answers[event["number"]], recorded)
        for event, recorded in asked(scenario)
        if not is_long(event) and not agrees(event["path"], answers[event["number"]], recorded)
    ]
    assert different == []


def agrees(path: str, answer: dict[str, Any], recorded: dict[str, Any]) -> bool:
    if path == "/flush_cache":  # its text goes on with advice
        return bool(answer["status"] == recorded["status"])
    return answer == {"status": recorded["status"], "body": recorded["body"]}


def test_the_request_in_flight_fares_as_it_did(
    scenario: Scenario, played: dict[str, Replay]
) -> None:
    """When it was cut is a matter of time; all else is not."""
    ((event, recorded),) = [pair for pair in asked(scenario) if is_long(pair[0])]
    answer = played[scenario.name].answers[event["number"]]

    assert fate(answer["body"]) == fate(recorded["body"])


def fate(body: dict[str, Any]) -> dict[str, Any]:
    """Why a request ended, under which versions, and whose tokens these brought."""
    meta, tokens = body["meta_info"], body["output_ids"]
    makers = []
    for span in meta["weight_versions"]:
        made = tokens[span["start"] : span["end"]][:32]
        prefix = [3, 1, 4, *tokens[: span["start"]]]
        makers.append((span["version"], [is_greedy(m, prefix, made) for m in MODELS]))
    reason = meta["finish_reason"]["type"]
    return {"reason": reason, "retractions": meta["num_retractions"], "makers": makers}


@torch.no_grad()
def is_greedy(model: Any, prefix: list[int], made: list[int]) -> bool:
    logits = model(input_ids=torch.tensor([prefix + made])).logits[0, len(prefix) - 1 : -1]
    return bool(logits.argmax(1).tolist() == made)


def base_model() -> Any:
    return LlamaForCausalLM.from_pretrained(MODEL).eval()


def sent_model() -> Any:
    """The base model's architecture with the weights that the first update brought."""
    (request,) = [e for e, _ in asked(SCENARIOS[0]) if e["path"] == UPDATE]
    flat = TENSORS.get(request["wire"][0])
    model, start = base_model(), 0
    with torch.no_grad():
        for name, shape in zip(request["body"]["names"], request["body"]["shapes"], strict=True):
            parameter = model.get_parameter(name)
            end = start + parameter.numel() * 4
            parameter.copy_(flat[start:end].view(torch.float32).view(shape))
            start = end
    return model


MODELS = (base_model(), sent_model())


def test_the_recording_has_both_formats_a_label_and_every_pause_mode() -> None:
    """So that a new recording cannot silently cover less."""
    events = [event for s in SCENARIOS for event, _ in asked(s) if event["method"] == "POST"]
    bodies = {path: [e["body"] for e in events if e["path"] == path] for path in PATHS}
    modes = {body["mode"] for body in bodies["/pause_generation"]}
    formats = {body.get("load_format") for body in bodies[UPDATE]}
    labels = [body["new_version"] for body in bodies["/update_weight_version"]]

    assert modes == {"abort", "retract", "in_place"}
    assert formats == {None, "flattened_bucket"}
    assert labels == [str(number + 1) for number in range(len(SCENARIOS))]
    assert all(event["wire"] for event in events if event["path"] == UPDATE)


PATHS = ("/pause_generation", UPDATE, "/update_weight_version")
