"""DeepSpeed ZeRO-3 by its public names, on a stand-in: deepspeed itself is not installed here."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from weight_update.weights.extract import extract_weights
from weight_update.weights.extraction_cache import ExtractionCache
from weight_update.weights.shards.readers import readers_of


class StandIn(ModuleType):
    """What is used of deepspeed: its engine, and the context that gathers."""

    def __init__(self) -> None:
        super().__init__("deepspeed")
        self.gathered: list[int] = []
        self.held: dict[int, torch.Tensor] = {}
        self.zero = SimpleNamespace(GatheredParameters=self._gathered)
        self.DeepSpeedEngine = Engine

    def take_apart(self, module: nn.Module) -> nn.Module:
        """Leaves every parameter empty, as ZeRO-3 does between forward passes."""
        for number, parameter in enumerate(module.parameters()):
            self.held[number] = parameter.data
            part: Any = parameter
            part.ds_id, part.ds_shape = number, parameter.shape
            parameter.data = torch.empty(0, dtype=parameter.dtype)
        return module

    @contextmanager
    def _gathered(self, parameters: Sequence[Any]) -> Iterator[None]:
        for parameter in parameters:
            self.gathered.append(parameter.ds_id)
            parameter.data = self.held[parameter.ds_id]
        yield
        for parameter in parameters:
            parameter.data = torch.empty(0, dtype=parameter.dtype)


class Engine(nn.Module):
    """As DeepSpeed's, it wraps the model."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module


@pytest.fixture
def deepspeed(monkeypatch: pytest.MonkeyPatch) -> StandIn:
    stand_in = StandIn()
    monkeypatch.setitem(sys.modules, "deepspeed", stand_in)
    return stand_in


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2, bias=False))


def test_values_and_shapes_are_whole_and_gathered_one_at_a_time(deepspeed: StandIn) -> None:
    wanted = {weight.spec: weight.read().clone() for weight in extract_weights(model())}
    weights = extract_weights(Engine(deepspeed.take_apart(model())))
    assert deepspeed.gathered == []
    assert [weight.spec for weight in weights] == list(wanted)
    for weight in weights:
        assert torch.equal(weight.read(), wanted[weight.spec])
    assert deepspeed.gathered == list(range(5))


def test_what_is_gathered_is_kept_nowhere(deepspeed: StandIn) -> None:
    apart = deepspeed.take_apart(model())
    for weight in extract_weights(apart):
        weight.read()
    assert {parameter.numel() for parameter in apart.parameters()} == {0}


def test_every_rank_reads_the_parameters_and_each_its_own_buffers(deepspeed: StandIn) -> None:
    weights = extract_weights(deepspeed.take_apart(model()))
    assert {
        weight.spec.name: weight.collective for weight in weights if "1." in weight.spec.name
    } == {
        "1.weight": True,
        "1.bias": True,
        "1.running_mean": False,
        "1.running_var": False,
        "1.num_batches_tracked": False,
    }
    assert readers_of(deepspeed.take_apart(model()), 3) == {0, 1, 2}


def test_a_tied_parameter_is_gathered_once(deepspeed: StandIn) -> None:
    tied = nn.Sequential(nn.Embedding(4, 3), nn.Linear(3, 4, bias=False))
    tied[1].weight = tied[0].weight
    weights = extract_weights(deepspeed.take_apart(tied))
    assert [weight.spec.name for weight in weights] == ["0.weight"]


def test_a_cache_that_knew_the_whole_model_does_not_take_the_parts_for_it(
    deepspeed: StandIn,
) -> None:
    cache, plain = ExtractionCache(), model()
    before = {weight.spec: weight.read().clone() for weight in cache.extract(plain)}
    after = cache.extract(deepspeed.take_apart(plain))
    assert [weight.spec for weight in after] == list(before)
    assert all(torch.equal(weight.read(), before[weight.spec]) for weight in after)


def test_adapters_are_merged_from_gathered_parts(deepspeed: StandIn) -> None:
    peft = pytest.importorskip("peft")

    def adapted() -> Any:
        config = peft.LoraConfig(r=2, target_modules=["0"], init_lora_weights=False)
        torch.manual_seed(1)
        return peft.get_peft_model(model(), config)

    wanted = extract_weights(adapted().merge_and_unload())
    weights = extract_weights(deepspeed.take_apart(adapted()))
    assert [weight.spec for weight in weights] == [weight.spec for weight in wanted]
    for weight, want in zip(weights, wanted, strict=True):
        torch.testing.assert_close(weight.read(), want.read())
