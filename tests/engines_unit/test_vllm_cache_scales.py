"""Scales of vLLM's KV cache: there is a place for them in an fp8 cache alone."""

from __future__ import annotations

import pytest

from weight_update.engines.vllm.facts import VLLMFacts, read_facts

NAMES = ["a.weight", "a.k_scale", "a.v_scale"]
SCALES = ("a.k_scale", "a.v_scale")


@pytest.mark.parametrize(
    ("dtype", "misplaced"),
    [("auto", SCALES), ("bfloat16", SCALES), (None, SCALES), ("fp8", ()), ("fp8_e4m3", ())],
)
def test_an_engine_without_an_fp8_cache_has_no_place_for_scales(
    dtype: str | None, misplaced: tuple[str, ...]
):
    told = {} if dtype is None else {"cache_config": {"cache_dtype": dtype}}
    assert read_facts(told, []).check_names(NAMES).unknown == misplaced


@pytest.mark.parametrize("fp8", [True, False])
def test_scales_are_never_lacking(fp8: bool):
    facts = VLLMFacts(loaded=frozenset({"a.weight"}), fp8_cache=fp8)
    check = facts.check_names(NAMES)
    assert (check.known, check.lacking) == (True, ())
    assert check.unknown == (() if fp8 else SCALES)


def test_without_scales_nothing_is_said_of_an_unread_model():
    assert not VLLMFacts().check_names(["a.weight"]).known
