"""Weights as an engine takes them: its dtype, its vocabulary, its quantisation."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import torch

from weight_update.errors import ConfigurationError, WeightMismatchError, some_of
from weight_update.facts import Intake
from weight_update.weights import fp8
from weight_update.weights.families.fused import incomplete
from weight_update.weights.reading import read_in_turn
from weight_update.weights.specs import TensorSpec, Weight

_SHOWN = 10
# The embedding and the output layer of the text model; other parts may have tables of their own.
_VOCABULARY = re.compile(
    r"(?:(?:model|transformer|language_model|text_model|decoder|gpt_neox|layers\.\d+)\.)*"
    r"(?:embed_tokens|wte|word_embeddings|embed_in|lm_head|embed_out)\.(?:weight|bias)"
)
# Engines hold these in fp32 whatever they compute in, and routing hangs on their last bits.
_ALWAYS_FP32 = re.compile(r"(?:\.e_score_correction_bias|\.A_log|_scale_inv|_scale)$")
_PUSH_OTHERWISE = (
    "save a checkpoint and have the engine load it (/update_weights_from_disk), or serve an "
    "unquantised model for rollouts"
)


@dataclass(frozen=True)
class Wishes:
    """What the user asked for.

    Attributes:
        dtype: Floating weights are cast to it; ``engine`` means the engine's, None none.
        trim_vocabulary: Rows beyond the engine's vocabulary are cut off.
        check_finite: Every floating value must be a number.
    """

    dtype: torch.dtype | Literal["engine"] | None = None
    trim_vocabulary: bool = False
    check_finite: bool = False


def fit(
    weights: Sequence[Weight],
    intake: Intake,
    wishes: Wishes,
    *,
    whole: bool,
    known_names: Iterable[str] | None = None,
) -> tuple[Weight, ...]:
    """The weights as an engine takes them.

    Args:
        weights: As the checkpoint has them.
        intake: What the engine says of itself.
        wishes: What the user asked for.
        whole: Whether they are a whole model's.
        known_names: Of the whole model, where they are a part of it.

    Raises:
        ConfigurationError: The engine cannot take them; the text has the reason and a way out.
        WeightMismatchError: Shapes, or values, are wrong.

    Example:
        >>> from weight_update.weights.extract import extract_weights
        >>> weights = extract_weights({"lm_head.weight": torch.ones(10, 2)})
        >>> wishes = Wishes(dtype="engine", trim_vocabulary=True)
        >>> intake = Intake(dtype="bfloat16", vocabulary=8)
        >>> fit(weights, intake, wishes, whole=True)[0].spec
        TensorSpec(name='lm_head.weight', dtype=torch.bfloat16, shape=(8, 2))
    """
    _refuse_quantised(intake)
    if not whole:
        refuse_torn((weight.spec.name for weight in weights), intake, known_names)
    trimmed = _with_vocabulary(weights, intake, wishes)
    dtype = _target(intake, wishes)
    exact = wishes.dtype == "engine"
    quantise = _to_be_quantised(trimmed, intake)
    kept = [
        weight
        if weight.spec.name in quantise or (exact and _ALWAYS_FP32.search(weight.spec.name))
        else with_dtype(weight, dtype)
        for weight in trimmed
    ]
    if wishes.check_finite:
        check_finite(kept)
    return tuple(part for weight in kept for part in _parts(weight, quantise, intake))


def common(intakes: Mapping[str, Intake], wishes: Wishes) -> Intake:
    """What all engines of a fleet take alike: they get the same bytes.

    Args:
        intakes: What each engine says of itself, by its URL.
        wishes: What the user asked for.

    Raises:
        ConfigurationError: Two of them need different weights; both are named.

    Example:
        >>> fleet = {"http://a": Intake(dtype="float32"), "http://b": Intake(dtype="bfloat16")}
        >>> common(fleet, Wishes()).dtype is None
        True
    """
    dtypes = {url: intake.dtype for url, intake in intakes.items() if intake.dtype}
    sizes = {url: intake.vocabulary for url, intake in intakes.items() if intake.vocabulary}
    kinds = {url: (intake.quantization, intake.block) for url, intake in intakes.items()}
    if wishes.dtype == "engine":
        _agree(dtypes, "dtype", "give a torch dtype, which each engine casts to its own")
    _agree(sizes, "vocabulary", "update them by senders of their own")
    _agree(kinds, "quantisation", "update them by senders of their own")
    scales = {u: (i.scaled, i.unconverted) for u, i in intakes.items() if i.quantization}
    _agree(scales, "which weights are quantised", "update them by senders of their own")
    told = list(intakes.values())
    first = told[0] if told else Intake()
    return replace(
        first,
        architectures=first.architectures if _alike(i.architectures for i in told) else (),
        dtype=next(iter(dtypes.values()), None) if _alike(dtypes.values()) else None,
        vocabulary=next(iter(sizes.values()), None),
        scaled=next((i.scaled for i in told if i.scaled is not None), None),
        requantises=all(i.requantises for i in told),
        drafts=any(i.drafts for i in told),
        partial_modules=all(i.partial_modules for i in told),
        whole_layers=any(i.whole_layers for i in told),
    )


def with_dtype(weight: Weight, dtype: torch.dtype | None) -> Weight:
    """``weight``, cast when it is read if it is a floating tensor of another dtype.

    Numbers of eight bits are no approximation of a weight without their scales, and both stay.

    Example:
        >>> from weight_update.weights.extract import extract_weights
        >>> (weight,) = extract_weights({"steps": torch.ones(1, dtype=torch.int64)})
        >>> with_dtype(weight, torch.bfloat16).spec.dtype
        torch.int64
    """
    spec, rows = weight.spec, weight.rows
    if dtype is None or dtype == spec.dtype or not _is_floating(spec.dtype):
        return weight
    if spec.name.endswith(fp8.SCALE):
        return weight
    cast = weight.derived(TensorSpec(spec.name, dtype, spec.shape), lambda: weight.read().to(dtype))
    cast = replace(cast, into=partial(_cast_into, weight.read))
    if rows is None:
        return cast
    return replace(cast, rows=lambda first, end: rows(first, end).to(dtype))


@torch.no_grad()
def _cast_into(read: Callable[[], torch.Tensor], place: torch.Tensor) -> torch.Tensor:
    value = read()
    return place.copy_(value) if value.shape == place.shape else value.to(place.dtype)


def check_finite(weights: Sequence[Weight]) -> None:
    """Reads every floating weight once and refuses values that are no finite numbers.

    Raises:
        WeightMismatchError: Some are not; the text names the weights.

    Example:
        >>> from weight_update.weights.extract import extract_weights
        >>> check_finite(extract_weights({"w": torch.tensor([1.0, float("nan")])}))
        Traceback (most recent call last):
        ...
        weight_update.errors.WeightMismatchError: plan: 1 weight(s) hold NaN or infinity: 'w' [...
    """
    judged = [w for w in weights if w.spec.dtype.is_floating_point or w.spec.dtype.is_complex]
    # Flags stay on their device: to look at one would wait for it, at every weight.
    flags: dict[torch.device, list[tuple[str, torch.Tensor]]] = defaultdict(list)
    with closing(read_in_turn(judged)) as values:
        for weight, value in zip(judged, values, strict=True):
            if value.numel():
                flags[value.device].append((weight.spec.name, _all_finite(value)))
    bad = [
        name
        for kept in flags.values()
        for (name, _), fine in zip(kept, torch.stack([f for _, f in kept]).tolist(), strict=True)
        if not fine
    ]
    if bad:
        raise WeightMismatchError(
            f"{len(bad)} weight(s) hold NaN or infinity: {some_of(bad, _SHOWN)}",
            phase="plan",
            remedy="no engine was touched; go back to a sound checkpoint of the trainer",
        )


def is_of_vocabulary(name: str) -> bool:
    """Whether a weight has a row for each token.

    Example:
        >>> is_of_vocabulary("model.embed_tokens.weight"), is_of_vocabulary("model.norm.weight")
        (True, False)
    """
    return _VOCABULARY.fullmatch(name) is not None


def refuse_torn(
    names: Iterable[str], intake: Intake, known_names: Iterable[str] | None = None
) -> None:
    """Refuses some of the weights that an engine fuses, where it cannot take them alone.

    Raises:
        ConfigurationError: It would lose them, or corrupt the others.
    """
    torn = incomplete(names, known_names, layers=intake.whole_layers)
    refused = [each for each in torn if each.halves_are_lost or not intake.partial_modules]
    if refused:
        raise ConfigurationError(
            f"{len(refused)} set(s) of weights that the engine fuses are incomplete: "
            f"{'; '.join(map(str, refused[:_SHOWN]))}",
            phase="plan",
            remedy="push all weights of a fused module together, or the whole model",
        )


def _is_floating(dtype: torch.dtype) -> bool:
    return dtype.is_floating_point and dtype.itemsize > 1


@torch.no_grad()
def _all_finite(value: torch.Tensor) -> torch.Tensor:
    """Whether all values are finite, as a tensor; no second copy of a weight is made for it."""
    if value.is_complex():
        value = torch.view_as_real(value.resolve_conj())
    if value.dtype.itemsize == 1:
        value = value.to(torch.float16)
    least, most = torch.aminmax(value)  # either is NaN where one of the values is
    return torch.isfinite(least) & torch.isfinite(most)


def _target(intake: Intake, wishes: Wishes) -> torch.dtype | None:
    if wishes.dtype != "engine":
        return wishes.dtype
    if intake.dtype is None:
        raise ConfigurationError(
            "dtype='engine', and the engine does not say in which dtype it runs (its model's "
            "config.json cannot be read here)",
            phase="plan",
            remedy="give a torch dtype, such as dtype=torch.bfloat16, or start the engine with "
            "--dtype",
        )
    found: Any = getattr(torch, intake.dtype)
    return found if isinstance(found, torch.dtype) else None


# -- vocabulary ---------------------------------------------------------------------------


def _with_vocabulary(weights: Sequence[Weight], intake: Intake, wishes: Wishes) -> Sequence[Weight]:
    rows = intake.vocabulary
    if rows is None:
        if wishes.trim_vocabulary:
            raise ConfigurationError(
                "trim_vocabulary=True, and the engine does not say how many rows it has (its "
                "model's config.json cannot be read here)",
                phase="plan",
                remedy="cut the rows before the push, or make the engine's model folder readable "
                "under the same path",
            )
        return weights
    odd = [w for w in weights if _has_vocabulary(w.spec) and w.spec.shape[0] != rows]
    wrong = [w for w in odd if w.spec.shape[0] < rows or not wishes.trim_vocabulary]
    if wrong:
        raise _other_vocabulary(wrong, rows)
    return [_cut(w, rows) for w in weights] if odd else weights


def _has_vocabulary(spec: TensorSpec) -> bool:
    return bool(spec.shape) and is_of_vocabulary(spec.name)


def _other_vocabulary(wrong: Sequence[Weight], rows: int) -> WeightMismatchError:
    told = [f"{w.spec.name!r} has {w.spec.shape[0]} rows" for w in wrong]
    larger = all(w.spec.shape[0] > rows for w in wrong)
    return WeightMismatchError(
        f"{', '.join(told[:_SHOWN])}, and the engine has {rows}",
        phase="plan",
        remedy=f"trim_vocabulary=True cuts the rows from {rows} on, if they are padding"
        if larger
        else "the engine serves a model of another vocabulary",
    )


def _cut(weight: Weight, rows: int) -> Weight:
    spec, some = weight.spec, weight.rows
    if not _has_vocabulary(spec) or spec.shape[0] == rows:
        return weight
    read = (lambda: weight.read()[:rows]) if some is None else (lambda: some(0, rows))
    cut = weight.derived(TensorSpec(spec.name, spec.dtype, (rows, *spec.shape[1:])), read)
    return replace(cut, rows=some)


# -- quantised engines --------------------------------------------------------------------


def _refuse_quantised(intake: Intake) -> None:
    reason = _objection(intake)
    if reason:
        raise ConfigurationError(
            f"the engine takes no online update: {reason}", phase="plan", remedy=_PUSH_OTHERWISE
        )


def _objection(intake: Intake) -> str | None:
    if intake.quantization is None:
        return None
    if intake.quantization != "fp8":
        return f"its weights are quantised ({intake.quantization})"
    if intake.block is None:
        return (
            "its weights are fp8 with one scale each, or its model's config.json, which would "
            "say that they have one for each block, cannot be read here"
        )
    if not intake.requantises:
        return "its weights are fp8, which releases before 0.5.21 do not process again"
    return None


def _to_be_quantised(weights: Sequence[Weight], intake: Intake) -> frozenset[str]:
    """Names of the weights that are quantised on the way.

    Raises:
        WeightMismatchError: Some are quantised already and come without their scales.
    """
    if intake.block is None or intake.quantization is None:
        return frozenset()
    held = [w.spec for w in weights if fp8.is_quantised(w.spec, intake)]
    done = {spec.name for spec in held if not _is_floating(spec.dtype)}
    bare = sorted(done - {w.spec.name.removesuffix(fp8.SCALE) for w in weights if _is_scale(w)})
    if bare:
        raise WeightMismatchError(
            f"{len(bare)} weight(s) are fp8 and come without their scales: {some_of(bare, _SHOWN)}",
            phase="plan",
            remedy=f"push name{fp8.SCALE} with each, or the weights before they were quantised",
        )
    return frozenset(spec.name for spec in held) - done


def _is_scale(weight: Weight) -> bool:
    return weight.spec.name.endswith(fp8.SCALE)


def _parts(weight: Weight, quantise: frozenset[str], intake: Intake) -> Iterable[Weight]:
    if weight.spec.name not in quantise or intake.block is None:
        return (weight,)
    return fp8.quantised(weight, intake.block)


def _agree(told: Mapping[str, object], what: str, remedy: str) -> None:
    urls = list(told)
    other = next((url for url in urls if told[url] != told[urls[0]]), None)
    if other is not None:
        raise ConfigurationError(
            f"{urls[0]} and {other} differ in {what} ({told[urls[0]]!s:.60} and "
            f"{told[other]!s:.60}), and all engines get the same bytes",
            engines=(urls[0], other),
            phase="plan",
            remedy=remedy,
        )


def _alike(values: Iterable[object]) -> bool:
    return len(set(values)) <= 1
