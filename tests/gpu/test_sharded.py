"""A trainer that FSDP2 shards over two GPUs with NCCL, pushing to an engine on the CPU.

Run it where two GPUs are: ``pytest tests/gpu``. Elsewhere it is skipped.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.gpu.models import PROMPT, uneven_llama
from weight_update.ports import free_port
from weight_update.reference_engine import ReferenceEngine

pytestmark = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")

SCRIPT = Path(__file__).with_name("sharded_trainer.py")


def test_two_gpus_push_a_sharded_model_after_each_step(tmp_path: Path) -> None:
    saved = tmp_path / "whole.pt"
    with ReferenceEngine(uneven_llama(0)) as engine:
        port = str(free_port())
        environment = os.environ | {"SAVED": str(saved)}
        ranks = [
            subprocess.Popen(
                [sys.executable, str(SCRIPT), str(rank), port, engine.url],
                env=environment,
                stdout=subprocess.PIPE,
                text=True,
            )
            for rank in range(2)
        ]
        told = [rank.communicate(timeout=120)[0] for rank in ranks]
        assert [rank.returncode for rank in ranks] == [0, 0]
        first, second = (json.loads(text.splitlines()[-1]) for text in told)
        assert first == second
        assert [version for version, *_ in first] == [1, 2, 3]
        assert {proof for *_, proof in first} == {"checksum"}
        model = uneven_llama(1)
        model.load_state_dict(torch.load(saved, weights_only=True))
        ids = torch.tensor([PROMPT])
        wanted = model.generate(ids, max_new_tokens=12, do_sample=False, eos_token_id=None)
        served = engine.generate(PROMPT, max_new_tokens=12)["output_ids"]
    assert served == [int(token) for token in wanted[0, len(PROMPT) :]]
