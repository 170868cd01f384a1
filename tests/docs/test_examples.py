"""The examples and the tutorial run as a reader would run them."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from weight_update.reference_engine import ReferenceEngine

ROOT = Path(__file__).resolve().parents[2]


def run(script: str, *arguments: str) -> str:
    """What a script prints; fails with all of its output unless it ends well."""
    ended = subprocess.run(
        [sys.executable, str(ROOT / script), *arguments],
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=360,
        check=False,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended.stdout


def test_plain_pytorch_teaches_the_server_what_the_trainer_learns() -> None:
    printed = run("examples/plain_pytorch.py", "--steps", "40", "--push-every", "20")
    first, last = (float(loss) for loss in re.findall(r"loss (\S+)", printed))
    assert last < first
    right = [int(count) for count in re.findall(r"\((\d) of 8 right\)", printed)]
    assert len(right) == 3  # before any push, and after each
    assert right[-1] > right[0]
    assert re.search(r"http://\S+ new \(version 2\)", printed)


def checkpoint(directory: Path) -> str:
    """A tiny model like the one of the example, but with other weights."""
    torch.manual_seed(7)
    config = LlamaConfig(
        vocab_size=16,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=2,
        bos_token_id=None,
        eos_token_id=None,
    )
    LlamaForCausalLM(config).save_pretrained(directory)
    return str(directory)


def test_plain_pytorch_pushes_to_several_servers_that_run_already(tmp_path: Path) -> None:
    model = checkpoint(tmp_path)
    with ReferenceEngine(model, wait=False) as left, ReferenceEngine(model, wait=False) as right:
        servers = ["--server", left.url, "--server", right.url]
        steps = ["--steps", "2", "--push-every", "1"]
        printed = run("examples/plain_pytorch.py", *servers, "--model", model, *steps)
        for url in (left.url, right.url):
            assert f"{url} new (version 2)" in printed


def test_weights_get_to_a_colocated_server_through_shared_memory() -> None:
    printed = run("examples/colocated.py")
    before, after = re.findall(r"the engine generates (\[.*\])", printed)
    assert before != after
    assert "by ipc over shared memory" in printed
    assert re.search(r"http://\S+ new \(version 3\)", printed)


def test_a_checkpoint_is_pushed_from_the_command_line() -> None:
    printed = run("examples/push_from_the_command_line.py")
    before, after = re.findall(r"the server generates (\[.*\])", printed)
    assert before != after
    assert "an update would work, as far as that can be known" in printed
    assert re.search(r"http://\S+ new \(version 1\)", printed)


def test_the_reward_of_the_grpo_loop_rises() -> None:
    printed = run("examples/torchrl_grpo_loop.py", "--steps", "12")
    ends = re.search(r"reward: first (\S+), last (\S+)", printed)
    assert ends, printed
    assert float(ends[2]) > float(ends[1]) + 0.2
    assert re.findall(r"lag (\d+)", printed) == ["0"] * 12
    assert "updates counted by the collector: 12 of 12" in printed


def test_the_tutorial_keeps_its_promises() -> None:
    printed = run("tutorials/push_a_model_into_a_live_server.py")
    assert re.search(r"http://\S+ mixed \(version unknown, paused\)", printed)
    assert "Skipping the SGLang radix-cache flush" in printed
