"""The size of a buffer: what was asked for, or a share of what is free."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from weight_update import ConfigurationError
from weight_update.synchronizers.buffer_size import (
    RATIO_VARIABLE,
    check_buffer_size,
    explicit_bytes,
    share_of,
)
from weight_update.weights.buckets import plan_buckets
from weight_update.weights.cargo import Format, Terms
from weight_update.weights.extract import extract_weights


@pytest.mark.parametrize(("gigabytes", "size"), [(1, 1 << 30), (0.5, 1 << 29), (2.0, 2 << 30)])
def test_a_size_that_is_given_is_in_gibibytes(gigabytes: float, size: int):
    assert explicit_bytes(gigabytes) == size


@pytest.mark.parametrize("gigabytes", [0, -1, -0.5, float("nan")])
def test_a_size_has_to_be_above_zero(gigabytes: float):
    with pytest.raises(ValueError, match="refit_buffer_size_gb must be > 0"):
        check_buffer_size(gigabytes)


@pytest.mark.parametrize("gigabytes", ["1", True, [1], 1e-12, float("inf"), 1e30, 10**400])
def test_a_size_has_to_be_a_number_of_bytes(gigabytes: Any):
    with pytest.raises(ConfigurationError, match="refit_buffer_size_gb"):
        check_buffer_size(gigabytes)


@pytest.mark.parametrize(
    ("text", "free", "size"),
    [(None, 1000, 300), ("", 1000, 300), ("0.5", 1000, 500), (" 2 ", 10, 20), ("1e-1", 100, 10)],
)
def test_a_share_of_what_is_free_is_taken(
    text: str | None, free: int, size: int, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.delenv(RATIO_VARIABLE, raising=False)
    if text is not None:
        monkeypatch.setenv(RATIO_VARIABLE, text)
    assert share_of(free) == size


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("much", "must be a valid float"),
        ("0,3", "must be a valid float"),
        ("nan", "must be a valid float"),
        ("inf", "must be a valid float"),
        ("0", "must be > 0"),
        ("-0.1", "must be > 0"),
    ],
)
def test_a_share_that_is_none_is_refused(text: str, words: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv(RATIO_VARIABLE, text)
    for check in (lambda: check_buffer_size(None), lambda: share_of(1000)):
        with pytest.raises(ValueError, match=f"{RATIO_VARIABLE} {words}"):
            check()


def test_a_size_that_is_given_needs_no_share(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv(RATIO_VARIABLE, "much")
    check_buffer_size(1)


@pytest.mark.parametrize("free", [0, 3])
def test_no_memory_leaves_no_buffer(free: int, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv(RATIO_VARIABLE, raising=False)
    with pytest.raises(ConfigurationError, match="leaves none for a refit buffer"):
        share_of(free)


@given(
    sizes=st.lists(st.integers(0, 40), min_size=1, max_size=30),
    chosen=st.integers(1, 400),
    limit=st.none() | st.integers(1, 400),
)
def test_buckets_of_several_tensors_keep_to_the_limit(
    sizes: list[int], chosen: int, limit: int | None
):
    tensors: Any = {f"w{i}": torch.zeros(size) for i, size in enumerate(sizes)}
    asked = Terms(bucket_limit=limit).limited(Format(chosen, lambda _: True))
    plan = plan_buckets(extract_weights(tensors), asked.bucket_bytes, asked.packs)
    assert [spec.name for bucket in plan.buckets for spec in bucket.specs] == list(tensors)
    for bucket in plan.buckets:
        size = sum(spec.nbytes for spec in bucket.specs)
        assert len(bucket.specs) == 1 or size <= min(chosen, limit or chosen)
