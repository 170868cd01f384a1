"""The example of the vLLM rows, run as a reader would run it, on the session's server."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest

from .engine_server import REPOSITORY
from .vllm_server import VLLMServer

SECONDS = 300


@pytest.mark.parametrize(
    ("flags", "way"),
    [((), "by broadcast over gloo"), (("--colocated",), "by ipc over shared memory")],
    ids=["broadcast", "colocated"],
)
def test_the_server_learns_what_the_trainer_learns(
    vllm: VLLMServer, flags: tuple[str, ...], way: str
) -> None:
    script = str(REPOSITORY / "examples" / "refit_vllm.py")
    arguments = ("--server", vllm.url, "--model", str(vllm.model_dir), "--rounds", "4", *flags)
    ended = subprocess.run(
        [sys.executable, script, *arguments],
        env={**os.environ, "PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=False,
    )

    assert ended.returncode == 0, ended.stdout + ended.stderr
    before, *after = (int(count) for count in re.findall(r"\((\d) of 8 right\)", ended.stdout))
    assert after[-1] > before
    assert way in ended.stdout
    assert f"{vllm.url} new (version 4)" in ended.stdout
