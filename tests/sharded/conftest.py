"""Engines, and ranks that run their suites once for the folder."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from weight_update.reference_engine import ReferenceEngine

# Scripts, and what they import.
collect_ignore = ["colocated_ranks.py", "node_ranks.py", "ranks.py", "trainers.py"]
HERE = Path(__file__).parent
PATIENCE = 240.0

Results = dict[str, dict[int, Any]]
"""What each scenario returned, by rank."""


def engine_model(*, tied: bool) -> LlamaForCausalLM:
    """Sizes as in ``trainers.py``, which the ranks import and pytest does not."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=65,
        hidden_size=32,
        intermediate_size=70,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=tied,
    )
    return LlamaForCausalLM(config)


@pytest.fixture(scope="session")
def run_suite(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], Results]]:
    """Runs a suite of ``ranks.py`` the first time it is asked for."""
    with (
        ReferenceEngine(engine_model(tied=False), wait=False) as engine,
        ReferenceEngine(engine_model(tied=True), wait=False) as tied_engine,
        suites_of("ranks.py", tmp_path_factory, engine.url, tied_engine.url) as run,
    ):
        yield run


@pytest.fixture(scope="session")
def run_node_suite(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], Results]]:
    """Runs a suite of ``node_ranks.py`` the first time it is asked for."""
    with (
        ReferenceEngine(engine_model(tied=False), wait=False) as first,
        ReferenceEngine(engine_model(tied=False), wait=False) as second,
        suites_of("node_ranks.py", tmp_path_factory, first.url, second.url) as run,
    ):
        yield run


@contextmanager
def suites_of(
    script: str, homes: pytest.TempPathFactory, url: str, other_url: str
) -> Iterator[Callable[[str], Results]]:
    done: dict[str, Results] = {}
    host = subprocess.Popen(
        [sys.executable, str(HERE / script)],
        stdin=subprocess.PIPE,
        env={**os.environ, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"},
        text=True,
    )

    def run(suite: str) -> Results:
        if suite not in done:
            home = homes.mktemp(suite)
            asked = {"suite": suite, "home": str(home), "url": url, "other_url": other_url}
            assert host.stdin is not None
            host.stdin.write(json.dumps(asked) + "\n")
            host.stdin.flush()
            done[suite] = collected(home)
        return done[suite]

    try:
        yield run
        assert host.stdin is not None
        host.stdin.close()
        host.wait(30)
    finally:
        host.kill()


def collected(home: Path) -> Results:
    deadline = time.monotonic() + PATIENCE
    while not (home / "done").exists():
        assert time.monotonic() < deadline, "the ranks did not come to an end"
        time.sleep(0.05)
    traces = [path.read_text() for path in home.glob("*.trace")]
    assert not traces, "\n".join(traces)
    found: Results = {}
    for path in home.glob("*.json"):
        scenario, rank, _ = path.name.split(".")
        found.setdefault(scenario, {})[int(rank)] = json.loads(path.read_text())
    return found
