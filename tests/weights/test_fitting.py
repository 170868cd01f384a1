"""What an engine is given: its dtype, its vocabulary, sound values, its quantisation
(C05, C41, C61, C62, C82)."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch

from weight_update.errors import ConfigurationError, WeightMismatchError
from weight_update.facts import Intake
from weight_update.weights.extract import extract_weights
from weight_update.weights.families.fused import group_of
from weight_update.weights.fitting import Wishes, check_finite, common, fit, with_dtype
from weight_update.weights.specs import TensorSpec, Turn, Weight

PLAIN = Intake(dtype="bfloat16", vocabulary=8)
FP8 = replace(PLAIN, quantization="fp8", block=(128, 128), requantises=True, partial_modules=False)
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
LINEAR = "model.layers.0.self_attn.o_proj.weight"
SCALES = f"{LINEAR}_scale_inv"


def fitted(
    tensors: dict[str, torch.Tensor],
    intake: Intake = PLAIN,
    *,
    whole: bool = True,
    **wishes: object,
) -> dict[str, torch.Tensor]:
    weights = fit(extract_weights(tensors), intake, Wishes(**wishes), whole=whole)  # type: ignore[arg-type]
    values = {w.spec.name: w.read() for w in weights}
    assert {w.spec.name: (w.spec.dtype, w.spec.shape) for w in weights} == {
        name: (value.dtype, tuple(value.shape)) for name, value in values.items()
    }
    return values


# -- dtype -------------------------------------------------------------------------------------

DTYPES = {
    "f64": torch.float64,
    "f32": torch.float32,
    "f16": torch.float16,
    "bf16": torch.bfloat16,
    "fp8": torch.float8_e4m3fn,
    "i64": torch.int64,
    "u8": torch.uint8,
    "bool": torch.bool,
    "c64": torch.complex64,
}


@pytest.mark.parametrize("wish", ["engine", torch.bfloat16])
def test_floating_weights_are_cast_and_all_others_stay(wish: object) -> None:
    tensors = {name: torch.ones(3).to(dtype) for name, dtype in DTYPES.items()}

    values = fitted(tensors, dtype=wish)

    cast = {"f64", "f32", "f16", "bf16"}
    assert {n for n, v in values.items() if v.dtype is torch.bfloat16} == cast
    assert all(values[n].dtype is DTYPES[n] for n in DTYPES.keys() - cast)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_a_cast_value_equals_torchs_own_cast(dtype: torch.dtype) -> None:
    value = torch.randn(3, 3)

    assert torch.equal(fitted({"w": value}, dtype=dtype)["w"], value.to(dtype))


def test_without_a_wish_nothing_is_cast_whatever_the_engine_runs() -> None:
    assert fitted({"w": torch.ones(2)})["w"].dtype is torch.float32


@pytest.mark.parametrize("name", ["mlp.gate.e_score_correction_bias", "linear_attn.A_log"])
def test_what_engines_keep_in_fp32_keeps_its_bits_where_their_dtype_is_asked_for(name: str) -> None:
    name = f"model.layers.0.{name}"

    assert fitted({name: torch.ones(2)}, dtype="engine")[name].dtype is torch.float32
    assert fitted({name: torch.ones(2)}, dtype=torch.bfloat16)[name].dtype is torch.bfloat16


def test_the_trainers_tensors_are_untouched_and_nothing_is_cast_before_it_is_read() -> None:
    value = torch.nn.Parameter(torch.randn(4))
    (weight,) = fit(extract_weights({"w": value}), PLAIN, Wishes(dtype="engine"), whole=True)

    with torch.no_grad():
        value.fill_(2.0)
    assert weight.read().tolist() == [2.0] * 4
    assert value.dtype is torch.float32


def test_a_cast_weight_is_read_with_the_other_ranks_like_the_one_it_is_made_of() -> None:
    turn = Turn(0, lambda _: None)
    spec = TensorSpec("w", torch.float32, (2, 2))
    source = Weight(spec, torch.device("cpu"), lambda: torch.ones(2, 2), _two_rows, True, turn)

    (weight,) = fit([source], PLAIN, Wishes(dtype="engine"), whole=True)

    assert (weight.collective, weight.turn) == (True, turn)
    assert weight.rows is not None
    assert weight.rows(0, 1).dtype is torch.bfloat16


def _two_rows(first: int, end: int) -> torch.Tensor:
    return torch.ones(2, 2)[first:end]


def test_an_engine_that_tells_no_dtype_is_refused_with_a_way_out() -> None:
    with pytest.raises(ConfigurationError, match=r"torch\.bfloat16") as caught:
        fitted({"w": torch.ones(1)}, Intake(), dtype="engine")
    assert caught.value.phase == "plan"


# -- vocabulary --------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [EMBEDDING, HEAD, "lm_head.bias", "transformer.wte.weight"])
def test_padding_is_refused_with_both_numbers_unless_it_may_be_cut(name: str) -> None:
    with pytest.raises(WeightMismatchError, match=r"10 rows.*has 8.*trim_vocabulary=True"):
        fitted({name: torch.ones(10)})


def test_a_trimmed_weight_is_a_view_of_the_first_rows() -> None:
    tensors = {EMBEDDING: torch.randn(10, 4), HEAD: torch.randn(10, 4), "w": torch.randn(10, 4)}

    values = fitted(tensors, trim_vocabulary=True)

    assert all(torch.equal(values[name], tensors[name][:8]) for name in (EMBEDDING, HEAD))
    assert values[EMBEDDING].data_ptr() == tensors[EMBEDDING].data_ptr()
    assert values["w"].shape == (10, 4)


def test_only_the_rows_that_are_kept_are_read_where_that_is_cheaper() -> None:
    asked: list[tuple[int, int]] = []

    def rows(first: int, end: int) -> torch.Tensor:
        asked.append((first, end))
        return torch.ones(end - first, 2)

    source = Weight(
        TensorSpec(HEAD, torch.float32, (10, 2)), torch.device("cpu"), _unread, rows=rows
    )
    (weight,) = fit([source], PLAIN, Wishes(trim_vocabulary=True), whole=True)

    assert weight.read().shape == (8, 2)
    assert asked == [(0, 8)]


def _unread() -> torch.Tensor:
    raise AssertionError("all of it was read")


@pytest.mark.parametrize("trim", [False, True])
def test_a_smaller_vocabulary_is_refused_even_where_rows_may_be_cut(trim: bool) -> None:
    with pytest.raises(WeightMismatchError, match=r"6 rows.*has 8"):
        fitted({HEAD: torch.ones(6, 2)}, trim_vocabulary=trim)


def test_tables_of_other_parts_of_a_model_have_sizes_of_their_own() -> None:
    names = ("audio_tower.embed_positions.weight", "talker.codec.embed_tokens.weight", "wte.lora")

    assert len(fitted({name: torch.ones(20, 2) for name in names})) == 3


def test_an_unknown_vocabulary_stops_trimming_and_nothing_else() -> None:
    unknown = replace(PLAIN, vocabulary=None)

    assert fitted({HEAD: torch.ones(10, 2)}, unknown)[HEAD].shape == (10, 2)
    with pytest.raises(ConfigurationError, match=r"does not say how many rows.*cut the rows"):
        fitted({HEAD: torch.ones(10, 2)}, unknown, trim_vocabulary=True)


# -- values ------------------------------------------------------------------------------------

NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize("value", [NAN, INF, -INF])
@pytest.mark.parametrize(
    "dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.complex64]
)
def test_every_kind_of_value_that_is_no_number_is_found_by_name(
    value: float, dtype: torch.dtype
) -> None:
    bad = torch.ones(3, 3).to(dtype)
    bad[2, 1] = value
    weights = extract_weights({"good": torch.ones(2), "bad": bad, "empty": torch.ones(0, 2)})

    with pytest.raises(WeightMismatchError, match=r"1 weight\(s\) hold NaN or infinity: 'bad' "):
        check_finite(weights)


def test_fp8_is_checked_too_and_integers_are_not_read() -> None:
    integer = Weight(TensorSpec("i", torch.int64, (2,)), torch.device("cpu"), _unread)
    (nan,) = extract_weights({"w": torch.full((2,), NAN).to(torch.float8_e4m3fn)})

    check_finite([integer])
    with pytest.raises(WeightMismatchError, match="'w'"):
        check_finite([integer, nan])


def test_all_bad_names_are_counted_and_the_first_few_listed() -> None:
    weights = extract_weights({f"w{i}": torch.full((1,), NAN) for i in range(30)})

    with pytest.raises(WeightMismatchError, match=r"30 weight\(s\)") as caught:
        check_finite(weights)
    assert "'w0'" in str(caught.value)
    assert "'w29'" not in str(caught.value)


def test_a_cast_that_overflows_is_found_because_the_cast_value_is_checked() -> None:
    tensors = {"w": torch.full((2,), 1e30)}

    fitted(tensors, dtype=torch.bfloat16, check_finite=True)
    with pytest.raises(WeightMismatchError, match="'w'"):
        fitted(tensors, dtype=torch.float16, check_finite=True)


def test_without_a_wish_no_value_is_looked_at() -> None:
    weight = Weight(TensorSpec("w", torch.float32, (2,)), torch.device("cpu"), _unread)

    assert fit([weight], PLAIN, Wishes(), whole=True) == (weight,)


def test_the_check_keeps_no_value_and_tells_other_ranks_of_all_at_once() -> None:
    told: list[Sequence[int]] = []
    made: list[weakref.ref[torch.Tensor]] = []

    def read() -> torch.Tensor:
        assert sum(value() is not None for value in made) <= 1  # the one that was checked last
        value = torch.ones(2)
        made.append(weakref.ref(value))
        return value

    weights = [
        Weight(
            TensorSpec(f"w{i}", torch.float32, (2,)),
            torch.device("cpu"),
            read,
            collective=True,
            turn=Turn(i, told.append),
        )
        for i in range(3)
    ]
    check_finite(weights)

    assert told == [[0, 1, 2]]
    assert len(made) == 3


# -- sets of weights that engines fuse ---------------------------------------------------------


def part(*modules: str) -> dict[str, torch.Tensor]:
    return {f"model.layers.0.self_attn.{module}.weight": torch.ones(2, 2) for module in modules}


def test_a_part_of_a_fused_module_is_refused_where_the_engine_does_not_take_it() -> None:
    with pytest.raises(ConfigurationError, match=r"q_proj.*without.*k_proj.*v_proj"):
        fitted(part("q_proj"), replace(PLAIN, partial_modules=False), whole=False)


def test_an_engine_that_takes_parts_gets_them_and_a_complete_set_goes_everywhere() -> None:
    strict = replace(PLAIN, partial_modules=False)

    assert len(fitted(part("q_proj"), whole=False)) == 1
    assert len(fitted(part("q_proj", "k_proj", "v_proj"), strict, whole=False)) == 3
    assert len(fitted(part("q_proj"), strict, whole=True)) == 1


def test_halves_of_latent_attention_are_refused_everywhere() -> None:
    with pytest.raises(ConfigurationError, match=r"q_a_proj.*without.*kv_a_proj_with_mqa"):
        fitted(part("q_a_proj"), whole=False)


def test_known_names_tell_what_is_missing() -> None:
    weights = extract_weights(part("q_proj"))
    strict = replace(PLAIN, partial_modules=False)
    known = [weights[0].spec.name, "model.norm.weight"]

    assert fit(weights, strict, Wishes(), whole=False, known_names=known) == weights


# -- quantised engines -------------------------------------------------------------------------


@pytest.mark.parametrize(
    "intake",
    [
        replace(PLAIN, quantization="awq"),
        replace(PLAIN, quantization="gptq_marlin"),
        replace(PLAIN, quantization="compressed-tensors"),
        replace(PLAIN, quantization="modelopt_fp4", requantises=True),
        replace(PLAIN, quantization="fp8", requantises=True),
        replace(FP8, requantises=False),
        replace(FP8, quantization="fp8 with scales in ue8m0"),
    ],
    ids=lambda i: f"{i.quantization}, block {i.block}, requantises {i.requantises}",
)
def test_what_no_release_takes_online_is_refused_with_the_reason_and_the_way_out(
    intake: Intake,
) -> None:
    with pytest.raises(ConfigurationError, match=r"fp8|quantised") as caught:
        fitted({"w": torch.ones(2, 2)}, intake)
    assert "update_weights_from_disk" in str(caught.value)
    assert "unquantised" in str(caught.value)


def test_a_block_quantised_engine_gets_fp8_and_scales_and_the_rest_as_it_is() -> None:
    tensors = {
        EMBEDDING: torch.randn(8, 256),
        LINEAR: torch.randn(256, 200),
        "model.norm.weight": torch.randn(256),
    }
    values = fitted(tensors, FP8, dtype="engine")

    assert list(values) == [EMBEDDING, SCALES, LINEAR, "model.norm.weight"]
    assert values[SCALES].dtype is torch.float32
    assert values[SCALES].shape == (2, 2)
    assert values[LINEAR].dtype is torch.float8_e4m3fn
    assert {values[n].dtype for n in (EMBEDDING, "model.norm.weight")} == {torch.bfloat16}
    assert group_of(LINEAR) == group_of(SCALES)


def test_weights_that_are_quantised_already_pass_as_they_are() -> None:
    tensors = {
        LINEAR: torch.ones(128, 128).to(torch.float8_e4m3fn),
        SCALES: torch.ones(1, 1),
        "model.norm.weight": torch.ones(2),
    }
    values = fitted(tensors, FP8, dtype="engine")

    assert values[LINEAR].dtype is torch.float8_e4m3fn
    assert values[SCALES].data_ptr() == tensors[SCALES].data_ptr()
    assert values["model.norm.weight"].dtype is torch.bfloat16


def test_fp8_without_its_scales_is_refused_by_name() -> None:
    with pytest.raises(WeightMismatchError, match=r"without their scales: 'model\.layers\.0"):
        fitted({LINEAR: torch.ones(128, 128).to(torch.float8_e4m3fn)}, FP8)


def test_a_quantised_weight_is_checked_before_it_is_quantised() -> None:
    bad = torch.ones(128, 128)
    bad[3, 3] = INF

    with pytest.raises(WeightMismatchError, match="1 weight"):
        fitted({LINEAR: bad}, FP8, check_finite=True)


# -- fleets ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "wishes", "words"),
    [
        ({"dtype": "float16"}, Wishes(dtype="engine"), "dtype (bfloat16 and float16)"),
        ({"vocabulary": 9}, Wishes(), "vocabulary (8 and 9)"),
        ({"quantization": "fp8"}, Wishes(), "quantisation"),
    ],
)
def test_engines_that_need_other_weights_are_refused_and_both_named(
    changes: dict[str, object], wishes: Wishes, words: str
) -> None:
    fleet = {"http://a": PLAIN, "http://b": replace(PLAIN), "http://c": replace(PLAIN, **changes)}

    with pytest.raises(ConfigurationError) as caught:
        common(fleet, wishes)
    assert words in str(caught.value)
    assert caught.value.engines == ("http://a", "http://c")


def test_a_difference_that_does_not_matter_is_none() -> None:
    fleet = {"http://a": PLAIN, "http://b": replace(PLAIN, dtype="float16", drafts=True)}
    shared = common(fleet, Wishes(dtype=torch.float32))

    assert (shared.dtype, shared.vocabulary, shared.drafts) == (None, 8, True)


def test_what_one_engine_does_not_say_another_may() -> None:
    fleet = {"http://a": Intake(), "http://b": replace(PLAIN, partial_modules=False)}
    shared = common(fleet, Wishes(dtype="engine"))

    assert (shared.dtype, shared.vocabulary) == ("bfloat16", 8)
    assert not shared.partial_modules


def test_scales_of_fp8_weights_keep_their_dtype_under_any_other() -> None:
    weights = extract_weights({"a.weight_scale_inv": torch.ones(2), "b.weight": torch.ones(2)})

    cast = [with_dtype(weight, torch.bfloat16).spec.dtype for weight in weights]

    assert cast == [torch.float32, torch.bfloat16]


def test_engines_that_quantise_other_weights_get_other_bytes() -> None:
    blocks = {"quantization": "fp8", "block": (128, 128)}
    fleet = {
        "http://a": Intake(**blocks, scaled=frozenset({"a.weight"})),
        "http://b": Intake(**blocks, scaled=frozenset({"b.weight"})),
    }
    with pytest.raises(ConfigurationError, match="differ in which weights are quantised"):
        common(fleet, Wishes())
