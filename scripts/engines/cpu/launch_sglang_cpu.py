"""Start an SGLang HTTP server on a CPU.

    .engines/sglang-0.5.23/bin/python scripts/engines/cpu/launch_sglang_cpu.py \
        --model-path DIR --port N

Further arguments are SGLang's own and override the defaults below. With
`EXIT_ON_STDIN_EOF=1` in the environment the server dies when its standard input closes, so
that a parent holding the other end of a pipe cannot leave it behind, however it ends.
"""

import os
import signal
import sys
import threading

# At the top and outside the main guard: SGLang spawns its workers, and each of them imports
# this file again before it imports sglang.
import sgl_cpu_patches  # noqa: F401

CPU_ARGUMENTS = [
    *("--device", "cpu"),
    *("--host", "127.0.0.1"),
    *("--attention-backend", "torch_native"),
    *("--sampling-backend", "pytorch"),
    *("--grammar-backend", "none"),
    *("--dtype", "float32"),
    *("--max-total-tokens", "8192"),
    *("--max-running-requests", "16"),
    "--disable-overlap-schedule",
]


def _die_with_stdin() -> None:
    """Read standard input to its end, then kill this process; its workers follow it."""
    while os.read(0, 4096):
        pass
    os.kill(os.getpid(), signal.SIGKILL)


def main(arguments: list[str]) -> None:
    """Run the server until it is told to stop, and take its workers down with it."""
    if os.environ.get("EXIT_ON_STDIN_EOF") == "1":
        threading.Thread(target=_die_with_stdin, daemon=True).start()

    from sglang.launch_server import run_server
    from sglang.srt.server_args import prepare_server_args
    from sglang.srt.utils import kill_process_tree

    try:
        run_server(prepare_server_args(CPU_ARGUMENTS + arguments))
    finally:
        kill_process_tree(os.getpid(), include_parent=False)


if __name__ == "__main__":
    main(sys.argv[1:])
