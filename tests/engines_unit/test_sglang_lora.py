"""An adapter on its way into an SGLang server: what is asked, refused beforehand, and left."""

from __future__ import annotations

import base64
import hashlib
import pickle
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from weight_update.engines.lora import AdapterCourier
from weight_update.engines.sglang.lora import LOAD_ROUTE, SGLangAdapterEngine
from weight_update.errors import EngineRejected
from weight_update.options import HttpOptions
from weight_update.waiting import Deadline
from weight_update.weights.buckets import Bucket
from weight_update.weights.cargo import Cargo

UNLOAD_ROUTE = "/unload_lora_adapter"
NAME = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"
TENSORS = {NAME: torch.arange(8.0).reshape(2, 4)}
CONFIG = {"r": 2, "lora_alpha": 4, "target_modules": ["q_proj"], "bias": "none"}
INFO: dict[str, Any] = {
    "version": "0.5.23",
    "tp_size": 2,
    "enable_lora": True,
    "max_lora_rank": 8,
    "lora_target_modules": ["q_proj", "v_proj"],
}
NEWER = ("lora_name", "config_dict", "serialized_named_tensors", "expected_checksums")
OLDER = ("lora_name", "config_dict", "serialized_tensors")


def soon() -> Deadline:
    return Deadline(5.0)


def schema(fields: tuple[str, ...]) -> dict[str, Any]:
    properties = {"properties": {key: {} for key in fields}}
    return {"components": {"schemas": {"LoadLoRAAdapterFromTensorsReqInput": properties}}}


class Adapters:
    """A server's adapters: names are taken once, and some payloads are refused."""

    def __init__(self, server: Any, answer: Any) -> None:
        self.loaded: dict[str, Any] = {}
        self.refuses: set[str] = set()
        self.calls: list[str] = []
        self._answer = answer
        server.by_body |= {LOAD_ROUTE: self.load, UNLOAD_ROUTE: self.unload}

    def load(self, body: Any) -> Any:
        if body is None:  # a probe
            return self._answer(405)
        name = body["lora_name"]
        self.calls.append(f"load {name}")
        if name in self.loaded or name in self.refuses:
            return self._no(f"Failed to load LoRA adapter {name}")
        self.loaded[name] = body
        return self._answer(body={"success": True, "error_message": ""})

    def unload(self, body: Any) -> Any:
        name = body["lora_name"]
        self.calls.append(f"unload {name}")
        if self.loaded.pop(name, None) is None:
            return self._no(f"LoRA with name {name} does not exist. Loaded LoRAs: []")
        return self._answer(body={"success": True, "error_message": ""})

    def _no(self, words: str) -> Any:
        return self._answer(400, {"success": False, "error_message": words})


@pytest.fixture
def adapters(server, answer) -> Adapters:
    server.answers["/server_info"] = answer(body=INFO)
    server.answers["/model_info"] = answer(body={"weight_version": "3"})
    server.answers["/openapi.json"] = answer(body=schema(NEWER))
    return Adapters(server, answer)


@pytest.fixture
def courier() -> AdapterCourier:
    made = AdapterCourier("policy")
    made.announce(CONFIG)
    made.pack(TENSORS)
    return made


@pytest.fixture
def engine(server, adapters, courier) -> Iterator[SGLangAdapterEngine]:
    made = SGLangAdapterEngine(server.url, HttpOptions(), courier)
    yield made
    made.close()


def push(engine: SGLangAdapterEngine) -> None:
    session = engine.session("request")
    assert session.open(soon()) is False
    session.apply(Bucket(()), Cargo(), group_name="none", flush=True, deadline=soon())
    session.close(soon())


def test_the_first_adapter_is_tried_under_another_name_and_then_loaded(engine, adapters) -> None:
    engine.inspect(soon())

    push(engine)

    assert list(adapters.loaded) == ["policy"]
    assert adapters.calls == [
        *("unload policy.trial", "load policy.trial", "unload policy.trial"),
        *("unload policy", "load policy"),
    ]


def test_the_next_of_equal_form_is_not_tried_again(engine, adapters) -> None:
    engine.inspect(soon())
    push(engine)
    adapters.calls.clear()

    push(engine)

    assert adapters.calls == ["unload policy", "load policy"]


def test_a_refused_one_leaves_the_one_before_loaded(engine, adapters) -> None:
    engine.inspect(soon())
    adapters.loaded["policy"] = before = object()
    adapters.refuses.add("policy.trial")

    with pytest.raises(EngineRejected, match="Failed to load LoRA adapter") as caught:
        push(engine)

    assert caught.value.applied == "nothing"
    assert adapters.loaded == {"policy": before}


def test_a_swap_that_fails_halfway_says_that_the_one_before_is_gone(engine, adapters) -> None:
    engine.inspect(soon())
    push(engine)
    adapters.refuses.add("policy")

    with pytest.raises(EngineRejected) as caught:
        push(engine)

    assert caught.value.applied == "partly"
    assert engine.digests(soon()) is None


def test_what_a_trial_left_behind_is_taken_away(engine, adapters) -> None:
    engine.inspect(soon())
    adapters.loaded["policy.trial"] = object()

    engine.session("request").recover(soon())
    engine.session("request").recover(soon())

    assert adapters.loaded == {}


def test_each_rank_gets_the_tensors_by_value_and_their_checksums(engine, adapters) -> None:
    engine.inspect(soon())

    push(engine)

    body = adapters.loaded["policy"]
    first, second = body["serialized_named_tensors"]
    assert first == second
    assert torch.equal(pickle.loads(base64.b64decode(first))[NAME], TENSORS[NAME])
    assert body["expected_checksums"] == {
        NAME: hashlib.sha256(TENSORS[NAME].numpy().tobytes()).hexdigest()
    }
    assert "serialized_tensors" not in body


def test_older_releases_get_one_blob_and_nothing_to_compare_with(
    engine, adapters, server, answer
) -> None:
    server.answers["/openapi.json"] = answer(body=schema(OLDER))
    engine.inspect(soon())

    push(engine)

    body = adapters.loaded["policy"]
    assert torch.equal(pickle.loads(base64.b64decode(body["serialized_tensors"]))[NAME],
                       TENSORS[NAME])  # fmt: skip
    assert not {"serialized_named_tensors", "expected_checksums"} & set(body)
    assert engine.digests(soon()) is None


def test_a_server_that_hides_its_fields_gets_both_forms(engine, adapters, server, answer) -> None:
    server.answers["/openapi.json"] = answer(404, {"detail": "Not Found"})
    engine.inspect(soon())

    push(engine)

    assert {"serialized_tensors", "serialized_named_tensors"} <= set(adapters.loaded["policy"])
    assert "expected_checksums" not in adapters.loaded["policy"]


def test_confirmed_checksums_are_its_digests(engine, courier) -> None:
    engine.inspect(soon())
    push(engine)

    digests = engine.digests(soon())

    assert digests is not None
    assert digests.ranks == (courier.parcel.sums,)


def test_after_a_restart_an_adapter_is_tried_anew(engine, adapters) -> None:
    engine.inspect(soon())
    push(engine)
    adapters.calls.clear()
    engine.inspect(soon())

    push(engine)

    assert "load policy.trial" in adapters.calls


def test_rs_scale_and_patterns_are_written_as_the_server_reads_them(
    engine, adapters, courier
) -> None:
    courier.announce({**CONFIG, "r": 4, "use_rslora": True, "target_modules": ".*q_proj"})
    courier.pack(TENSORS)
    engine.inspect(soon())

    push(engine)

    config = adapters.loaded["policy"]["config_dict"]
    assert config["lora_alpha"] / config["r"] == 4 / 4**0.5
    assert config["target_modules"] == ["q_proj"]


OBJECTIONS: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    ({"enable_lora": False}, {}, "started without --enable-lora"),
    ({"enable_dp_attention": True}, {}, "data parallel"),
    ({}, {"r": 16}, "rank is 16 and --max-lora-rank is 8"),
    ({}, {"target_modules": ["up_proj"]}, "--lora-target-modules lacks up_proj"),
    ({}, {"use_dora": True}, "DoRA"),
    ({}, {"modules_to_save": ["lm_head"]}, "modules_to_save"),
    ({}, {"rank_pattern": {"q_proj": 2}}, "rank_pattern"),
    ({}, {"bias": "lora_only"}, "bias='lora_only'"),
]


@pytest.mark.parametrize(("info", "config", "words"), OBJECTIONS, ids=[o[2] for o in OBJECTIONS])
def test_what_cannot_work_is_known_before_the_pause(
    engine, adapters, courier, server, answer, info, config, words
) -> None:
    server.answers["/server_info"] = answer(body=INFO | info)
    courier.announce(CONFIG | config)
    engine.inspect(soon())

    objection = engine.objection("abort")

    assert words in str(objection)
    assert "lora='merge'" in str(objection)
    assert adapters.calls == []


def test_a_release_without_the_route_is_refused(engine, adapters, server, answer) -> None:
    server.answers["/server_info"] = answer(body=INFO | {"version": "0.5.6"})
    server.by_body.pop(LOAD_ROUTE)
    server.answers[LOAD_ROUTE] = answer(404, {"detail": "Not Found"})
    engine.inspect(soon())

    assert "SGLang 0.5.6 has no route that loads adapters" in str(engine.objection("abort"))


@pytest.mark.parametrize("mode", ["retract", "in_place"])
def test_modes_under_which_the_old_adapter_never_goes_are_refused(engine, adapters, mode) -> None:
    engine.inspect(soon())

    assert "use 'abort'" in str(engine.objection(mode))


def test_a_server_that_takes_it_hears_no_objection(engine, adapters) -> None:
    engine.inspect(soon())

    assert engine.objection("abort") is None
