"""Adapters over sharded weights: every rank merges the whole weight, layer by layer."""

from __future__ import annotations

import datetime
import os
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from torch import distributed, multiprocessing, nn
from torch.distributed import device_mesh, fsdp

from weight_update.weights.extract import extract_weights

RANKS = 2
KINDS: dict[str, dict[str, Any]] = {
    "LoRA": {"target_modules": ["up", "down", "words"]},
    "DoRA": {"target_modules": ["up", "down"], "use_dora": True},
    "by PEFT": {"target_modules": ["words"], "use_dora": True},
    "tokens": {"target_modules": ["up"], "trainable_token_indices": [1, 4]},
}


class Net(nn.Module):
    """Rows that two ranks cannot share evenly."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.up, self.down = nn.Embedding(7, 5), nn.Linear(5, 9), nn.Linear(9, 3)
        self.config = {"model_type": "custom"}

    def get_input_embeddings(self) -> nn.Module:
        return self.words

    def forward(self, given: torch.Tensor) -> torch.Tensor:
        return self.down(self.up(self.words(given)))


def adapted(kind: str) -> Any:
    torch.manual_seed(0)
    model = peft.get_peft_model(Net(), peft.LoraConfig(r=2, **KINDS[kind]))
    for parameter in model.parameters():
        if parameter.requires_grad:
            nn.init.normal_(parameter, std=0.3)
    return model.to(torch.bfloat16)


def payload(model: nn.Module) -> dict[str, torch.Tensor]:
    return {weight.spec.name: weight.read() for weight in extract_weights(model)}


def compare(rank: int, store: str) -> None:
    timeout = datetime.timedelta(seconds=60)
    store = distributed.FileStore(store, RANKS)
    distributed.init_process_group(
        "gloo", store=store, rank=rank, world_size=RANKS, timeout=timeout
    )
    mesh = device_mesh.init_device_mesh("cpu", (RANKS,))
    for kind in KINDS:
        expected, model = payload(adapted(kind)), adapted(kind)
        fsdp.fully_shard(model, mesh=mesh)
        before = [p.to_local().clone() for p in model.parameters()]
        weights = extract_weights(model)
        assert all(weight.collective for weight in weights), kind
        sent = {weight.spec.name: weight.read() for weight in weights}
        assert list(sent) == list(expected), kind
        for name, value in expected.items():
            assert torch.equal(sent[name], value), (kind, name)
        after = [p.to_local() for p in model.parameters()]
        assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True)), kind
    # A gloo thread may let go of its last tensor after Python's end and would abort the process
    # (pytorch issue 190489); FSDP's caches keep such threads beyond destroy_process_group().
    os._exit(0)


@pytest.mark.timeout(120)
def test_every_rank_of_a_sharded_trainer_reads_what_one_process_would(tmp_path: Path) -> None:
    multiprocessing.spawn(compare, (str(tmp_path / "store"),), nprocs=RANKS)
