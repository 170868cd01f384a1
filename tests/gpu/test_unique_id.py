"""A peer without torch.distributed joins the trainer's NCCL group by the group's id.

Run it where two GPUs are: ``pytest tests/gpu``. Elsewhere it is skipped.
"""

from __future__ import annotations

import base64
import json
import secrets
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from weight_update.torch_private import process_groups
from weight_update.transports.address import listen
from weight_update.waiting import Deadline, spawn

pytestmark = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")

SCRIPT = Path(__file__).with_name("nccl_peer.py")
SIZES = (1, 7_777, 1 << 28)


def store() -> process_groups.AbandonableStore:
    listener = listen("127.0.0.1", None)
    port = listener.getsockname()[1]
    served = process_groups.serve_store("127.0.0.1", port, 2, listener.detach())
    return process_groups.group_store(served, secrets.token_hex(6), "cuda")


@pytest.fixture
def peer() -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, str(SCRIPT), "1", *map(str, SIZES)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def told(peer: subprocess.Popen[str]) -> Any:
    assert peer.stdout is not None
    return json.loads(peer.stdout.readline())


def unique_id(meeting: process_groups.AbandonableStore) -> bytes:
    deadline = Deadline(20.0)
    while (found := process_groups.nccl_unique_id(meeting)) is None:
        assert not deadline.expired()
        deadline.sleep(0.005)
    return found


def test_a_peer_without_torchs_group_joins_by_the_id_and_receives_every_bit(
    peer: subprocess.Popen[str],
) -> None:
    sys.path.insert(0, str(SCRIPT.parent))
    from nccl_peer import bits_of

    torch.cuda.set_device(0)
    meeting = store()
    group = process_groups.build_nccl(meeting, 2, "by_id")
    tensors = [torch.randn(size, device="cuda:0").bfloat16() for size in SIZES]
    assert told(peer) == "here"
    assert process_groups.nccl_unique_id(meeting) is None

    joining = spawn(group.allreduce, torch.zeros(1, device="cuda:0"))
    found = unique_id(meeting)
    assert len(found) == 128
    assert peer.stdin is not None
    peer.stdin.write(base64.b64encode(found).decode() + "\n")
    peer.stdin.flush()
    joining.result(30.0).wait()
    torch.cuda.synchronize()
    start = time.perf_counter()
    for work in [process_groups.broadcast(group, tensor) for tensor in tensors]:
        work.wait()
    torch.cuda.synchronize()
    print(f"{sum(t.nbytes for t in tensors) / (time.perf_counter() - start) / 1e9:.0f} GB/s")

    assert told(peer) == [bits_of(tensor) for tensor in tensors]
    assert peer.wait(20.0) == 0
    group.abort()
