"""Routes, authentication, the request log, and the older release."""

from __future__ import annotations

from typing import Any, Literal

import pytest

from weight_update.reference_engine import ReferenceEngine
from weight_update.reference_engine.bodies import fits


@pytest.fixture(scope="module")
def old_engine(model_a):
    with ReferenceEngine(model_a, release="0.5.15") as engine:
        yield engine


@pytest.fixture(scope="module")
def guarded(model_a):
    with ReferenceEngine(model_a, api_key="user", admin_api_key="admin", wait=False) as engine:
        yield engine


def test_a_missing_route_is_404_and_a_wrong_method_405(engine, kit):
    missing = kit.get(engine, "/get_load")
    assert (missing.status, missing.json) == (404, {"detail": "Not Found"})
    assert kit.get(engine, "/pause_generation").status == 405


def test_a_body_that_is_no_json_is_refused_in_the_envelope(engine, kit):
    reply = kit.call(engine, "POST", "/begin_weight_update")
    assert reply.status == 400
    assert set(reply.json) == {"object", "message", "type", "param", "code"}


def test_unknown_fields_are_ignored(engine, kit):
    assert kit.post(engine, "/continue_generation", surprise=1).status == 200


def test_model_info_and_server_info_describe_the_server(engine, kit):
    model = kit.get(engine, "/model_info").json
    assert (model["model_type"], model["weight_version"]) == ("llama", "default")
    server = kit.get(engine, "/server_info").json
    sizes = {name: server[name] for name in ("tp_size", "pp_size", "dp_size", "attn_dp_size")}
    assert set(sizes.values()) == {1}
    assert (server["version"], server["enable_dp_attention"]) == ("0.5.23", False)


def test_openapi_lists_routes_methods_and_fields(engine, kit):
    document = kit.get(engine, "/openapi.json").json
    assert "/begin_weight_update" in document["paths"]
    flush = document["paths"]["/flush_cache"]
    assert set(flush) == {"get", "post"}
    assert [p["name"] for p in flush["get"]["parameters"]] == ["timeout"]
    body = document["components"]["schemas"]["UpdateWeightsFromDistributedReqInput"]
    assert {"names", "load_format", "selector"} <= set(body["properties"])


def test_the_log_has_body_status_and_times_but_no_header(engine, kit):
    kit.call(engine, "POST", "/abort_request", {"rid": "nobody"}, key="secret-token")
    record = engine.requests()[-1]
    assert (record["method"], record["path"], record["status"]) == ("POST", "/abort_request", 200)
    assert record["json"] == {"rid": "nobody"}
    assert record["t0"] <= record["t1"]
    assert "secret-token" not in str(engine.requests())


def test_the_log_tells_the_lists_of_a_large_body_by_their_length(engine, kit):
    many = ["model.norm.weight"] * 5000
    kit.post(engine, "/update_weights_from_distributed", names=many, dtypes=[], shapes=[])
    body = engine.requests()[-1]["json"]
    assert body == {"names": 5000, "dtypes": 0, "shapes": 0}


@pytest.mark.parametrize(
    ("value", "hint", "fitting"),
    [
        (1, int, True),
        (True, int, False),
        (1, float, True),
        (1.5, int, False),
        ([[1, 2], []], list[list[int]], True),
        ([[1, "2"]], list[list[int]], False),
        ([[1], 2], list[list[int]], False),
        (None, str | None, True),
        ("x", Literal["y"], False),
        ({"a": 1}, dict[str, Any] | list[dict[str, Any]], True),
    ],
)
def test_a_field_takes_values_of_its_type_only(value, hint, fitting):
    assert fits(value, hint) is fitting


def test_control_routes_need_the_admin_key_and_refuse_the_other(guarded, kit):
    def status(key):
        return kit.call(guarded, "POST", "/continue_generation", {}, key=key).status

    assert (status(None), status("user"), status("admin")) == (401, 401, 200)


def test_normal_routes_need_the_api_key(guarded, kit):
    reply = kit.call(guarded, "GET", "/model_info")
    assert (reply.status, reply.json) == (401, {"error": "Unauthorized"})
    assert kit.call(guarded, "GET", "/model_info", key="user").status == 200


def test_health_needs_no_key(guarded, kit):
    assert kit.call(guarded, "GET", "/health").status == 200


def test_the_engines_own_client_has_the_keys(guarded, kit):
    assert guarded.generate(kit.PROMPT)["meta_info"]["completion_tokens"] == 16
    guarded.clear_faults()


def test_the_keys_are_not_on_the_command_line(guarded):
    assert "admin" not in " ".join(map(str, guarded.process.args)).split()


def test_0_5_15_has_no_session_routes_and_needs_no_session(old_engine, kit, model_b):
    assert kit.post(old_engine, "/begin_weight_update").status == 404
    assert kit.post(old_engine, "/end_weight_update").status == 404
    trainer = kit.Trainer(old_engine)
    assert trainer.send(dict(model_b.named_parameters()), flush_cache=True).status == 200
    assert old_engine.generate(kit.PROMPT)["output_ids"] == kit.greedy(model_b, kit.PROMPT, 16)
    trainer.close()


def test_0_5_15_has_both_load_routes_and_no_ready(old_engine, kit):
    assert kit.get(old_engine, "/get_load").json[0]["num_reqs"] == 0
    assert kit.get(old_engine, "/v1/loads").status == 200
    assert kit.get(old_engine, "/ready").status == 404
    assert kit.get(old_engine, "/server_info").json["version"] == "0.5.15"


def test_0_5_15_has_no_version_spans(old_engine, kit):
    meta = old_engine.generate(kit.PROMPT)["meta_info"]
    assert meta["weight_version"] == "default"
    assert "weight_versions" not in meta


def test_0_5_15_refuses_a_flush_under_retract(old_engine, kit):
    with kit.background() as start:
        request = start(old_engine.generate, kit.PROMPT, max_new_tokens=400)
        kit.wait_for(lambda: kit.running(old_engine) == 1)
        kit.post(old_engine, "/pause_generation", mode="retract")
        reply = kit.post(old_engine, "/flush_cache")
        assert (reply.status, reply.text) == (400, "Flush cache failed.\n")
        kit.post(old_engine, "/continue_generation")
        request.result()
    kit.wait_for(lambda: kit.post(old_engine, "/flush_cache").status == 200)
    assert kit.post(old_engine, "/flush_cache?timeout=1").status == 200


def test_0_5_15_dies_of_a_refused_flush_inside_an_update(old_engine, kit, model_b):
    trainer = kit.Trainer(old_engine)
    tensors = {"model.norm.weight": model_b.model.norm.weight}
    with kit.background() as start:
        request = start(old_engine.generate, kit.PROMPT, max_new_tokens=3000)
        kit.wait_for(lambda: kit.running(old_engine) == 1)
        kit.post(old_engine, "/pause_generation", mode="retract")
        with pytest.raises((ConnectionError, OSError)):
            trainer.send(tensors, flush_cache=True)
        assert isinstance(request.exception(), OSError)
    assert old_engine.process.wait(30) == 1
    old_engine.restart()


def test_0_5_15_dies_of_an_unknown_group(old_engine, kit):
    with pytest.raises((ConnectionError, OSError)):
        kit.post(
            old_engine,
            "/update_weights_from_distributed",
            names=[],
            dtypes=[],
            shapes=[],
            group_name="nobody",
        )
    assert old_engine.process.wait(30) == 1
    old_engine.restart()


def test_0_5_15_shows_no_selector_in_its_fields(old_engine, kit):
    schemas = kit.get(old_engine, "/openapi.json").json["components"]["schemas"]
    assert "selector" not in schemas["UpdateWeightsFromDistributedReqInput"]["properties"]
