"""The example of GRPO, run as a reader would run it, on the session's server."""

from __future__ import annotations

import os
import re
import subprocess
import sys

from .engine_server import REPOSITORY
from .models import TinyModels
from .sglang_server import SGLangServer

SECONDS = 400
STEP = re.compile(r"lag (\d)  mixed (\d+) of 64  ess (\S+)  version (\d+)")


def test_samples_of_the_server_are_the_trainers_policy_and_follow_its_pushes(
    sglang_at_a: SGLangServer, tiny_models: TinyModels
) -> None:
    script = str(REPOSITORY / "examples" / "grpo_sglang.py")
    served = ("--server", sglang_at_a.url, "--model", str(tiny_models.a))
    ended = subprocess.run(
        [sys.executable, script, *served, "--steps", "3", "--expect-rise", "-1"],
        env={**os.environ, "PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=False,
    )

    assert ended.returncode == 0, ended.stdout + ended.stderr
    lags, mixed, sizes, versions = zip(*STEP.findall(ended.stdout), strict=True)
    assert (lags[0], mixed[0], sizes[0]) == ("0", "0", "1.000")
    assert set(lags) <= {"0", "1"}
    first = int(versions[0])  # earlier tests have pushed to this server
    assert [int(version) for version in versions] == [first, first + 1, first + 2]
    assert sglang_at_a.label() == str(first + 3)
