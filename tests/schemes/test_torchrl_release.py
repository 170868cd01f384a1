"""That the tests run on the TorchRL that they were asked to run on (make test-torchrl)."""

from __future__ import annotations

import importlib.metadata
import os
import subprocess
import sys

import pytest

VARIABLE = "WEIGHT_UPDATE_TORCHRL"


def test_the_torchrl_that_was_asked_for_is_the_one_that_is_imported() -> None:
    wanted = os.environ.get(VARIABLE)
    if not wanted:
        pytest.skip(f"{VARIABLE} is not set: any release will do")

    # In a process of its own, as workers import it.
    shown = subprocess.run(
        [sys.executable, "-c", "import torchrl; print(torchrl.__version__)"],
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )

    assert shown.stdout.split()[-1] == wanted == importlib.metadata.version("torchrl")
