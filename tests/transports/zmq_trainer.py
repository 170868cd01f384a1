"""A trainer that brings one weight over a ZMQ channel, and then does nothing; run as a script."""

from __future__ import annotations

import sys
import time

import torch

from weight_update.transports.shared_memory import SharedMemoryPacker
from weight_update.transports.zmq_channel import ZmqChannel
from weight_update.waiting import Deadline
from weight_update.weights.buckets import plan_buckets
from weight_update.weights.cargo import Terms
from weight_update.weights.extract import extract_weights


def main(device: torch.device) -> None:
    weights = extract_weights({"w": torch.ones(1000, device=device)})
    packer = SharedMemoryPacker(device)
    chosen = packer.format([weight.spec for weight in weights], Terms())
    plan = plan_buckets(weights, chosen.bucket_bytes, chosen.packs)
    packer.reserve(plan)
    channel, deadline = ZmqChannel("http://engine:1"), Deadline(60.0)
    print(channel.bind(["0"])["0"], flush=True)
    channel.begin(deadline, lambda: None)
    cargo = packer.pack(plan.buckets[0])
    channel.bring(plan.buckets[0], cargo.shared, deadline, lambda: None)
    print("brought", flush=True)
    time.sleep(3600)


if __name__ == "__main__":
    main(torch.device(sys.argv[1]))
