"""Ties a server to its parent: it dies when the pipe on its standard input closes."""

import os
import signal
import threading


def die_with_stdin() -> None:
    """Watch standard input from a thread, if `EXIT_ON_STDIN_EOF=1` asks for it.

    A parent that holds the other end of the pipe cannot leave the server behind, however it
    ends.
    """
    if os.environ.get("EXIT_ON_STDIN_EOF") == "1":
        threading.Thread(target=_wait_and_kill, daemon=True).start()


def _wait_and_kill() -> None:
    """Kill this process at the end of its input, and its workers if it leads a group of them."""
    while os.read(0, 4096):
        pass
    if os.getpgrp() == os.getpid():
        os.killpg(0, signal.SIGKILL)
    os.kill(os.getpid(), signal.SIGKILL)
