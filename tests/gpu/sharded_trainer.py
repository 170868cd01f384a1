"""A rank of a trainer whose model FSDP2 shards over two GPUs; run by test_sharded.py.

python sharded_trainer.py RANK PORT URL
"""

from __future__ import annotations

import json
import os
import sys

import torch
from torch import distributed
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from weight_update import SGLangWeightSyncScheme


def main(rank: int, port: str, url: str) -> None:
    from models import uneven_llama

    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    torch.cuda.set_device(rank)
    distributed.init_process_group("nccl", rank=rank, world_size=2)
    mesh = init_device_mesh("cuda", (2,))
    model = uneven_llama(1).cuda()
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    scheme = SGLangWeightSyncScheme(url, device="cpu", bucket_bytes=50_000, timeout=60)
    served = []
    with scheme.create_sender() as sender:
        sender.register_model(model)
        for _ in range(3):
            # Right behind the kernels of a step: what is read must be what they write.
            ids = torch.randint(0, 65, (4, 16), device="cuda")
            model(input_ids=ids, labels=ids).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            report = sender.update_weights()
            proof = report.verification
            served.append([report.version, report.buckets, proof])
    whole = {name: value.full_tensor().cpu() for name, value in model.state_dict().items()}
    if rank == 0:
        torch.save(whole, os.environ["SAVED"])
    print(json.dumps(served), flush=True)
    distributed.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], sys.argv[3])
