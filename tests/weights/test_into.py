"""Values that can be made where they are wanted are made there, and are the same."""

from __future__ import annotations

import copy
import weakref
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from weight_update.errors import WeightMismatchError
from weight_update.transports.packing import fill
from weight_update.weights.extract import extract_weights
from weight_update.weights.fitting import with_dtype
from weight_update.weights.lora import kernel
from weight_update.weights.lora.dense import Dense
from weight_update.weights.lora.formula import LowRank, Merge
from weight_update.weights.reading import read_in_turn
from weight_update.weights.specs import Weight

KINDS: dict[str, dict[str, Any]] = {
    "LoRA": {},
    "DoRA": {"use_dora": True},
    "embedding": {"target_modules": ["embed_tokens"]},
    "bias": {"lora_bias": True, "target_modules": ["q_proj"]},
    "trained tokens": {"trainable_token_indices": [0, 9]},
    "one that only PEFT can merge": {"target_modules": ["embed_tokens"], "use_dora": True},
}
# Of |base| + |scale| * |b| @ |a|: what adding up in fp32 may lose, in any order.
TINY = 2.0**-20


def adapted(
    make_llama: Any, dtype: torch.dtype = torch.bfloat16, autocast: bool = True, **more: Any
) -> nn.Module:
    settings: dict[str, Any] = {"r": 4, "target_modules": ["q_proj", "up_proj"]}
    llama = make_llama(dtype=dtype, attention_bias=True)
    config = LoraConfig(**(settings | more))
    model = get_peft_model(llama, config, autocast_adapter_dtype=autocast)
    torch.manual_seed(5)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn_like(parameter) * 0.1)
    return model


def low_rank(rows: int, columns: int, rank: int, scale: float = 0.3) -> LowRank:
    torch.manual_seed(rank)
    return LowRank(torch.randn(rank, columns), torch.randn(rows, rank), scale)


def by_name(weights: Any, name: str) -> Weight:
    return next(weight for weight in weights if weight.spec.name == name)


def place_of(weight: Weight) -> torch.Tensor:
    return torch.full(weight.spec.shape, 9, dtype=weight.spec.dtype)


# -- merged weights ------------------------------------------------------------------------


@pytest.mark.parametrize("more", KINDS.values(), ids=KINDS.keys())
def test_a_bucket_of_merged_weights_holds_the_bits_that_are_read(make_llama, more) -> None:
    weights = extract_weights(adapted(make_llama, **more))
    # As large ones are packed: each by itself.
    for weight in weights:
        buffer = torch.empty(weight.spec.nbytes, dtype=torch.uint8)
        fill(buffer, [weight])
        assert torch.equal(buffer, weight.read().contiguous().view(-1).view(torch.uint8))


def test_a_merged_weight_is_made_in_the_place_that_it_is_given(make_llama) -> None:
    weight = by_name(extract_weights(adapted(make_llama)), "model.layers.0.mlp.up_proj.weight")
    place = place_of(weight)
    assert weight.into is not None

    assert weight.into(place) is place
    assert torch.equal(place, weight.read())


@pytest.mark.parametrize(
    "place",
    [torch.full((1, 32), 9.0).bfloat16(), torch.full((64, 32), 9.0)],
    ids=["another shape", "another dtype"],
)
def test_a_place_that_does_not_fit_is_left_alone(make_llama, place: torch.Tensor) -> None:
    weight = by_name(extract_weights(adapted(make_llama)), "model.layers.0.mlp.up_proj.weight")
    assert weight.into is not None

    assert torch.equal(weight.into(place), weight.read())
    assert (place == 9).all()


def test_a_base_that_has_another_shape_by_now_is_refused() -> None:
    (announced,) = extract_weights({"w": torch.zeros(64, 32).bfloat16()})
    now = Merge(Dense.of(torch.zeros(8, 32).bfloat16()), (low_rank(8, 32, 2),))
    weight = Weight(announced.spec, announced.device, now.read, into=now.into)

    with pytest.raises(WeightMismatchError, match=r"announced as .*\(64, 32\).* \(8, 32\) now"):
        fill(torch.empty(weight.spec.nbytes, dtype=torch.uint8), [weight])


class Allocated(TorchDispatchMode):
    """The most bytes that new storages had together while it was entered."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._seen: set[int] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        known = {t.untyped_storage()._cdata for t in args if isinstance(t, torch.Tensor)}
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor):
            storage = result.untyped_storage()
            if storage._cdata not in known | self._seen:
                self._note(storage)
        return result

    def _note(self, storage: torch.UntypedStorage) -> None:
        self._seen.add(storage._cdata)
        self.now += storage.nbytes()
        self.peak = max(self.peak, self.now)
        weakref.finalize(storage, self._freed, storage._cdata, storage.nbytes())

    def _freed(self, key: int, size: int) -> None:
        self._seen.discard(key)
        self.now -= size


def test_a_merge_into_a_place_takes_no_memory_for_the_weight() -> None:
    base = torch.zeros(64, 1 << 15, dtype=torch.bfloat16)
    merge = Merge(Dense.of(base), (low_rank(64, 1 << 15, 2),))
    place = torch.empty_like(base)
    factors = 4 * (2 * (1 << 15) + 2 * 64)

    with Allocated() as made, torch.no_grad():
        merge.into(place)

    assert made.peak <= 4 * (1 << 20) + factors < base.nbytes + 4 * (1 << 20)


@pytest.mark.parametrize("rank", [1, 4, 16, 64])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_a_merged_value_is_the_exact_one_rounded_once(dtype: torch.dtype, rank: int) -> None:
    step = low_rank(96, 160, rank)
    base = torch.randn(96, 160).to(dtype)
    delta, sizes = step.b.double() @ step.a.double(), step.b.double().abs() @ step.a.double().abs()
    exact, size = base.double() + 0.3 * delta, base.double().abs() + 0.3 * sizes
    info = torch.finfo(dtype)
    ulp = exact.abs().clamp_min(info.tiny).log2().floor().exp2() * info.eps

    got = Merge(Dense.of(base), (step,)).read().double()

    assert ((got - exact).abs() <= ulp / 2 + TINY * size).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_merged_weights_are_closer_to_the_exact_ones_than_pefts_own(make_llama, dtype) -> None:
    model = adapted(make_llama, dtype, autocast=False)  # adapters in the dtype of the base
    exact = copy.deepcopy(model).double().merge_and_unload().state_dict()  # type: ignore[operator]
    theirs = copy.deepcopy(model).merge_and_unload().state_dict()  # type: ignore[operator]
    changed = [w for w in extract_weights(model) if "q_proj.w" in w.spec.name]
    assert changed

    for weight in changed:
        name = weight.spec.name
        ours, peft = (
            (v.double() - exact[name]).abs().mean() for v in (weight.read(), theirs[name])
        )
        assert 0 < ours < peft


def test_on_the_cpu_there_is_no_kernel() -> None:
    step = low_rank(4, 4, 2)
    base, merged = torch.zeros(4, 4), torch.full((4, 4), 9.0)

    assert not kernel.add_low_rank(merged, base, step.b, step.a, 1.0)
    assert (merged == 9).all()


# -- casts, and values that are merely read --------------------------------------------------


def test_a_cast_weight_is_cast_into_its_place() -> None:
    tensor = torch.randn(3, 5)
    cast = with_dtype(extract_weights({"w": tensor})[0], torch.bfloat16)
    place = place_of(cast)
    assert cast.into is not None

    assert cast.into(place) is place
    assert torch.equal(place, tensor.bfloat16())


def test_a_value_of_another_shape_is_not_spread_over_the_place() -> None:
    values = {"w": torch.ones(3, 5)}
    weight = extract_weights(values)[0]
    cast = with_dtype(Weight(weight.spec, weight.device, lambda: torch.ones(1, 5)), torch.bfloat16)
    buffer = torch.zeros(cast.spec.nbytes, dtype=torch.uint8)

    with pytest.raises(WeightMismatchError, match=r"\(1, 5\) now"):
        fill(buffer, [cast])
    assert not buffer.any()


def test_only_weights_that_can_are_made_in_their_places() -> None:
    made, read = extract_weights({"a": torch.ones(2), "b": torch.ones(2)})
    made = with_dtype(made, torch.float64)
    places = [torch.zeros(2, dtype=torch.float64), torch.zeros(2)]

    first, second = read_in_turn([made, read], places)

    assert first is places[0]
    assert second is not places[1]
    assert not places[1].any()
