"""Two GPUs of a trainer in one NCCL group with an engine on a third.

Run it where three GPUs are: ``pytest tests/gpu``. Elsewhere it is skipped.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.gpu.models import PROMPT, uneven_llama
from weight_update.ports import free_port
from weight_update.reference_engine import ReferenceEngine

pytestmark = pytest.mark.skipif(torch.cuda.device_count() < 3, reason="needs three GPUs")

SCRIPT = Path(__file__).with_name("node_trainer.py")
RANKS = 2


def test_two_gpus_of_a_trainer_send_to_a_third_through_one_communicator() -> None:
    with ReferenceEngine(uneven_llama(0), device="cuda:2") as engine:
        port = str(free_port())
        ranks = [
            subprocess.Popen(
                [sys.executable, str(SCRIPT), str(rank), str(RANKS), port, engine.url],
                stdout=subprocess.PIPE,
                text=True,
            )
            for rank in range(RANKS)
        ]
        told = [rank.communicate(timeout=180)[0] for rank in ranks]
        assert [rank.returncode for rank in ranks] == [0] * RANKS
        first, second = (json.loads(text.splitlines()[-1]) for text in told)
        assert first == second
        assert first == [[version, "nccl", "checksum"] for version in (1, 2, 3)]
        ids = torch.tensor([PROMPT], device="cuda:0")
        wanted = (
            uneven_llama(3)
            .cuda(0)
            .generate(ids, max_new_tokens=12, do_sample=False, eos_token_id=None)
        )
        served = engine.generate(PROMPT, max_new_tokens=12)["output_ids"]
    assert served == [int(token) for token in wanted[0, len(PROMPT) :]]
