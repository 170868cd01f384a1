"""The SGLang client: the bodies it sends, and what counts as a yes."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
import torch

from weight_update.engines.sglang.client import SGLangClient, update_request
from weight_update.errors import EngineRejected
from weight_update.options import HttpOptions
from weight_update.waiting import Deadline
from weight_update.weights.buckets import Bucket
from weight_update.weights.extract import extract_weights


@pytest.fixture
def client(server) -> SGLangClient:
    return SGLangClient(server.url, HttpOptions())


def soon() -> Deadline:
    return Deadline(5.0)


def bucket(*, flat: bool) -> Bucket:
    tensors = {"a.weight": torch.zeros(2, 3, dtype=torch.bfloat16), "b": torch.tensor(1.0)}
    return Bucket(extract_weights(tensors), flat=flat)


def announced(*, flat: bool, flush: bool = False) -> dict[str, Any]:
    body: dict[str, Any] = json.loads(
        update_request(bucket(flat=flat), group_name="g", flush=flush)
    )
    return body


# -- update requests -----------------------------------------------------------------------


def test_an_update_request_announces_names_dtypes_and_shapes_in_wire_order() -> None:
    body = announced(flat=False)

    assert body == {
        "names": ["a.weight", "b"],
        "dtypes": ["bfloat16", "float32"],
        "shapes": [[2, 3], []],
        "group_name": "g",
        "flush_cache": False,
        "abort_all_requests": False,
    }


def test_only_a_flat_bucket_names_its_format() -> None:
    flat, tensors = announced(flat=True), announced(flat=False)

    assert flat == {**tensors, "load_format": "flattened_bucket"}


@pytest.mark.parametrize("flush", [False, True])
@pytest.mark.parametrize("flat", [False, True])
def test_an_update_request_never_aborts_requests_and_writes_no_version(
    flat: bool, flush: bool
) -> None:
    body = announced(flat=flat, flush=flush)

    assert body["flush_cache"] is flush
    assert body["abort_all_requests"] is False
    assert "weight_version" not in body


# -- what is sent --------------------------------------------------------------------------

CALLS: dict[str, tuple[Callable[[SGLangClient], Any], str, dict[str, Any]]] = {
    "pause": (lambda c: c.pause("retract", soon()), "/pause_generation", {"mode": "retract"}),
    "resume": (lambda c: c.resume(soon()), "/continue_generation", {"torch_empty_cache": True}),
    "begin": (lambda c: c.begin(soon()), "/begin_weight_update", {}),
    "end": (lambda c: c.end(soon()), "/end_weight_update", {}),
    "init": (lambda c: c.init_group({"x": 1}, soon()), "/init_weights_update_group", {"x": 1}),
    "destroy": (
        lambda c: c.destroy_group("g", soon()),
        "/destroy_weights_update_group",
        {"group_name": "g"},
    ),
    "update": (
        lambda c: c.update({"names": []}, soon()),
        "/update_weights_from_distributed",
        {"names": []},
    ),
    "flush": (lambda c: c.flush(soon()), "/flush_cache", {}),
    "stamp": (
        lambda c: c.stamp("7", soon()),
        "/update_weight_version",
        {"new_version": "7", "abort_all_requests": False},
    ),
}


@pytest.mark.parametrize(("call", "route", "body"), CALLS.values(), ids=CALLS.keys())
def test_each_call_posts_its_body_to_its_route(server, client, call, route, body) -> None:
    call(client)

    (asked,) = server.asked
    assert (asked.method, asked.path, asked.body) == ("POST", route, body)


# -- what counts as a yes (C48) ------------------------------------------------------------

FLAGGED = ["begin", "end", "init", "update", "stamp"]
PLAIN = ["pause", "resume"]


@pytest.mark.parametrize("name", [*FLAGGED, *PLAIN])
@pytest.mark.parametrize(
    ("status", "body", "yes"),
    [
        (200, {"success": True, "message": "ok"}, True),
        (200, {"success": False, "message": "no"}, False),
        (200, {"success": "true"}, False),
        (200, {"success": None}, False),
        (200, "", False),
        (200, "<html>login</html>", False),
        (200, "true", False),
        (200, [], False),
        (201, {"success": True}, False),
        (302, {"success": True}, False),
        (400, {"success": True}, False),
        (400, {"message": "no"}, False),
        (500, "boom", False),
    ],
)
def test_only_a_plain_yes_is_success(
    server, client, answer, name: str, status: int, body: Any, yes: bool
) -> None:
    call, route, _ = CALLS[name]
    server.answers[route] = answer(status=status, body=body)

    if yes:
        call(client)
        return
    with pytest.raises(EngineRejected) as caught:
        call(client)
    assert caught.value.engine == server.url
    assert f"{route} answered {status}" in str(caught.value)


@pytest.mark.parametrize("name", PLAIN)
def test_pause_and_continue_answer_without_a_success_flag(
    server, client, answer, name: str
) -> None:
    call, route, _ = CALLS[name]
    server.answers[route] = answer(body={"message": "paused", "status": "ok"})

    call(client)


@pytest.mark.parametrize("name", FLAGGED)
def test_the_other_routes_must_say_success_themselves(server, client, answer, name: str) -> None:
    call, route, _ = CALLS[name]
    server.answers[route] = answer(body={"message": "whatever"})

    with pytest.raises(EngineRejected):
        call(client)


def test_destroying_a_group_that_is_not_known_is_no_error(server, client, answer) -> None:
    server.answers["/destroy_weights_update_group"] = answer(
        status=400, body={"success": False, "message": "The group to be destroyed does not exist."}
    )

    client.destroy_group("g", soon())


# -- how much of a refused update was applied (C01, C25) -----------------------------------

PARTLY = "Failed to update parameter online: shape. The full weights are partially updated."
NOT_FLUSHED = "Weights were updated, but the cache was not flushed"


@pytest.mark.parametrize(
    ("status", "body", "applied"),
    [
        (400, {"success": False, "message": "Failed to receive weights: Connection"}, "nothing"),
        (400, {"success": False, "message": "must run between begin_weight_update()"}, "nothing"),
        (400, {"success": False, "message": PARTLY}, "partly"),
        (500, {"error": {"message": PARTLY}}, "partly"),
        (400, {"success": False, "message": NOT_FLUSHED}, "all"),
        (200, {"success": False, "message": "Group g not in []"}, "nothing"),
        (200, {"success": False, "message": PARTLY}, "partly"),
        (200, {"success": False, "message": NOT_FLUSHED}, "all"),
        (200, "", "unknown"),
        (200, "<html>", "unknown"),
        (200, {}, "unknown"),
        (200, {"success": "yes"}, "unknown"),
        (401, {"error": "Unauthorized"}, "nothing"),
        (404, {"detail": "Not Found"}, "nothing"),
        (500, "Internal Server Error", "nothing"),
        (502, "<html>Bad Gateway</html>", "unknown"),
        (503, "<html>", "unknown"),
        (504, "<html>", "unknown"),
        (400, {"message": f"Failed: {'long ' * 300} partially updated."}, "partly"),
        (400, {"message": "Succeeded to update parameter online. | Failed to receive"}, "partly"),
    ],
)
def test_a_refused_update_says_how_much_was_applied(
    server, client, answer, status: int, body: Any, applied: str
) -> None:
    server.answers["/update_weights_from_distributed"] = answer(status=status, body=body)

    with pytest.raises(EngineRejected) as caught:
        client.update({}, soon())

    assert caught.value.applied == applied
    assert caught.value.phase == "transfer"


# -- questions -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("status", "there"),
    [(200, True), (204, True), (401, None), (403, None), (405, True), (404, False), (500, None)],
)
def test_a_route_is_probed_without_running_it(
    server, client, answer, status: int, there: bool | None
) -> None:
    server.answers["/pause_generation"] = answer(status=status)

    assert client.has("/pause_generation", soon()) is there
    assert server.asked[0].method == "OPTIONS"


@pytest.mark.parametrize("ask", [SGLangClient.model_info, SGLangClient.server_info])
@pytest.mark.parametrize(
    ("status", "body"), [(500, "boom"), (401, {"error": "no"}), (200, "<html>"), (200, [1])]
)
def test_an_answer_that_tells_nothing_is_a_refusal(
    server, client, answer, ask, status: int, body: Any
) -> None:
    for route in ("/model_info", "/server_info"):
        server.answers[route] = answer(status=status, body=body)

    with pytest.raises(EngineRejected, match=f"answered {status}"):
        ask(client, soon())


@pytest.mark.parametrize(
    ("newer", "older", "info"),
    [
        ((200, {"version": "0.5.9"}), None, {"version": "0.5.9"}),
        ((404, {}), (200, {"tp_size": 1}), {"tp_size": 1}),
        ((404, {}), (404, {}), {}),
        ((404, "not found"), (404, "not found"), {}),
    ],
)
@pytest.mark.parametrize(
    ("ask", "name"),
    [(SGLangClient.server_info, "server_info"), (SGLangClient.model_info, "model_info")],
)
def test_information_is_read_from_the_newer_route_or_else_the_older(
    server, client, answer, ask, name: str, newer, older, info: dict[str, Any]
) -> None:
    server.answers[f"/{name}"] = answer(*newer)
    if older:
        server.answers[f"/get_{name}"] = answer(*older)

    assert ask(client, soon()) == info


@pytest.mark.parametrize(("status", "ready"), [(200, True), (503, False), (404, None), (500, None)])
def test_a_server_is_ready_or_paused_or_does_not_say(
    server, client, answer, status: int, ready: bool | None
) -> None:
    server.answers["/ready"] = answer(status=status, body="")

    assert client.ready(soon()) is ready


QUESTIONS = {
    "checksums": (
        lambda c: c.checksums(soon(), "verify"),
        "/weights_checker",
        {"action": "checksum"},
    ),
    "first_row": (
        lambda c: c.first_row("a.weight", soon()),
        "/get_weights_by_name",
        {"name": "a.weight", "truncate_size": 1},
    ),
}


@pytest.mark.parametrize(("call", "route", "body"), QUESTIONS.values(), ids=QUESTIONS.keys())
@pytest.mark.parametrize("status", [200, 400, 404, 405, 422])
def test_a_question_about_weights_is_answered_or_cannot_be(
    server, client, answer, call, route: str, body: dict[str, Any], status: int
) -> None:
    server.answers[route] = answer(status=status, body={"told": 1})

    assert call(client) == ({"told": 1} if status == 200 else None)
    (asked,) = server.asked
    assert (asked.method, asked.path, asked.body) == ("POST", route, body)


@pytest.mark.parametrize(("call", "route", "body"), QUESTIONS.values(), ids=QUESTIONS.keys())
@pytest.mark.parametrize("status", [302, 401, 403, 500, 503])
def test_a_refusal_is_not_taken_for_a_server_that_cannot_tell_its_weights(
    server, client, answer, call, route: str, body: dict[str, Any], status: int
) -> None:
    server.answers[route] = answer(status=status, body="no")

    with pytest.raises(EngineRejected, match=f"{route} answered {status}") as caught:
        call(client)
    assert caught.value.phase == "verify"


@pytest.mark.parametrize(
    ("status", "body", "loads"),
    [(200, [{"num_reqs": 1}], [{"num_reqs": 1}]), (200, "text", None), (500, [], None)],
)
def test_loads_are_information_and_never_an_error(
    server, client, answer, status: int, body: Any, loads: Any
) -> None:
    server.answers["/v1/loads"] = answer(status=status, body=body)

    assert client.loads("/v1/loads", soon()) == loads


@pytest.mark.parametrize("status", [200, 400, 500])
def test_a_flush_gives_the_answer_for_the_caller_to_judge(
    server, client, answer, status: int
) -> None:
    server.answers["/flush_cache"] = answer(status=status, body="Flush cache failed.")

    assert client.flush(soon()).status_code == status


def test_questions_carry_the_ordinary_key_and_commands_the_admin_key(server) -> None:
    client = SGLangClient(server.url, HttpOptions(api_key="ordinary", admin_api_key="admin"))
    client.server_info(soon())
    client.model_info(soon())
    client.ready(soon())
    client.workers(soon())
    for call, _, _ in [*CALLS.values(), *QUESTIONS.values()]:
        call(client)

    sent = {asked.path: asked.headers["Authorization"] for asked in server.asked}
    questions = {"/server_info", "/model_info", "/ready", "/workers", "/list_workers"}
    assert {sent[route] for route in questions} == {"Bearer ordinary"}
    assert {key for route, key in sent.items() if route not in questions} == {"Bearer admin"}


def test_a_key_that_the_server_repeats_is_not_passed_on(server, answer):
    keys = HttpOptions(api_key="first-secret", admin_api_key="second-secret")
    client = SGLangClient(server.url, keys)
    server.answers["/pause_generation"] = answer(401, {"message": "no: first-secret second-secret"})

    with pytest.raises(EngineRejected, match=r"no: \*\*\* \*\*\*") as caught:
        client.pause("abort", soon())
    assert "secret" not in str(caught.value)
