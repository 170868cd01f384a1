"""The rows about the names of a mixture of experts, on a small one."""

from __future__ import annotations

import pytest
import torch
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from weight_update.bench.weights import names


def small() -> Qwen3MoeForCausalLM:
    with torch.device("meta"):
        return Qwen3MoeForCausalLM(Qwen3MoeConfig(num_hidden_layers=2, num_experts=4))


def test_plan_and_unchanged_model_are_timed_stacked_and_one_by_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(names, "deepseek_v3", small)

    rows = list(names.names_rows(3, {"machine": "here"}))

    tensors = 2 * (3 * 4 + 9) + 3
    assert [row.job for row in rows] == [
        f"planning {tensors} names of DeepSeek-V3",
        f"{tensors} names of DeepSeek-V3 unchanged, experts stacked",
        f"{tensors} names of DeepSeek-V3 unchanged",
    ]
    assert all(len(row.pairs) == 3 for row in rows)
    assert [row.aim for row in rows] == [1.0, 1.3, 1.3]
    assert rows[0].identity["machine"] == "here"
    assert rows[0].identity["settings"]["tensors"] == tensors
