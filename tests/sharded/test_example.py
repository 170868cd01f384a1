"""The example of a sharded trainer runs as a reader would run it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_two_ranks_push_what_they_train_into_a_live_server() -> None:
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    ended = subprocess.run(
        [*launcher, "--nproc-per-node", "2", str(ROOT / "examples" / "fsdp2.py")],
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    for rank in (0, 1):
        found = re.findall(rf"rank {rank}: step \d+ loss \S+, version (\d)", ended.stdout)
        assert found == ["1", "2"]
    before, after = re.findall(r"the server goes on after .*: (\[.*\])", ended.stdout)
    assert before != after
