"""``make test`` runs pytest twice side by side, and shows how both ended.

Pins: Ctrl-C ended the script alone, and left both to end their servers unseen.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "scripts" / "tests.py"

# Stands in for pytest: says which half it is, and ends as told or as an interrupt ends it.
PYTEST = """
import os, signal, sys, time
half = "others" if "--ignore=tests/engines" in sys.argv else "engines"

def end(*_):
    time.sleep(0.5)
    print(half, "put away", flush=True)
    os._exit(2)

signal.signal(signal.SIGINT, end)
open(f"{half}.runs", "w").close()
while os.environ["ENDS"] == "never":
    time.sleep(0.05)
print(half, "ran", flush=True)
sys.exit(half == os.environ["ENDS"])
"""


def script(home: Path, ends: str) -> subprocess.Popen[str]:
    (home / "pytest.py").write_text(PYTEST)
    return subprocess.Popen(
        [sys.executable, str(SCRIPT)],
        cwd=home,
        env={**os.environ, "ENDS": ends},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


@pytest.mark.parametrize("fails", ["engines", "others", "neither"])
def test_it_fails_if_one_of_both_does_and_shows_the_engines_last(
    fails: str, tmp_path: Path
) -> None:
    with script(tmp_path, fails) as running:
        shown = running.communicate(timeout=60)[0]
    assert running.returncode == (fails != "neither")
    assert shown.index("others ran") < shown.index("engines ran")
    assert shown.count("FAILED (pytest ended with 1)") == (fails != "neither")


def test_an_interrupt_waits_for_both_and_shows_both(tmp_path: Path) -> None:
    with script(tmp_path, "never") as running:
        while not all((tmp_path / f"{half}.runs").exists() for half in ("engines", "others")):
            assert running.poll() is None
            time.sleep(0.05)
        os.killpg(running.pid, signal.SIGINT)
        shown = running.communicate(timeout=60)[0]
    assert running.returncode == 1
    assert "others put away" in shown
    assert "engines put away" in shown
    assert "Traceback" not in shown
