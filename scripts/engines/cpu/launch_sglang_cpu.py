"""Start an SGLang HTTP server on a CPU.

    .engines/sglang-0.5.23/bin/python scripts/engines/cpu/launch_sglang_cpu.py \
        --model-path DIR --port N

Further arguments are SGLang's own and override the defaults below. With
`EXIT_ON_STDIN_EOF=1` in the environment the server dies when its standard input closes.
"""

import multiprocessing
import os
import sys

# At the top and outside the main guard: SGLang spawns its workers, and each of them imports
# this file again before it imports sglang.
import sgl_cpu_patches  # noqa: F401
from die_with_stdin import die_with_stdin

CPU_ARGUMENTS = [
    *("--device", "cpu"),
    *("--host", "127.0.0.1"),
    *("--attention-backend", "torch_native"),
    *("--sampling-backend", "pytorch"),
    *("--grammar-backend", "none"),
    *("--dtype", "float32"),
    *("--max-total-tokens", "32768"),
    *("--max-running-requests", "16"),
    "--disable-overlap-schedule",
    "--sleep-on-idle",  # an idle scheduler takes a whole core otherwise
]


def main(arguments: list[str]) -> None:
    """Run the server until it is told to stop, and take its workers down with it."""
    die_with_stdin()
    fork_workers()

    from sglang.launch_server import run_server
    from sglang.srt.server_args import prepare_server_args
    from sglang.srt.utils import kill_process_tree

    try:
        run_server(prepare_server_args(CPU_ARGUMENTS + arguments))
    finally:
        kill_process_tree(os.getpid(), include_parent=False)


def fork_workers() -> None:
    """Have SGLang's workers begin with what is imported here, whatever it asks for.

    A start is little else than imports, which spawned workers would each do again.
    """
    multiprocessing.set_start_method("fork")
    multiprocessing.set_start_method = lambda *_, **__: None  # type: ignore[method-assign]


if __name__ == "__main__":
    main(sys.argv[1:])
