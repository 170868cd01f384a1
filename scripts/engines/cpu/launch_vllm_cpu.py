"""Start a vLLM HTTP server on a CPU, with the routes that change weights.

    .engines/vllm-0.32.0/bin/python scripts/engines/cpu/launch_vllm_cpu.py \
        --model DIR --port N

Further arguments are vLLM's own and override the defaults below, and so do variables of the
environment. With `EXIT_ON_STDIN_EOF=1` in the environment the server dies when its standard
input closes.
"""

import os
import runpy
import sys

from die_with_stdin import die_with_stdin

CPU_ARGUMENTS = [
    *("--host", "127.0.0.1"),
    *("--dtype", "float32"),
    *("--max-model-len", "8192"),
    *("--max-num-seqs", "16"),
    "--enforce-eager",
]
ENVIRONMENT = {
    "VLLM_SERVER_DEV_MODE": "1",  # without it, no route that changes weights exists
    "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB; by default it reserves most of the memory
    # On busy cores, threads that wait for each other cost a tiny model far more than they give.
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    "GLOO_SOCKET_IFNAME": "lo",
}


def main(arguments: list[str]) -> None:
    """Run the server until it is told to stop."""
    die_with_stdin()
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    sys.argv = [sys.argv[0], *CPU_ARGUMENTS, *arguments]
    serve()


def serve() -> None:
    """Do what vLLM's own script does with the command line.

    The script itself asks for the version of a package called vllm, which the CPU build's name
    breaks.
    """
    try:
        from vllm.entrypoints.launchers.api_server.entry import main as entry
    except ModuleNotFoundError:  # 0.27 has this instead
        runpy.run_module("vllm.entrypoints.openai.api_server", run_name="__main__")
    else:
        entry()


if __name__ == "__main__":
    main(sys.argv[1:])
