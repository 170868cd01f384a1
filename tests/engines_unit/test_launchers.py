"""A server started by a launcher does not outlive whoever holds its standard input."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

LAUNCHERS = Path(__file__).resolve().parents[2] / "scripts" / "engines" / "cpu"
SERVER = """
import subprocess, sys, time
from die_with_stdin import die_with_stdin
die_with_stdin()
subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], stdin=subprocess.DEVNULL)
print("started", flush=True)
time.sleep(600)
"""


def test_when_its_input_closes_the_server_and_its_workers_die() -> None:
    server = subprocess.Popen(
        [sys.executable, "-c", SERVER],
        env={**os.environ, "PYTHONPATH": str(LAUNCHERS), "EXIT_ON_STDIN_EOF": "1"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        start_new_session=True,
    )
    try:
        assert server.stdin is not None
        assert server.stdout is not None
        assert server.stdout.readline() == b"started\n"
        # Closes the input, and reads until nobody holds the output any more.
        server.communicate(timeout=120)
        assert server.returncode == -signal.SIGKILL
    finally:
        if server.poll() is None:
            os.killpg(server.pid, signal.SIGKILL)
            server.wait()
