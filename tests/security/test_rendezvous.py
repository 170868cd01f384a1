"""The rendezvous listens where it must and nowhere else, and takes its own peers only."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.integration import kit
from tests.integration.kit import ADMIN_KEY, INIT, KEY, UPDATE
from weight_update import SGLangWeightSender, WeightUpdateError
from weight_update.reference_engine import Fault, ReferenceEngine
from weight_update.transports.process_group import UpdateGroup
from weight_update.update.turns import turn
from weight_update.waiting import Deadline, spawn

CPU = torch.device("cpu")
LISTENING = "0A"


def listening() -> dict[str, str]:
    """Listening TCP sockets of this process: inode to address, as the kernel writes it."""
    own = set()
    for name in os.listdir("/proc/self/fd"):
        try:
            own.add(os.readlink(f"/proc/self/fd/{name}"))
        except OSError:  # the folder's own descriptor
            continue
    tables = [Path(f"/proc/self/net/{name}").read_text() for name in ("tcp", "tcp6")]
    rows = [line.split() for table in tables for line in table.splitlines()[1:]]
    return {r[9]: _address(r[1]) for r in rows if r[3] == LISTENING and f"socket:[{r[9]}]" in own}


def _address(text: str) -> str:
    """``0100007F:1F90`` as ``127.0.0.1``; IPv6 in words of four bytes, each turned round."""
    raw = bytes.fromhex(text.partition(":")[0])
    turned = b"".join(raw[i : i + 4][::-1] for i in range(0, len(raw), 4))
    return socket.inet_ntop(socket.AF_INET if len(turned) == 4 else socket.AF_INET6, turned)


def sender_of(engine: ReferenceEngine, **options: Any) -> SGLangWeightSender:
    return kit.make_sender(engine, api_key=KEY, admin_api_key=ADMIN_KEY, **options)


def has_ipv6() -> bool:
    try:
        with socket.socket(socket.AF_INET6) as probe:
            probe.bind(("::1", 0))
    except OSError:
        return False
    return True


# ---- where it listens


@pytest.mark.parametrize("address", ["127.0.0.1", "127.0.0.3"])
def test_every_socket_that_an_update_opens_listens_on_the_chosen_address(
    address: str, locked: ReferenceEngine
) -> None:
    """The store's and gloo's own."""
    before = set(listening())
    with sender_of(locked, master_address=address) as sender:
        sender.update_weights(kit.llama(1))
        opened = {place for inode, place in listening().items() if inode not in before}
    assert opened == {address}


@pytest.mark.skipif(not has_ipv6(), reason="this host has no IPv6 loopback")
def test_a_rendezvous_on_ipv6_listens_on_its_address_alone() -> None:
    before = set(listening())
    group = UpdateGroup(address="::1", port=None, world_size=2, device=CPU)
    try:
        opened = [place for inode, place in listening().items() if inode not in before]
        assert opened == ["::1"]
    finally:
        group.give_up()


def test_nothing_listens_before_an_update_and_after_a_shutdown(locked: ReferenceEngine) -> None:
    before = set(listening())
    sender = sender_of(locked)
    assert set(listening()) <= before
    sender.update_weights(kit.llama(1))
    sender.shutdown()
    kit.wait_for(lambda: set(listening()) <= before)


# ---- whom it takes


def say(data: bytes) -> Callable[[str, int], None]:
    def speak(address: str, port: int) -> None:
        with socket.create_connection((address, port), timeout=5) as stranger:
            stranger.sendall(data)
            stranger.settimeout(0.2)
            try:
                stranger.recv(100)
            except OSError:
                return

    return speak


def store_of(address: str, port: int) -> Any:
    return dist.TCPStore(address, port, is_master=False, timeout=timedelta(seconds=5))  # type: ignore[attr-defined]


def claim_under_another_name(address: str, port: int) -> None:
    """Sets what a peer of another group would, for every rank."""
    prefixed = dist.PrefixStore("weight_update_group/cpu", store_of(address, port))
    for rank in range(3):
        prefixed.set(f"0/{rank}", b"\x00" * 64)
        prefixed.set(f"rank_{rank}", b"10.9.9.9:1")


def claim_without_a_name(address: str, port: int) -> None:
    store = store_of(address, port)
    for rank in range(3):
        store.set(f"0/{rank}", b"\xff" * 64)
    store.add("init/", 3)


STRANGERS = {
    "http": say(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"),
    "nothing": say(b""),
    "zeros": say(b"\x00" * 4096),
    "ones": say(b"\xff" * 4096),
    "a length without end": say(b"\x00\xff\xff\xff\xff\xff\xff\xff\x7f" * 50),
    "a pickle": say(b"\x80\x04\x95cos\nsystem\n(S'true'\ntR."),
    "another group": claim_under_another_name,
    "no group": claim_without_a_name,
}


@pytest.mark.parametrize("stranger", STRANGERS.values(), ids=STRANGERS.keys())
def test_a_stranger_at_the_rendezvous_neither_breaks_the_join_nor_takes_a_rank(
    stranger: Callable[[str, int], None], locked: ReferenceEngine
) -> None:
    """He comes while the engine is still awaited, and again during the update."""
    locked.inject(Fault(INIT, "slow", seconds=1.5, times=1))
    log = kit.Log(locked)
    with sender_of(locked) as sender:
        updating = spawn(sender.update_weights, kit.llama(1))
        kit.wait_for(lambda: log.count(locked, INIT))
        (told,) = log.bodies(locked, INIT)
        place = (told["master_address"], told["master_port"])
        for _ in range(3):
            _ignoring_a_refusal(stranger, *place)
        report = updating.result(60)
        assert sender._transport.world_size == told["world_size"] == 2
        _ignoring_a_refusal(stranger, *place)
        again = sender.update_weights(kit.llama(0))
    assert report.engines[locked.url].state == again.engines[locked.url].state == "new"
    assert kit.served(locked) == kit.tokens_of(0)


def _ignoring_a_refusal(stranger: Callable[[str, int], None], address: str, port: int) -> None:
    try:
        stranger(address, port)
    except (OSError, RuntimeError):  # being turned away is what he deserves
        return


def test_many_silent_strangers_do_not_keep_the_engine_out(locked: ReferenceEngine) -> None:
    locked.inject(Fault(INIT, "slow", seconds=1.0, times=1))
    log = kit.Log(locked)
    with sender_of(locked) as sender:
        updating = spawn(sender.update_weights, kit.llama(1))
        kit.wait_for(lambda: log.count(locked, INIT))
        (told,) = log.bodies(locked, INIT)
        place = (told["master_address"], told["master_port"])
        held = [socket.create_connection(place, timeout=5) for _ in range(100)]
        try:
            assert updating.result(60).engines[locked.url].state == "new"
        finally:
            for stranger in held:
                stranger.close()


def test_names_of_groups_cannot_be_guessed(locked: ReferenceEngine) -> None:
    log = kit.Log(locked)
    for _ in range(3):
        with sender_of(locked) as sender:
            sender.update_weights(kit.llama(1))
    tails = {body["group_name"].rpartition("_")[2] for body in log.bodies(locked, INIT)}
    assert len(tails) == 3
    assert all(len(tail) >= 12 and int(tail, 16) >= 0 for tail in tails)


def test_a_stranger_alone_never_completes_a_group() -> None:
    """Whoever does not know the name waits in vain, and so does the trainer."""
    group = UpdateGroup(address="127.0.0.1", port=None, world_size=2, device=CPU)
    joining = spawn(group.join)
    try:
        claim_under_another_name(group.address, group.port)
        claim_without_a_name(group.address, group.port)
        assert not group.arrived(1)
        assert not joining.done()
        assert group.missing_rank() == 1
    finally:
        group.give_up()
    assert joining.exception(20) is not None


# ---- lock files in a folder that everybody may write to


def test_a_lock_folder_that_somebody_else_has_planted_is_not_written_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    shared = tmp_path / "tmp"
    shared.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(shared))
    (shared / f"weight_update-{os.getuid()}").symlink_to(elsewhere)
    _take_a_turn()
    assert list(elsewhere.iterdir()) == []


def test_a_lock_file_that_is_a_link_is_not_followed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    _take_a_turn()
    (folder,) = tmp_path.iterdir()
    (lock,) = folder.iterdir()
    lock.unlink()
    target = tmp_path / "target"
    lock.symlink_to(target)
    _take_a_turn()
    assert not target.exists()


def _take_a_turn() -> None:
    try:
        with turn(["http://a:1"], "wait", Deadline(5.0)):
            pass
    except WeightUpdateError:
        return  # refusing is as good


def test_two_threads_of_one_process_take_turns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A lock of the kernel's that one process holds twice would exclude nobody."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    inside, most = [0], [0]
    guard = threading.Lock()

    def enter(_: int) -> None:
        with turn(["http://a:1"], "wait", Deadline(30.0)):
            with guard:
                inside[0] += 1
                most[0] = max(most[0], inside[0])
            with guard:
                inside[0] -= 1

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(enter, range(12)))
    assert most == [1]


def test_an_update_request_names_no_group_but_its_own(locked: ReferenceEngine) -> None:
    log = kit.Log(locked)
    with sender_of(locked) as sender:
        sender.update_weights(kit.llama(1))
    names = {body["group_name"] for path in (INIT, UPDATE) for body in log.bodies(locked, path)}
    assert len(names) == 1
