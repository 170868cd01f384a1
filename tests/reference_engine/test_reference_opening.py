"""Tensors that the engine opens by itself: those of torch's own pickles, and no other objects."""

from __future__ import annotations

import base64
import io
import os
import pickle
import sys
from dataclasses import dataclass
from http.client import HTTPException
from multiprocessing.reduction import ForkingPickler
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import multiprocessing

from weight_update.reference_engine import Fault, ReferenceEngine
from weight_update.reference_engine.opening import Unpickler

ROUTE = "/update_weights_from_tensor"
NORM = "model.norm.weight"


@dataclass
class FlattenedTensorMetadata:
    """As SGLang's is read from a trainer that has SGLang."""

    name: str
    shape: torch.Size
    dtype: torch.dtype
    start_idx: int
    end_idx: int
    numel: int


@pytest.fixture(autouse=True)
def as_sglang(monkeypatch):
    """This process looks to torch's pickler like one that has SGLang, and shares by file."""
    home = "sglang.srt.weight_sync.tensor_bucket"
    module = ModuleType(home)
    module.FlattenedTensorMetadata = FlattenedTensorMetadata
    monkeypatch.setattr(FlattenedTensorMetadata, "__module__", home)
    for name in ("sglang", "sglang.srt", "sglang.srt.weight_sync"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, home, module)
    usual = multiprocessing.get_sharing_strategy()
    multiprocessing.set_sharing_strategy("file_system")
    yield
    multiprocessing.set_sharing_strategy(usual)


def entry(payload: Any) -> str:
    return base64.b64encode(bytes(ForkingPickler.dumps(payload))).decode()


def flat(model) -> dict[str, Any]:
    """A flat bucket of all parameters, as SGLang's own class makes it."""
    tensors = {name: p.detach().clone() for name, p in model.named_parameters()}
    metadata, end = [], 0
    for name, tensor in tensors.items():
        start, end = end, end + tensor.nbytes
        size = end - start
        metadata.append(FlattenedTensorMetadata(name, tensor.shape, tensor.dtype, start, end, size))
    rows = [tensor.reshape(-1).view(torch.uint8) for tensor in tensors.values()]
    return {"flattened_tensor": torch.cat(rows), "metadata": metadata}


def pairs(model) -> list[tuple[str, torch.Tensor]]:
    return [(name, p.detach().clone()) for name, p in model.named_parameters()]


def send(engine, kit, payload, **fields):
    body = {"serialized_named_tensors": [entry(payload)], "flush_cache": False, **fields}
    return kit.post(engine, ROUTE, **body)


def update(engine, kit, payload, **fields):
    assert kit.post(engine, "/begin_weight_update").status == 200
    reply = send(engine, kit, payload, **fields)
    assert kit.post(engine, "/end_weight_update").status == 200
    return reply


def output(engine, kit):
    return engine.generate(kit.PROMPT, max_new_tokens=24)["output_ids"]


def addresses(engine):
    return engine.call("GET", "/_reference/weights")["ranks"][0]["addresses"]


@pytest.mark.usefixtures("clean")
@pytest.mark.parametrize("flattened", [True, False], ids=["flat bucket", "tensor a name"])
def test_what_is_opened_is_copied_into_the_parameters_that_were_there(
    engine, kit, model_b, flattened
):
    before = addresses(engine)
    fields = {"load_format": "flattened_bucket"} if flattened else {}
    payload = flat(model_b) if flattened else pairs(model_b)
    reply = update(engine, kit, payload, flush_cache=True, weight_version="7", **fields)
    del payload
    assert (reply.status, reply.message) == (200, "Success Weight version updated to 7.")
    assert output(engine, kit) == kit.greedy(model_b, kit.PROMPT, 24)
    assert addresses(engine) == before


@pytest.mark.usefixtures("clean")
def test_outside_a_session_it_is_refused(engine, kit, model_b):
    reply = send(engine, kit, pairs(model_b))
    assert reply.status == 400
    assert reply.message == (
        "update_weights_from_tensor must run between begin_weight_update() and end_weight_update()"
    )


@pytest.mark.usefixtures("clean")
def test_dropped_tensors_are_not_loaded_and_it_says_that_all_is_well(engine, kit, model_a, model_b):
    engine.inject(Fault(ROUTE, "drop", when="after_receive"))
    assert update(engine, kit, pairs(model_b)).message == "Success"
    assert output(engine, kit) == kit.greedy(model_a, kit.PROMPT, 24)


@pytest.mark.usefixtures("clean")
def test_a_wrong_count_takes_some_of_the_tensors(engine, kit, model_a, model_b):
    engine.inject(Fault(ROUTE, "wrong_count", when="after_receive", tensors=1))
    update(engine, kit, [(NORM, torch.full((32,), 3.0)), *pairs(model_b)])
    rows = kit.post(engine, "/get_weights_by_name", name=NORM).json
    assert rows == [3.0] * 32


@pytest.mark.usefixtures("clean")
def test_the_memory_is_let_go_of_before_the_answer(engine, kit, model_b):
    def maps() -> int:
        with open(f"/proc/{engine.pid}/maps") as lines:
            return sum("/torch_" in line for line in lines)

    payload = flat(model_b)
    before = maps()
    for _ in range(3):
        update(engine, kit, payload, load_format="flattened_bucket")
    assert maps() == before


@pytest.mark.usefixtures("clean")
def test_releases_before_sessions_need_none(kit, model_a, model_b):
    with ReferenceEngine(model_a, release="0.5.9") as older:
        reply = send(older, kit, pairs(model_b))
        assert (reply.status, reply.message) == (200, "Success")
        assert output(older, kit) == kit.greedy(model_b, kit.PROMPT, 24)


def test_each_rank_opens_its_own_entry(kit, model_a, model_b):
    with ReferenceEngine(model_a, tp=2) as wide:
        kit.post(wide, "/begin_weight_update")
        halves = pairs(model_b)
        body = {"serialized_named_tensors": [entry(halves), entry(halves)], "flush_cache": True}
        assert kit.post(wide, ROUTE, **body).message == "Success"
        kit.post(wide, "/end_weight_update")
        assert output(wide, kit) == kit.greedy(model_b, kit.PROMPT, 24)


@dataclass
class Stranger:
    """Something that is on no list."""

    value: int = 0


@pytest.mark.parametrize(
    "broken",
    [
        {"serialized_named_tensors": []},
        {"serialized_named_tensors": ["bm8gcGlja2xl"]},
        {"load_format": "unheard of"},
        {"payload": [(NORM, torch.zeros(3))]},
        {"payload": [(NORM, Stranger())]},
        {"payload": [(NORM, "gone")]},
    ],
    ids=["no entry", "no pickle", "format", "shape", "unknown object", "no tensor"],
)
def test_whatever_cannot_be_opened_or_loaded_ends_the_server(kit, model_a, broken):
    with ReferenceEngine(model_a) as engine:
        kit.post(engine, "/begin_weight_update")
        fields = {key: value for key, value in broken.items() if key != "payload"}
        with pytest.raises((ConnectionError, HTTPException)):
            send(engine, kit, broken.get("payload", [(NORM, torch.ones(32))]), **fields)
        kit.wait_for(lambda: engine.process.poll() is not None)


@pytest.mark.parametrize("target", [os.system, eval, pickle.loads, torch.load])
def test_nothing_is_made_that_is_not_on_the_list(target):
    data = pickle.dumps(target)
    with pytest.raises(RuntimeError, match="Blocked unsafe global"):
        Unpickler(io.BytesIO(data)).load()
