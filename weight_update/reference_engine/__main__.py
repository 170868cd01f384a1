"""The command line: ``python -m weight_update.reference_engine --model DIR``."""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import os
import socket
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from weight_update.reference_engine.faults import Fault, FaultBoard
from weight_update.reference_engine.launcher import ADMIN_KEY_VARIABLE, KEY_VARIABLE, MISSING_EXTRA
from weight_update.reference_engine.releases import Release, release_named

_SWITCH_SECONDS = 2e-4

_DESCRIPTION = """\
Serve a small Llama or Qwen2 model behind SGLang's weight-update protocol.

It generates greedily or by sampling, keeps a prefix cache, honours the pause modes, and
takes new weights over a real process group. It is a stand-in for tests and tutorials,
not an inference engine: see README.md beside this module for what it does not do.
"""

_EPILOG = """\
a first round trip:
  python -m weight_update.reference_engine --model ./tiny-llama --port 30000
  curl -s localhost:30000/generate -H 'Content-Type: application/json' \\
    -d '{"input_ids": [1, 2, 3], "sampling_params": {"max_new_tokens": 8, "temperature": 0}}'

one update, as a trainer sends it:
  POST /init_weights_update_group        the trainer joins as rank 0 meanwhile, backend gloo
  POST /pause_generation                 {"mode": "retract"}
  POST /begin_weight_update              {}
  POST /update_weights_from_distributed  the trainer broadcasts meanwhile
  POST /end_weight_update                {}
  POST /flush_cache
  POST /update_weight_version            {"new_version": "1", "abort_all_requests": false}
  POST /continue_generation              {}

misbehaviour on demand:
  --fault '{"path": "/update_weights_from_distributed", "kind": "hang", "times": 1}'
  or POST the same JSON to /_reference/faults of a running engine, and DELETE to clear;
  GET /_reference/requests shows what was asked and when.
"""


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    result = argparse.ArgumentParser(
        prog="python -m weight_update.reference_engine",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = result.add_argument
    add("--model", required=True, metavar="DIR", help="directory that save_pretrained wrote")
    add("--host", default="127.0.0.1", help="address to listen on (default: %(default)s)")
    add("--port", type=int, default=0, help="port to listen on; 0 picks a free one")
    add("--release", type=_release, default="0.5.23", help="SGLang release to stand for")
    add("--dtype", default="float32", help="torch dtype of the weights (default: %(default)s)")
    add("--device", default="cpu", help="cpu or cuda:N (default: %(default)s)")
    add(
        "--load-format",
        choices=("auto", "dummy"),
        default="auto",
        help="dummy: arbitrary weights; of the model's directory, config.json is enough",
    )
    add("--shapes", type=Path, help="JSON of shapes by name: holds these, and generates nothing")
    add(
        "--tp",
        type=int,
        default=1,
        choices=range(1, 9),
        metavar="N",
        help="tensor parallel ranks, each a process (default: %(default)s)",
    )
    key, admin = (os.environ.get(name) or None for name in (KEY_VARIABLE, ADMIN_KEY_VARIABLE))
    add("--api-key", default=key, help=f"bearer token of all routes (or {KEY_VARIABLE})")
    add("--admin-api-key", default=admin, help=f"of control routes (or {ADMIN_KEY_VARIABLE})")
    add("--fault", action="append", default=[], type=_fault, help="a fault as JSON; repeatable")
    _add_tuning(add)
    return result


def _add_tuning(add: Callable[..., Any]) -> None:
    add(
        "--group-timeout",
        type=float,
        default=1800.0,
        help="seconds a rendezvous or broadcast waits",
    )
    add("--health-timeout", type=float, default=2.0, help="seconds before /health says 503")
    add("--max-running-requests", type=int, default=64, help="size of the running batch")
    add("--prefix-cache-entries", type=int, default=128, help="0 turns the prefix cache off")
    add("--answer-delay", type=float, default=0.0, help="seconds by which answers leave later")
    add("--threads", type=int, default=1, help="torch threads (default: %(default)s)")
    add("--memory-saver", type=int, default=0, help="1: memory that is released is really gone")
    add("--fuses", type=int, default=0, help="1: lose fused weights that come in parts")
    add("--shows", type=json.loads, default={}, help="JSON that /server_info shows besides")
    add("--request-log", type=Path, help="file that gets one JSON line an event")
    add("--ready-fd", type=int, help=argparse.SUPPRESS)
    add("--parent-pid", type=int, help=argparse.SUPPRESS)
    add("--tp-rank", type=int, default=0, help=argparse.SUPPRESS)
    add("--tp-port", type=int, help=argparse.SUPPRESS)


def _release(name: str) -> Release:
    try:
        return release_named(name)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def _fault(text: str) -> Fault:
    try:
        return Fault.from_dict(json.loads(text))
    except (ValueError, TypeError, AttributeError) as error:
        raise argparse.ArgumentTypeError(f"not a fault: {error}") from error


def main() -> None:
    """Run the server until it is told to stop."""
    arguments = parser().parse_args()
    if not (Path(arguments.model) / "config.json").is_file():
        parser().error(f"--model: {arguments.model} is not a saved model: it has no config.json")
    logging.basicConfig(level=logging.INFO, format="[%(asctime)s] %(name)s: %(message)s")
    if arguments.parent_pid is not None:
        threading.Thread(target=_follow, args=(arguments.parent_pid,), daemon=True).start()
    if arguments.tp_rank:
        _scheduler(arguments).run()
    try:
        listener = _bind(arguments.host, arguments.port)
    except OSError as error:
        sys.exit(f"cannot listen on {arguments.host}, port {arguments.port}: {error}")
    application = _application(arguments, listener.getsockname()[1])
    # A real server's scheduler is a process of its own: here neither thread lets the other wait.
    sys.setswitchinterval(_SWITCH_SECONDS)
    with suppress(KeyboardInterrupt), asyncio.Runner(loop_factory=_loop_factory()) as runner:
        runner.run(_serve(application, listener, arguments.ready_fd))
    # The scheduler may sit in a broadcast that never ends; nothing here is worth waiting for.
    os._exit(0)


def _follow(parent: int) -> None:
    """End this process when its parent is gone."""
    while os.getppid() == parent:
        time.sleep(0.5)
    os._exit(1)


def _bind(host: str, port: int) -> socket.socket:
    """Take the port now, so that nobody else can; connections are refused until it listens."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # asyncio turns Nagle's algorithm off only for sockets that name their protocol; with it
    # on, every answer waits 40 ms for the client's delayed acknowledgement.
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.bind((host, port))
    return listener


def _application(arguments: argparse.Namespace, port: int) -> Any:
    """Load the model, start the scheduler and return the ASGI application."""
    scheduler = _scheduler(arguments)
    from weight_update.reference_engine.edge import Keys, RequestLog
    from weight_update.reference_engine.server import Server

    info = _info(arguments, port, scheduler.model_config)
    server = Server(scheduler, info, FaultBoard(arguments.fault), RequestLog(arguments.request_log))
    scheduler.start()
    keys = Keys(arguments.api_key, arguments.admin_api_key)
    return server.application(keys, arguments.answer_delay)


def _scheduler(arguments: argparse.Namespace) -> Any:
    """Return this rank's scheduler; ends the process if its model cannot be loaded."""
    try:
        return _new_scheduler(arguments)
    except ImportError as error:
        sys.exit(f"{error}. {MISSING_EXTRA}")
    except (AttributeError, AssertionError, RuntimeError, ValueError) as error:
        sys.exit(
            f"the model could not be loaded as told (--model, --dtype, --device, --tp): {error}"
        )


def _new_scheduler(arguments: argparse.Namespace) -> Any:
    import torch

    from weight_update.reference_engine.fusing import FusingWeights
    from weight_update.reference_engine.generation import Generator, PrefixCache
    from weight_update.reference_engine.ranks import Ranks, find_leader, start_others
    from weight_update.reference_engine.scheduler import Scheduler
    from weight_update.reference_engine.shards import Shard
    from weight_update.reference_engine.weights import Weights, load_model

    torch.set_num_threads(arguments.threads)
    rank, size, store = arguments.tp_rank, arguments.tp, None
    if size > 1:  # the others load their shards meanwhile
        store = find_leader(size, arguments.tp_port) if rank else start_others(size, sys.argv[1:])
    device = torch.device(arguments.device)
    if device.type != "cpu":
        device = torch.device(device.type, (device.index or 0) + rank)
    kind = FusingWeights if arguments.fuses else Weights
    shard = Shard(rank, size)
    loaded = load_model(
        Path(arguments.model),
        arguments.dtype,
        device,
        shard,
        kind,
        dummy=arguments.load_format == "dummy",
        bag=arguments.shapes,
    )
    return Scheduler(
        loaded,
        Generator(loaded.model, PrefixCache(arguments.prefix_cache_entries)),
        arguments.release,
        Ranks(rank, size, store),
        group_timeout=arguments.group_timeout,
        max_running=arguments.max_running_requests,
        memory_saver=bool(arguments.memory_saver),
    )


def _info(arguments: argparse.Namespace, port: int, config: Any) -> Any:
    from weight_update.reference_engine.front import ServerInfo, start_arguments
    from weight_update.reference_engine.sampling import Limits

    release = arguments.release
    eos = getattr(config, "eos_token_id", None)
    stops = eos if isinstance(eos, list) else [] if eos is None else [eos]
    shown = ["host", "dtype", "device", "load_format", "max_running_requests"]
    shown += ["api_key", "admin_api_key"]
    options = {name: getattr(arguments, name) for name in shown}
    context = 0 if arguments.shapes else config.max_position_embeddings
    options |= {
        "tp_size": arguments.tp,
        "model_path": arguments.model,
        "served_model_name": arguments.model,
        "port": port,
        "enable_memory_saver": bool(arguments.memory_saver),
    }
    return ServerInfo(
        release=release,
        arguments=start_arguments(options, release) | arguments.shows,
        model={"model_type": config.model_type, "architectures": config.architectures},
        limits=Limits(config.vocab_size, context, frozenset(stops)),
        tokenizer=_tokenizer(Path(arguments.model)),
        health_timeout=arguments.health_timeout,
    )


def _tokenizer(path: Path) -> Any:
    if not (path / "tokenizer_config.json").exists():
        return None
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(path, local_files_only=True)


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    """The loop that real servers run on, where it is installed."""
    try:
        from uvloop import new_event_loop  # type: ignore[import-not-found]
    except ImportError:
        return None
    factory: Callable[[], asyncio.AbstractEventLoop] = new_event_loop
    return factory


async def _serve(application: Any, listener: socket.socket, ready_fd: int | None) -> None:
    import uvicorn

    class Server(uvicorn.Server):
        async def startup(self, sockets: list[socket.socket] | None = None) -> None:
            await super().startup(sockets)
            _report(listener, ready_fd)

    config = uvicorn.Config(
        application, lifespan="off", log_level="warning", timeout_graceful_shutdown=1
    )
    await Server(config).serve(sockets=[listener])


def _report(listener: socket.socket, ready_fd: int | None) -> None:
    """Say where the server listens: to the parent's pipe, or to whoever reads the log."""
    host, port = listener.getsockname()[:2]
    if ready_fd is None:
        print(f"listening on http://{f'[{host}]' if ':' in host else host}:{port}", flush=True)
        return
    os.write(ready_fd, f"{port}\n".encode())
    os.close(ready_fd)


if __name__ == "__main__":
    main()
