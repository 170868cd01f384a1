"""A rank of a trainer on several GPUs, all of which join the group; run as a script.

Usage: node_trainer.py RANK RANKS PORT URL
"""

from __future__ import annotations

import json
import sys

import torch
from torch import distributed

from weight_update import SGLangWeightSyncScheme


def main(rank: int, ranks: int, port: str, url: str) -> None:
    from models import uneven_llama

    torch.cuda.set_device(rank)
    distributed.init_process_group(
        "nccl",
        init_method=f"tcp://127.0.0.1:{port}",
        rank=rank,
        world_size=ranks,
        device_id=torch.device("cuda", rank),
    )
    told = []
    scheme = SGLangWeightSyncScheme(url, trainer_ranks="node", bucket_bytes=100_000, timeout=60.0)
    with scheme.create_sender() as sender:
        for seed in (1, 2, 3):
            report = sender.update_weights(uneven_llama(seed).cuda(rank))
            told.append([report.version, report.route.backend, report.verification])
    print(json.dumps(told), flush=True)
    distributed.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:])
