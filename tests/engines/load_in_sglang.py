"""What SGLang's own model classes make of the names and values of a push; run by its Python.

    python load_in_sglang.py DIRECTORY [DIRECTORY ...]

Each directory holds a checkpoint's `config.json` and `push.safetensors`. The class of its
architecture is built on the CPU, all its floating parameters are made NaN, and the push is given
to its `load_weights`. A line of JSON is printed for each directory: the class (`kind`) and the
`names` that the server's digests have; `stale`, parameters that still
hold a NaN; `ignored`, names that change no parameter when they come alone; `error`, in words.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from pathlib import Path
from typing import Any

import torch


def build(directory: Path) -> Any:
    """The server's model, with whatever weights."""
    from sglang.benchmark import one_batch
    from sglang.srt.configs.model_config import ModelConfig
    from sglang.srt.model_executor.model_runner import ModelRunner
    from sglang.srt.server_args import PortArgs, prepare_server_args

    arguments = ["--model-path", str(directory), "--load-format", "dummy", "--device", "cpu"]
    arguments += ["--attention-backend", _attention(directory), "--sampling-backend", "pytorch"]
    arguments += ["--grammar-backend", "none", "--dtype", "float32", "--skip-tokenizer-init"]
    server_args = prepare_server_args(arguments)
    server_args.resolve_once()
    ports = PortArgs.init_new(server_args)
    rank = one_batch.spawn_world_rank(server_args, tp_rank=0, pp_rank=0)
    ranks = one_batch.SpawnRanks(world_rank=rank, gpu_id=0)
    one_batch.publish(server_args, role="scheduler", ranks=ranks)
    one_batch._init_process_global_configs()
    config = ModelConfig.from_server_args(server_args)
    one_batch.bootstrap.init_parallel_runtime(
        server_args=server_args, device="cpu", dist_port=ports.nccl_port
    )
    one_batch.bootstrap.init_layer_runtime(model_config=config)
    runner = ModelRunner(
        model_config=config,
        mem_fraction_static=0.1,
        gpu_id=0,
        nccl_port=ports.nccl_port,
        server_args=server_args,
    )
    return runner.model


def _attention(directory: Path) -> str:
    """A backend that its class consents to; nothing is computed with it."""
    kind = json.loads((directory / "config.json").read_text())["model_type"]
    return "triton" if kind == "gpt_oss" else "torch_native"


def check(directory: Path) -> dict[str, Any]:
    """What its `load_weights` does with the push."""
    from safetensors.torch import load_file

    model = build(directory)
    push = load_file(directory / "push.safetensors")
    _forget(model)
    model.load_weights(list(push.items()))
    stale = [name for name, nans in _nans(model).items() if nans]
    return {
        "kind": type(model).__name__,
        "names": _digested(model),
        "stale": stale,
        "ignored": [name for name in push if _ignored(model, name, push)],
    }


def _digested(model: Any) -> list[str]:
    """The names that the server's digests have."""
    from sglang.srt.utils.weight_checker import _is_skip_weight_check

    tensors = (*model.named_parameters(), *model.named_buffers())
    return [name for name, tensor in tensors if not _is_skip_weight_check(name, tensor)]


def _ignored(model: Any, name: str, push: dict[str, torch.Tensor]) -> bool:
    _forget(model)
    before = _nans(model)
    model.load_weights([(name, push[name])])
    return _nans(model) == before


@torch.no_grad()
def _forget(model: Any) -> None:
    for _, tensor in model.named_parameters():
        if tensor.is_floating_point():
            tensor.fill_(torch.nan)


def _nans(model: Any) -> dict[str, int]:
    return {
        name: int(tensor.isnan().sum())
        for name, tensor in model.named_parameters()
        if tensor.is_floating_point()
    }


def main(directories: list[str]) -> None:
    """Each directory in a process of its own, since an SGLang process holds one model."""
    sys.path.insert(0, str(Path(__file__).parents[2] / "scripts" / "engines" / "cpu"))
    import sgl_cpu_patches  # noqa: F401 - before sglang
    import sglang.benchmark.one_batch  # noqa: F401

    for directory in directories:
        sys.stdout.flush()
        child = os.fork()
        if child == 0:
            try:
                result = check(Path(directory))
            except BaseException as error:  # noqa: BLE001 - a finding, not a failure of this script
                traceback.print_exc()
                result = {"error": f"{type(error).__name__}: {error}"[:500]}
            print(f"RESULT {json.dumps({'directory': directory, **result})}", flush=True)
            os._exit(0)
        os.waitpid(child, 0)


if __name__ == "__main__":
    main(sys.argv[1:])
