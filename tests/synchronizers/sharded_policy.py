"""One rank of a trainer that FSDP2 shards over two; brings its weights to engines, twice.

python -m tests.synchronizers.sharded_policy RANK PORT URL...
"""

from __future__ import annotations

import sys

from torch import distributed
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from tests.integration import kit
from weight_update.synchronizers import SGLangGeneration, TorchPolicy, create_weight_synchronizer


def main(rank: int, port: int, urls: list[str]) -> None:
    """Print the version and what the policy says of itself; the same on both ranks."""
    place = f"tcp://127.0.0.1:{port}"
    distributed.init_process_group("gloo", init_method=place, rank=rank, world_size=2)
    model, mesh = kit.llama(1), init_device_mesh("cpu", (2,))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    policy = TorchPolicy(fully_shard(model, mesh=mesh))
    generation = SGLangGeneration(urls, needs_offload=True)
    sync = create_weight_synchronizer(
        policy, generation, "sglang", colocated=False, refit_timeout_s=120
    )
    sync.init_communicator()
    for _ in range(2):
        generation.finish_generation()
        told = sync.sync_weights() or {}
        assert not sync.is_stale
    info = policy.prepare_refit_info() or {}
    assert policy.get_free_memory_bytes() > 0
    print(int(told["version"]), sorted((name, shape) for name, (shape, _) in info.items()))
    distributed.barrier()
    sync.shutdown()
    distributed.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3:])
