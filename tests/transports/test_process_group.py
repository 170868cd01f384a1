"""The trainer's end of the group, against real gloo peers in processes of their own.

Pins: a public initialiser that never meets the engine (C38), names and ports that are used up
(C37), a rendezvous that cannot be stopped (C50), a peer that hangs when the trainer gives up
(C01), and IPv6 addresses that are glued together (C45).
"""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from queue import Empty, Queue
from typing import Any
from weakref import WeakSet

import pytest
import torch
from torch.distributed import distributed_c10d as c10d

from weight_update.errors import ConfigurationError, WeightUpdateError
from weight_update.options import UpdateOptions
from weight_update.transports import process_group
from weight_update.transports.process_group import UpdateGroup, open_group
from weight_update.waiting import spawn

CPU = torch.device("cpu")
PATIENCE = 60.0
# What blocks does so for minutes; the rest is for a busy machine.
AT_ONCE = 10.0


class PeerProcess:
    """Sends commands to a peer process; each answer is waited for separately."""

    def __init__(self) -> None:
        script = Path(__file__).parent / "gloo_peer.py"
        self.process = subprocess.Popen(
            [sys.executable, str(script)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self._answers: Queue[dict[str, Any]] = Queue()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        for line in self.process.stdout:
            self._answers.put(json.loads(line))

    def send(self, command: str, **arguments: Any) -> None:
        self.process.stdin.write(json.dumps([command, arguments]) + "\n")
        self.process.stdin.flush()

    def answer(self, timeout: float = PATIENCE) -> dict[str, Any]:
        return self._answers.get(timeout=timeout)

    def is_blocked(self) -> bool:
        try:
            self._answers.get(timeout=0.3)
        except Empty:
            return True
        return False

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


@pytest.fixture(scope="module")
def shared_peers() -> Iterator[list[PeerProcess]]:
    peers = [PeerProcess(), PeerProcess()]
    yield peers
    for peer in peers:
        peer.kill()


@pytest.fixture
def peer(shared_peers: list[PeerProcess]) -> PeerProcess:
    return shared_peers[0]


OpenGroup = Callable[..., UpdateGroup]


@pytest.fixture
def open_update_group() -> Iterator[OpenGroup]:
    """Makes groups that are given up after the test."""
    made: list[UpdateGroup] = []

    def make(
        *, world_size: int = 2, address: str = "127.0.0.1", port: int | None = None
    ) -> UpdateGroup:
        made.append(UpdateGroup(address=address, port=port, world_size=world_size, device=CPU))
        return made[-1]

    yield make
    for group in made:
        group.give_up()


def invite(group: UpdateGroup, peer: PeerProcess, rank: int = 1) -> None:
    host = f"[{group.address}]" if ":" in group.address else group.address
    peer.send(
        "join",
        url=f"tcp://{host}:{group.port}",
        rank=rank,
        world_size=group.world_size,
        name=group.name,
        timeout=PATIENCE,
    )


def meet(group: UpdateGroup, *peers: PeerProcess) -> None:
    joining = spawn(group.join)
    for rank, peer in enumerate(peers, start=1):
        invite(group, peer, rank)
    for peer in peers:
        assert peer.answer() == {"ok": "joined"}
    joining.result(timeout=PATIENCE)


def specs_of(tensors: list[torch.Tensor]) -> list[tuple[str, list[int]]]:
    return [(str(t.dtype).removeprefix("torch."), list(t.shape)) for t in tensors]


def bytes_of(tensors: list[torch.Tensor]) -> list[list[int]]:
    return [t.reshape(-1).view(torch.uint8).tolist() for t in tensors]


def wait_until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.01)


def seconds_of(call: Callable[[], Any]) -> float:
    started = time.monotonic()
    call()
    return time.monotonic() - started


# -- the rendezvous ------------------------------------------------------------------------


def test_the_listener_is_bound_before_anybody_is_told_of_it(open_update_group: OpenGroup) -> None:
    group = open_update_group()

    socket.create_connection((group.address, group.port), timeout=1).close()
    with pytest.raises(ConfigurationError, match=f"master_port={group.port}"):
        open_update_group(port=group.port)


def test_names_and_free_ports_never_repeat(open_update_group: OpenGroup) -> None:
    groups = [open_update_group() for _ in range(20)]

    assert len({group.name for group in groups}) == 20
    assert len({group.port for group in groups}) == 20


def test_a_port_can_be_used_again_once_its_group_was_given_up(
    open_update_group: OpenGroup, peer: PeerProcess
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]

    for _ in range(2):
        group = open_update_group(port=port)
        assert group.port == port
        meet(group, peer)
        group.give_up()
        peer.send("leave")
        peer.answer()
        del group
        wait_until(lambda: not is_listening(port))


def is_listening(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


# -- broadcasts ----------------------------------------------------------------------------

PAYLOADS = {
    "flat bucket": [torch.arange(256, dtype=torch.uint8).repeat(40)],
    "many dtypes": [
        torch.tensor([1.5, -2.0], dtype=torch.bfloat16),
        torch.tensor(3.25),
        torch.arange(6, dtype=torch.int64).view(2, 3),
        torch.tensor([True, False]),
    ],
    "empty": [torch.empty(0, 4), torch.ones(1)],
}


@pytest.fixture
def joined(shared_peers: list[PeerProcess]) -> Iterator[tuple[UpdateGroup, list[PeerProcess]]]:
    """A group of three; a peer is in one group at a time."""
    group = UpdateGroup(address="127.0.0.1", port=None, world_size=3, device=CPU)
    meet(group, *shared_peers)
    yield group, shared_peers
    group.give_up()
    for peer in shared_peers:
        peer.send("leave")
        peer.answer()


@pytest.mark.parametrize("tensors", PAYLOADS.values(), ids=PAYLOADS.keys())
def test_every_peer_receives_the_bytes_of_every_tensor_in_order(
    joined: tuple[UpdateGroup, list[PeerProcess]], tensors: list[torch.Tensor]
) -> None:
    group, peers = joined
    for peer in peers:
        peer.send("receive", specs=specs_of(tensors))

    group.broadcast(tensors)

    assert [peer.answer() for peer in peers] == [{"ok": bytes_of(tensors)}] * 2
    wait_until(lambda: not group.moving())


def test_nobody_is_missing_once_all_have_come(
    joined: tuple[UpdateGroup, list[PeerProcess]],
) -> None:
    assert joined[0].missing_rank() is None


def test_a_broadcast_moves_until_the_peers_take_it(
    joined: tuple[UpdateGroup, list[PeerProcess]],
) -> None:
    group, peers = joined

    group.broadcast([torch.ones(16 << 20, dtype=torch.uint8)])
    time.sleep(0.2)
    assert group.moving()

    for peer in peers:
        peer.send("swallow", size=16 << 20)
    wait_until(lambda: not group.moving())
    assert [peer.answer() for peer in peers] == [{"ok": 16 << 20}] * 2


# -- torch's registry stays as it was (C37) ------------------------------------------------


def groups_known_to_torch() -> tuple[int, int, int]:
    world = c10d._world
    return len(world.pg_map), len(world.pg_names), world.group_count


def test_twenty_connects_in_one_process_leave_no_trace_in_torch(
    open_update_group: OpenGroup, shared_peers: list[PeerProcess]
) -> None:
    peer, neighbour = shared_peers
    before = groups_known_to_torch()
    live = open_update_group()
    meet(live, neighbour)

    for _ in range(20):
        group = open_update_group()
        meet(group, peer)
        group.give_up()
        peer.send("leave")
        assert peer.answer() == {"ok": "left"}

    assert groups_known_to_torch() == before
    neighbour.send("receive", specs=[("float32", [1])])
    live.broadcast([torch.ones(1)])
    assert "ok" in neighbour.answer()
    live.give_up()
    neighbour.send("leave")
    neighbour.answer()


def test_the_trainers_own_default_group_is_neither_needed_nor_touched(
    open_update_group: OpenGroup, peer: PeerProcess
) -> None:
    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        default = torch.distributed.group.WORLD
        group = open_update_group()
        meet(group, peer)

        assert torch.distributed.group.WORLD is default
        assert torch.distributed.get_world_size() == 1
    finally:
        torch.distributed.destroy_process_group()
    group.give_up()
    peer.send("leave")
    peer.answer()


# -- giving up -----------------------------------------------------------------------------


def test_giving_up_frees_a_peer_that_waits_for_a_broadcast(
    open_update_group: OpenGroup, peer: PeerProcess
) -> None:
    group = open_update_group()
    meet(group, peer)
    peer.send("receive", specs=[("float32", [4])])
    assert peer.is_blocked()

    assert seconds_of(group.give_up) < AT_ONCE

    assert "error" in peer.answer()
    peer.send("leave")
    peer.answer()


def test_giving_up_never_blocks_though_a_broadcast_is_unfinished(
    open_update_group: OpenGroup,
) -> None:
    """Dropping such a group can block for minutes: that must be somebody else's thread."""
    deaf = PeerProcess()
    try:
        group = open_update_group()
        meet(group, deaf)
        group.broadcast([torch.zeros(32 << 20, dtype=torch.uint8)])
        assert group.moving()

        assert seconds_of(group.give_up) < AT_ONCE
        assert seconds_of(group.give_up) < AT_ONCE
    finally:
        deaf.kill()


def test_giving_up_frees_a_peer_though_another_never_takes_what_is_sent_to_it(
    open_update_group: OpenGroup, shared_peers: list[PeerProcess]
) -> None:
    """Dropped alone, the group would wait for that send, for ever, and keep both peers."""
    deaf, waiting = shared_peers
    group = open_update_group(world_size=3)
    meet(group, deaf, waiting)
    payload = torch.zeros(32 << 20, dtype=torch.uint8)
    group.broadcast([payload])
    waiting.send("receive", specs=[*specs_of([payload]), ("float32", [4])])
    assert waiting.is_blocked()
    assert group.moving()

    assert seconds_of(group.give_up) < AT_ONCE

    assert "error" in waiting.answer()
    for peer in shared_peers:
        peer.send("leave")
        peer.answer()


def test_a_peer_that_dies_in_a_broadcast_is_an_error_at_once(open_update_group: OpenGroup) -> None:
    doomed = PeerProcess()
    group = open_update_group()
    meet(group, doomed)
    group.broadcast([torch.zeros(32 << 20, dtype=torch.uint8)])
    assert group.moving()

    doomed.kill()

    with pytest.raises(WeightUpdateError, match="the broadcast failed") as caught:
        wait_until(lambda: not group.moving())
    assert caught.value.phase == "transfer"


class BrokenWork:
    """Part of a broadcast whose peer is gone; like torch's, it raises from no frame of its own."""

    def __init__(self) -> None:
        self.wait = partial(torch.zeros(2).view, 3)

    def is_completed(self) -> bool:
        return True


def test_an_error_that_somebody_keeps_keeps_no_socket_of_the_group_open(
    open_update_group: OpenGroup,
) -> None:
    """A work holds the connections: peers of one that died would wait as long as it lives."""
    group = open_update_group()
    group._works = [BrokenWork(), BrokenWork()]
    works = [weakref.ref(work) for work in group._works]

    with pytest.raises(WeightUpdateError, match="the broadcast failed") as kept:
        group.moving()

    assert kept.value.__traceback__ is not None
    assert [work() for work in works] == [None, None]


class QueuedWork:
    """A broadcast that NCCL was asked for."""

    def __init__(self, tensor: torch.Tensor, log: list[str]) -> None:
        self._name, self._log = f"{int(tensor)}", log

    def wait(self) -> None:
        self._log.append(f"behind {self._name}")

    def is_completed(self) -> bool:
        return True


class QueueingGroup:
    """Stands for torch's NCCL group."""

    def __init__(self) -> None:
        self.log: list[str] = []

    def broadcast(self, tensor: torch.Tensor, _: int) -> QueuedWork:
        self.log.append(f"sends {int(tensor)}")
        return QueuedWork(tensor, self.log)

    def abort(self) -> None:
        self.log.append("aborted")


def test_what_follows_a_broadcast_over_nccl_is_behind_all_earlier_ones(
    open_update_group: OpenGroup,
) -> None:
    """The next bucket is packed then, into the buffer that the last but one left from."""
    group, queue = open_update_group(), QueueingGroup()
    group.device, group._group, group._built = torch.device("cuda", 0), queue, True

    for number in range(3):
        group.broadcast([torch.tensor(number)])

    assert queue.log == ["sends 0", "behind 0", "sends 1", "behind 0", "behind 1", "sends 2"]
    assert not group.moving()


def test_a_group_that_was_given_up_takes_no_broadcast_and_never_looks_finished(
    open_update_group: OpenGroup,
) -> None:
    group = open_update_group()
    group.give_up()

    assert group.given_up
    with pytest.raises(WeightUpdateError, match="given up"):
        group.broadcast([torch.ones(1)])
    with pytest.raises(WeightUpdateError, match="given up"):
        group.moving()


def test_a_process_that_ends_right_after_giving_up_ends_cleanly(peer: PeerProcess) -> None:
    """A thread that is still dropping the group when the interpreter ends aborts the process."""
    script = Path(__file__).parent / "short_trainer.py"
    trainer = subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE, text=True)
    told = json.loads(trainer.stdout.readline())
    peer.send(
        "join",
        url=f"tcp://127.0.0.1:{told['port']}",
        rank=1,
        world_size=2,
        name=told["name"],
        timeout=PATIENCE,
    )
    peer.answer()  # it joined, unless the trainer's end came first

    assert trainer.wait(timeout=PATIENCE) == 0

    peer.send("leave")
    peer.answer()


def test_a_group_in_use_is_given_up_when_the_program_ends(
    open_update_group: OpenGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One whose peer had died sometimes aborted the process ("terminate called ...")."""
    group = open_update_group()
    assert group in process_group._living
    monkeypatch.setattr(process_group, "_living", WeakSet([group]))
    process_group._let_groups_end()
    assert group.given_up


# -- abandoning a rendezvous ---------------------------------------------------------------


def ends_soon(joining: Future[None]) -> bool:
    with pytest.raises(RuntimeError):
        joining.result(timeout=PATIENCE)
    return True


def test_a_join_that_nobody_answers_tells_whom_it_waits_for_and_ends_when_given_up(
    open_update_group: OpenGroup,
) -> None:
    group = open_update_group()
    joining = spawn(group.join)
    wait_until(lambda: group.missing_rank() == 1)

    group.give_up()

    assert ends_soon(joining)


def test_a_join_that_one_of_two_peers_answered_waits_for_the_other(
    open_update_group: OpenGroup, peer: PeerProcess
) -> None:
    group = open_update_group(world_size=3)
    joining = spawn(group.join)
    invite(group, peer, rank=1)
    wait_until(lambda: group.missing_rank() == 2)

    group.give_up()

    assert ends_soon(joining)
    assert "error" in peer.answer()


def test_a_join_of_a_group_that_was_given_up_before_ends_at_once(
    open_update_group: OpenGroup,
) -> None:
    group = open_update_group()
    group.give_up()

    assert ends_soon(spawn(group.join))


# -- addresses -----------------------------------------------------------------------------


def has_ipv6() -> bool:
    try:
        with socket.create_server(("::1", 0), family=socket.AF_INET6):
            return True
    except OSError:
        return False


@pytest.mark.skipif(not has_ipv6(), reason="this host has no IPv6 loopback")
def test_a_group_on_an_ipv6_address_works_end_to_end(
    open_update_group: OpenGroup, peer: PeerProcess
) -> None:
    group = open_update_group(address="::1")
    meet(group, peer)
    peer.send("receive", specs=[("float32", [2])])

    group.broadcast([torch.tensor([1.0, 2.0])])

    assert peer.answer() == {"ok": bytes_of([torch.tensor([1.0, 2.0])])}
    group.give_up()
    peer.send("leave")
    peer.answer()


@pytest.mark.parametrize(
    ("given", "used"),
    [(None, "127.0.0.1"), ("localhost", "localhost"), (" 127.0.0.1 ", "127.0.0.1")],
)
def test_the_address_of_the_user_wins_over_the_one_that_routes_to_the_engines(
    given: str | None, used: str
) -> None:
    options = UpdateOptions(master_address=given)

    group = open_group(["http://127.0.0.1:1"], options, 2, CPU)

    assert group.address == used
    assert (group.backend, group.world_size) == ("gloo", 2)
    group.give_up()


@pytest.mark.parametrize("address", ["0.0.0.0", "fe80::1", "no-such-host.invalid"])
def test_an_address_that_cannot_work_opens_no_group(address: str) -> None:
    with pytest.raises(ConfigurationError, match="master_address="):
        open_group(["http://127.0.0.1:1"], UpdateOptions(master_address=address), 2, CPU)
