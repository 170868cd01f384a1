"""A trainer that makes a group with one peer, gives it up and ends at once; run as a script."""

from __future__ import annotations

import json

import torch

from weight_update.transports.process_group import UpdateGroup


def main() -> None:
    cpu = torch.device("cpu")
    group = UpdateGroup(address="127.0.0.1", port=None, world_size=2, device=cpu)
    print(json.dumps({"port": group.port, "name": group.name}), flush=True)
    group.join()
    group.give_up()


if __name__ == "__main__":
    main()
