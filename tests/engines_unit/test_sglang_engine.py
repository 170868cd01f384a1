"""SGLang as an engine: what it is asked, in how many calls, and what is made of the answers."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from weight_update.engines.sglang.engine import SGLangEngine
from weight_update.errors import (
    ConfigurationError,
    EngineRejected,
    EngineUnreachable,
    UpdateTimeout,
)
from weight_update.facts import Digests, Intake, NameCheck, Sighting
from weight_update.options import HttpOptions
from weight_update.waiting import Deadline

INFO: dict[str, Any] = {
    "version": "0.5.23",
    "tp_size": 1,
    "dtype": "float32",
    "device": "cpu",
    "random_seed": 5,
    "api_key": "server-secret",
}
MODEL = {"weight_version": "3", "architectures": ["LlamaForCausalLM"]}
NAMES = ["model.norm.weight", "model.layers.0.mlp.up_proj.weight"]
SUMS = {"model.norm.weight": "aa", "model.layers.0.mlp.gate_up_proj.weight": "bb"}
CHECKED = {"success": True, "message": "Success.", "ranks": [{"checksums": SUMS}]}


def soon() -> Deadline:
    return Deadline(5.0)


@pytest.fixture
def engine(server, answer) -> Iterator[SGLangEngine]:
    server.answers["/server_info"] = answer(body=INFO)
    server.answers["/model_info"] = answer(body=MODEL)
    server.answers["/weights_checker"] = answer(body=CHECKED)
    for route in ("/workers", "/list_workers"):
        server.answers[route] = answer(404, {"detail": "Not Found"})
    made = SGLangEngine(server.url, HttpOptions())
    yield made
    made.close()


@pytest.fixture
def inspected(engine: SGLangEngine, server) -> SGLangEngine:
    engine.inspect(soon())
    server.asked.clear()
    return engine


def paths(server) -> list[str]:
    return [asked.path for asked in server.asked]


# -- inspect -------------------------------------------------------------------------------


def test_before_it_is_inspected_nothing_is_known_of_an_engine(engine) -> None:
    assert (engine.ranks, engine.layout) == (None, None)
    assert engine.check_names(NAMES, soon()) == NameCheck()
    assert engine.first_values("model.norm.weight", soon()) is None


def test_how_a_server_takes_weights_is_known_once_inspected(engine, server, answer) -> None:
    assert engine.intake == Intake()
    server.answers["/server_info"] = answer(body={**INFO, "quantization": "awq"})
    engine.inspect(soon())

    assert engine.intake.quantization == "awq"
    assert engine.intake.architectures == ("LlamaForCausalLM",)
    assert engine.intake.requantises


def test_the_layout_is_known_once_inspected(inspected, server, answer) -> None:
    assert "0.5.23" in inspected.layout
    assert "LlamaForCausalLM" in inspected.layout

    server.answers["/model_info"] = answer(body={"weight_version": "3"})
    inspected.inspect(soon())
    assert inspected.layout is None


def test_a_server_without_any_route_of_sglang_is_named_for_what_it_is(engine, server, answer):
    for route in ("/server_info", "/get_server_info", "/model_info", "/get_model_info"):
        server.answers[route] = answer(404, "not found")

    with pytest.raises(ConfigurationError, match="no SGLang server answers here") as caught:
        engine.inspect(soon())
    assert caught.value.engine == server.url
    assert "root URL" in str(caught.value)
    assert "a vLLM server takes VLLMWeightSyncScheme" in str(caught.value)


def test_a_server_that_only_hides_its_layout_is_taken_for_what_it_is(engine, server, answer):
    for route in ("/server_info", "/get_server_info"):
        server.answers[route] = answer(404, "not found")

    engine.inspect(soon())
    assert (engine.ranks, engine.layout) == (None, None)


# -- workers -------------------------------------------------------------------------------


def test_a_server_has_no_workers(engine) -> None:
    assert engine.workers(soon()) == ()


@pytest.mark.parametrize(
    ("route", "body"),
    [
        ("/workers", {"workers": [{"url": "http://a:1", "is_healthy": True}], "total": 1}),
        ("/list_workers", {"urls": ["http://a:1"]}),
    ],
)
def test_the_workers_of_a_router_are_asked_for_in_its_own_way(
    engine, server, answer, route: str, body: dict[str, Any]
) -> None:
    server.answers[route] = answer(body=body)

    assert engine.workers(soon()) == ("http://a:1",)
    assert paths(server)[-1] == route


@pytest.mark.parametrize("status", [401, 403, 500, 503])
def test_a_server_that_does_not_say_whether_it_is_a_router_is_not_taken_for_either(
    engine, server, answer, status: int
) -> None:
    server.answers["/workers"] = answer(status, {"error": "no"})

    with pytest.raises(EngineRejected, match=f"/workers answered {status}"):
        engine.workers(soon())


def test_a_router_without_workers_is_refused(engine, server, answer) -> None:
    server.answers["/workers"] = answer(body={"workers": []})

    with pytest.raises(ConfigurationError, match="lists no workers"):
        engine.workers(soon())


@pytest.mark.parametrize("body", ["<html>welcome</html>", {"success": True}, []])
def test_a_service_that_says_yes_to_everything_is_no_router(
    engine, server, answer, body: Any
) -> None:
    for route in ("/workers", "/list_workers"):
        server.answers[route] = answer(body=body)

    assert engine.workers(soon()) == ()


# -- observe -------------------------------------------------------------------------------


def test_a_look_is_three_calls_that_change_nothing(engine, server) -> None:
    seen = engine.observe(soon())

    assert (seen.label, seen.ready) == ("3", True)
    assert seen.instance
    assert sorted((asked.method, asked.path) for asked in server.asked) == [
        ("GET", "/model_info"),
        ("GET", "/ready"),
        ("GET", "/server_info"),
    ]


def test_a_look_for_label_and_start_alone_is_two_calls(engine, server) -> None:
    seen = engine.observe(soon(), readiness=False)

    assert (seen.label, seen.ready) == ("3", None)
    assert sorted(paths(server)) == ["/model_info", "/server_info"]


def meet(server, bodies: dict[str, Any], answer) -> None:
    """Makes routes answer only once all of them were asked."""
    meeting = threading.Barrier(len(bodies))

    def after_all(body: Any) -> Any:
        meeting.wait(10)
        return answer(body=body)

    for path, body in bodies.items():
        server.by_body[path] = lambda _, body=body: after_all(body)


def test_no_call_of_a_look_waits_for_another(engine, server, answer) -> None:
    meet(server, {"/model_info": MODEL, "/ready": {}, "/server_info": INFO}, answer)

    assert engine.observe(Deadline(15.0)).label == "3"


def test_an_inspection_asks_what_the_server_is_and_which_routes_it_has_at_once(
    engine, server, answer
) -> None:
    probed = {"/pause_generation": {}, "/begin_weight_update": {}}
    meet(server, {"/server_info": INFO, **probed}, answer)

    engine.inspect(Deadline(15.0))

    assert engine.capabilities.sessions


def test_another_start_is_another_instance(engine, server, answer) -> None:
    before = engine.observe(soon())
    server.answers["/server_info"] = answer(body={**INFO, "random_seed": 6})

    assert engine.observe(soon()).instance != before.instance


def test_a_look_shows_none_of_the_servers_keys(engine) -> None:
    assert "server-secret" not in repr(engine.observe(soon()))


def test_an_old_server_shows_less(engine, server, answer) -> None:
    server.answers["/server_info"] = answer(body={"version": "0.5.9"})
    server.answers["/ready"] = answer(404, {"detail": "Not Found"})

    assert engine.observe(soon()) == Sighting("3", None, None)


def test_a_scheduler_that_is_stuck_is_a_timeout_and_not_a_wait(engine, server, answer) -> None:
    server.answers["/server_info"] = answer(body=INFO, delay=2.0)

    with pytest.raises(UpdateTimeout, match="/server_info") as caught:
        engine.observe(Deadline(0.3))
    assert caught.value.engine == server.url


def test_a_server_that_is_gone_is_unreachable(engine, server) -> None:
    server.close()

    with pytest.raises(EngineUnreachable):
        engine.observe(soon())


# -- names ---------------------------------------------------------------------------------


def test_names_are_compared_with_those_that_the_server_shows(inspected) -> None:
    names = ["model.norm.weight", "v_head.weight"]

    found = inspected.check_names(names, soon())
    assert found.known
    assert found.unknown == ("v_head.weight",)
    assert found.lacking == ("model.layers.0.mlp.gate_up_proj.weight",)


def test_the_servers_names_are_asked_for_once_until_it_is_inspected_again(
    inspected, server
) -> None:
    for _ in range(3):
        assert inspected.check_names(NAMES, soon()) == NameCheck(known=True)
    assert paths(server) == ["/weights_checker"]

    inspected.inspect(soon())
    inspected.check_names(NAMES, soon())
    assert paths(server).count("/weights_checker") == 2


@pytest.mark.parametrize(
    ("info", "model"),
    [
        ({**INFO, "quantization": "fp8"}, MODEL),
        ({**INFO, "enable_lora": True}, MODEL),
        (INFO, {"architectures": ["GPT2LMHeadModel"]}),
        (INFO, {"weight_version": "3"}),
    ],
)
def test_names_of_a_model_that_is_not_known_are_not_even_asked_for(
    engine, server, answer, info: dict[str, Any], model: dict[str, Any]
) -> None:
    server.answers["/server_info"] = answer(body=info)
    server.answers["/model_info"] = answer(body=model)
    engine.inspect(soon())

    assert engine.check_names(["x"], soon()) == NameCheck()
    assert "/weights_checker" not in paths(server)


def test_names_tell_a_quantised_server_that_does_not_say_so(inspected, server, answer) -> None:
    name = "model.layers.0.mlp.down_proj.weight"
    ranks = [{"checksums": dict.fromkeys((name, f"{name}_scale_inv"), "0a")}]
    server.answers["/weights_checker"] = answer(body={"success": True, "ranks": ranks})

    with pytest.raises(ConfigurationError, match=r"down_proj\.weight_scale_inv.*config\.json"):
        inspected.check_names([name], soon())
    assert inspected.check_names([name, f"{name}_scale_inv"], soon()).known


@pytest.mark.parametrize("status", [400, 404, 405, 422])
def test_a_server_that_makes_no_digests_shows_no_names(
    inspected, server, answer, status: int
) -> None:
    server.answers["/weights_checker"] = answer(status, {"success": False, "message": "no"})

    assert inspected.check_names(["x"], soon()) == NameCheck()
    assert inspected.digests(soon()) is None


# -- digests and values --------------------------------------------------------------------


def test_digests_are_those_of_the_server(inspected) -> None:
    assert inspected.digests(soon()) == Digests((SUMS,))


@pytest.mark.parametrize("body", ["<html>", {"success": True}, []])
def test_an_answer_without_digests_is_none(inspected, server, answer, body: Any) -> None:
    server.answers["/weights_checker"] = answer(body=body)

    assert inspected.digests(soon()) is None


@pytest.mark.parametrize(
    ("status", "body", "values"),
    [
        (200, [[0.5, 0.25]], (0.5, 0.25)),
        (200, [1.0], (1.0,)),
        (200, {"x": 1}, None),
        (400, {"error": {"message": "Get parameter by name failed"}}, None),
        (404, {"detail": "Not Found"}, None),
    ],
)
def test_first_values_are_those_that_the_server_shows(
    inspected, server, answer, status: int, body: Any, values: Any
) -> None:
    server.answers["/get_weights_by_name"] = answer(status, body)

    assert inspected.first_values("model.norm.weight", soon()) == values


LAYER = "model.layers.0.self_attn"


@pytest.fixture
def of_blocks(engine, server, answer, tmp_path):
    """A server whose checkpoint is quantised in blocks, which only its folder tells."""
    blocks = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": blocks}))
    server.answers["/model_info"] = answer(body={**MODEL, "model_path": str(tmp_path)})
    engine.inspect(soon())
    return engine


@pytest.mark.parametrize("shown", [True, False])
def test_scales_of_blocks_are_known_though_digests_fold_them_into_their_weights(
    of_blocks, server, answer, shown: bool
) -> None:
    names = [f"{LAYER}.o_proj.weight", f"{LAYER}.o_proj.weight_scale_inv"]
    ranks = [{"checksums": dict.fromkeys(names if shown else names[:1], "0a")}]
    server.answers["/weights_checker"] = answer(body={"success": True, "ranks": ranks})

    found = of_blocks.check_names([*names, "x.weight"], soon())

    assert (found.unknown, found.lacking) == (("x.weight",), ())


def test_values_are_not_asked_for_where_only_the_folder_tells_of_a_quantisation(
    of_blocks, server
) -> None:
    server.asked.clear()

    assert of_blocks.first_values("model.norm.weight", soon()) is None
    assert not server.asked


def test_values_of_quantised_weights_are_not_asked_for(engine, server, answer) -> None:
    server.answers["/server_info"] = answer(body={**INFO, "quantization": "fp8"})
    engine.inspect(soon())
    server.asked.clear()

    assert engine.first_values("model.norm.weight", soon()) is None
    assert not server.asked


@pytest.mark.parametrize(
    ("model_path", "unread"), [("org/name", True), ("/not/here", True), (None, False)]
)
def test_a_model_folder_that_cannot_be_read_here_is_told(
    engine, server, answer, model_path: str | None, unread: bool
) -> None:
    server.answers["/model_info"] = answer(body={**MODEL, "model_path": model_path})
    engine.inspect(soon())
    assert engine.intake.unread == unread
