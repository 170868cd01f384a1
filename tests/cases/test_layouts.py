"""Section F of the case list: the servers' layouts and sharded trainers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.integration import kit
from tests.integration.kit import INIT, PAUSE
from weight_update import (
    ConfigurationError,
    SGLangWeightSyncScheme,
    UpdateTimeout,
    WeightMismatchError,
    get_model_metadata,
)
from weight_update.engines.sglang.engine import SGLangEngine
from weight_update.reference_engine import ReferenceEngine

from .fake_http import HEALTHY, FakeServer
from .trial import SLACK, Trial, once

# ---- C04


@pytest.mark.parametrize(("tp", "given"), [(2, 1), (8, 4), (1, 2)])
def test_c04_a_wrong_number_of_ranks_is_refused_before_any_socket_opens(
    tp: int, given: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def forbidden(*_: Any) -> None:
        raise AssertionError("a rendezvous was opened")

    monkeypatch.setattr("weight_update.transports.process_group.listen", forbidden)
    with FakeServer({**HEALTHY, "tp_size": tp}) as server:
        scheme = SGLangWeightSyncScheme(server.url, timeout=20.0, num_gpus=given)
        with scheme.create_sender() as sender, pytest.raises(ConfigurationError) as caught:
            sender.update_weights(kit.llama(1))
        assert f"num_gpus={given}" in str(caught.value)
        assert f"run {tp} rank(s)" in str(caught.value)
        assert server.posted() == []


LAYOUTS = [
    ({"dp_size": 2}, "name the URL of each"),
    ({"dp_size": 8, "tp_size": 8}, "name the URL of each"),
    ({"pp_size": 2}, "tensor parallelism only"),
    ({"pp_size": 4, "tp_size": 2, "dp_size": 2, "enable_dp_attention": True}, "tensor parallelism"),
]


@pytest.mark.parametrize(("layout", "advice"), LAYOUTS, ids=lambda value: str(value)[:40])
def test_c04_a_layout_whose_ranks_cannot_join_is_refused_with_advice(
    layout: dict[str, Any], advice: str
) -> None:
    with FakeServer({**HEALTHY, **layout}) as server:
        scheme = SGLangWeightSyncScheme(
            server.url, timeout=20.0, transport="broadcast", pause_mode="abort"
        )
        with scheme.create_sender() as sender, pytest.raises(ConfigurationError) as caught:
            sender.update_weights(kit.llama(1))
        assert advice in str(caught.value)
        assert "transport='disk'" in str(caught.value)
        assert server.posted() == []


def test_c04_a_rank_claimed_twice_is_a_bounded_error_that_says_who_is_missing(
    two: list[ReferenceEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    join = SGLangEngine.join
    sender = kit.make_sender(two, timeout=3.0)
    with monkeypatch.context() as patched:
        patched.setattr(
            SGLangEngine, "join", lambda self, **told: join(self, **{**told, "rank_offset": 1})
        )
        with kit.takes_at_most(3.0 + SLACK), pytest.raises(UpdateTimeout) as caught:
            sender.update_weights(kit.llama(1))
    assert "waiting for rank 2" in str(caught.value)
    assert caught.value.phase == "connect"
    sender.shutdown()
    kit.push(two, kit.llama(1))
    assert [kit.served(engine) for engine in two] == [kit.tokens_of(1)] * 2


def test_c04_ranks_of_engines_of_several_sizes_do_not_overlap() -> None:
    with ReferenceEngine(kit.llama(0), tp=2) as wide, ReferenceEngine(kit.llama(0)) as narrow:
        log = kit.Log(wide, narrow)
        with kit.make_sender([wide, narrow]) as sender:
            sender.update_weights(kit.llama(1))
            assert sender._transport.world_size == 4
        offsets = [log.bodies(engine, INIT)[0]["rank_offset"] for engine in (wide, narrow)]
        assert offsets == [1, 3]
        assert [kit.served(engine) for engine in (wide, narrow)] == [kit.tokens_of(1)] * 2


# ---- C33


@pytest.mark.parametrize("failing", [False, True])
def test_c33_a_default_group_bound_to_a_device_is_neither_split_nor_changed(
    failing: bool, engine: ReferenceEngine
) -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        world: Any = dist.group.WORLD
        bound = world.bound_device_id = torch.device("cuda", 0)
        if failing:
            engine.inject(once(INIT, "refuse"))
            with pytest.raises(RuntimeError):
                kit.push(engine, kit.llama(1))
        else:
            kit.push(engine, kit.llama(1))
            assert kit.served(engine) == kit.tokens_of(1)
        assert dist.group.WORLD is world
        assert world.bound_device_id == bound
    finally:
        dist.destroy_process_group()


# ---- C43


@pytest.mark.parametrize("name", ["model.norm.weight", "model.embed_tokens.weight"])
def test_c43_an_empty_parameter_is_refused_before_the_pause(
    name: str, engine: ReferenceEngine
) -> None:
    """What a partitioned parameter looks like outside its gather."""
    trial = Trial([engine])
    trial.sender.init_all_workers_group(get_model_metadata(kit.llama(1)))
    weights = {k: v.detach() for k, v in kit.llama(1).state_dict().items()}
    log = kit.Log(engine)
    with pytest.raises(WeightMismatchError, match=name):
        trial.sender.update_weights({**weights, name: torch.empty(0)})
    assert log.count(engine, PAUSE) == 0
    trial.heal()


def test_c43_a_parameter_under_two_names_travels_once() -> None:
    model = nn.ModuleDict({"a": nn.Linear(2, 2)})
    model["b"] = model["a"]
    assert list(get_model_metadata(model)) == ["a.weight", "a.bias"]
