"""Runs the tests in two processes side by side: those on real engines, and all others.

Either waits for most of its time, so that two cores serve both. The others are shown as they run
and those on engines afterwards; this fails if one of them does. Ctrl-C reaches both, and ends
this once both have put their servers away.
"""

from __future__ import annotations

import shutil
import signal
import subprocess
import sys
import tempfile
from typing import IO

ON_ENGINES = ("tests/engines", "-o", "cache_dir=.pytest_cache/engines")
OTHERS = ("--ignore=tests/engines",)


def start(arguments: tuple[str, ...], output: IO[bytes] | None = None) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "pytest", *arguments]
    return subprocess.Popen(command, stdout=output, stderr=output and subprocess.STDOUT)


def run() -> dict[str, int]:
    """The exit status of each."""
    with tempfile.TemporaryFile() as log, start(ON_ENGINES, log) as on_engines:
        with start(OTHERS) as others:
            others.wait()
        print("\n== the tests on real engines, shown when they have ended", flush=True)
        on_engines.wait()
        log.seek(0)
        shutil.copyfileobj(log, sys.stdout.buffer)
    return {"on real engines": on_engines.returncode, "all others": others.returncode}


def main() -> int:
    # A terminal interrupts all three at once: whoever waits here would leave both behind.
    signal.signal(signal.SIGINT, lambda *_: None)
    ended = run()
    for tests, status in ended.items():
        print(f"== {tests}: {f'FAILED (pytest ended with {status})' if status else 'passed'}")
    return int(any(ended.values()))


if __name__ == "__main__":
    sys.exit(main())
