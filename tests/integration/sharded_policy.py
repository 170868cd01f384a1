"""One rank of a trainer whose policy with adapters is sharded by FSDP2; pushes it twice.

python -m tests.integration.sharded_policy RANK RANKS PORT SEED URL...
"""

from __future__ import annotations

import sys

from torch import distributed
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from weight_update import SGLangWeightSyncScheme

from .adapter_server import policy


def main(rank: int, ranks: int, port: int, seed: int, urls: list[str]) -> None:
    """Push; what this rank got is printed."""
    place = f"tcp://127.0.0.1:{port}"
    distributed.init_process_group("gloo", init_method=place, rank=rank, world_size=ranks)
    model, mesh = policy(seed), init_device_mesh("cpu", (ranks,))
    for layer in model.get_base_model().model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    with SGLangWeightSyncScheme(urls, lora="adapter", timeout=120).create_sender() as sender:
        reports = [sender.update_weights(model) for _ in range(2)]
    print([(report.version, report.verification) for report in reports])
    distributed.destroy_process_group()


if __name__ == "__main__":
    main(*map(int, sys.argv[1:5]), sys.argv[5:])  # type: ignore[arg-type]
