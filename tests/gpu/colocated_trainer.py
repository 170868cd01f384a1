"""A rank of a trainer on two GPUs, which an engine runs on too; for test_synchronizer_colocated.py.

python colocated_trainer.py RANK PORT URL
"""

from __future__ import annotations

import json
import os
import sys

import torch
from torch import distributed
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from weight_update.synchronizers import SGLangGeneration, TorchPolicy, create_weight_synchronizer

SYNCS = 3


def main(rank: int, port: str, url: str) -> None:
    from models import llama

    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    torch.cuda.set_device(rank)
    distributed.init_process_group("nccl", rank=rank, world_size=2)
    mesh = init_device_mesh("cuda", (2,))
    model = llama(1).cuda()
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    generation = SGLangGeneration(url, timeout=60.0, bucket_bytes=50_000)
    sync = create_weight_synchronizer(TorchPolicy(model, optimizer), generation, "sglang", True)
    told = []
    for _ in range(SYNCS):
        ids = torch.randint(0, 64, (4, 16), device="cuda")
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        sync.sync_weights()
        told.append([sync.report.version, sync.report.route.backend, sync.report.verification])
    sync.shutdown()
    whole = {name: value.full_tensor().cpu() for name, value in model.state_dict().items()}
    if rank == 0:
        torch.save(whole, os.environ["SAVED"])
    print(json.dumps(told), flush=True)
    distributed.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], sys.argv[3])
