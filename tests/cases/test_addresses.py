"""Section G of the case list: addresses, ports and groups."""

from __future__ import annotations

import os
import signal
import socket
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from tests.integration import kit, trainers
from tests.integration.kit import BEGIN, INIT, LEAVE
from tests.integration.trainers import Trainers
from weight_update import ConfigurationError, SGLangWeightSyncScheme, UpdateTimeout
from weight_update.engines.sglang.engine import SGLangEngine
from weight_update.options import HttpOptions
from weight_update.ports import free_port
from weight_update.reference_engine import Fault, ReferenceEngine
from weight_update.transports.address import choose_address
from weight_update.waiting import Deadline

from .fake_http import HEALTHY, FakeServer
from .trial import SLACK, once

# ---- C11


def test_c11_the_own_host_name_has_no_say_in_the_address_that_is_told(
    engine: ReferenceEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(socket, "gethostname", lambda: "localhost.invalid")
    monkeypatch.setattr(socket, "getfqdn", lambda *_: "localhost.invalid")
    log = kit.Log(engine)
    kit.push(engine, kit.llama(1))
    assert log.bodies(engine, INIT)[0]["master_address"] == "127.0.0.1"


def test_c11_an_engine_elsewhere_decides_for_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """This host reaches its own addresses too; others do not reach its loopback."""
    routes = {"http://127.0.0.1:1": "127.0.0.1", "http://10.1.2.3:1": "10.1.2.9"}
    monkeypatch.setattr("weight_update.transports.address._local_address_towards", routes.get)
    assert choose_address(list(routes)) == "10.1.2.9"


def test_c11_the_users_address_wins(engine: ReferenceEngine) -> None:
    log = kit.Log(engine)
    with kit.make_sender(engine, master_address="127.0.0.2") as sender:
        sender.update_weights(kit.llama(1))
        assert sender._transport.master_address == "127.0.0.2"
    assert log.bodies(engine, INIT)[0]["master_address"] == "127.0.0.2"
    assert kit.served(engine) == kit.tokens_of(1)


@pytest.mark.parametrize(
    "address", ["0.0.0.0", "::", "[::]", "fe80::1", "fe80::1%lo", "169.254.3.4", "0"]
)
def test_c11_an_address_that_no_engine_could_reach_is_refused_at_construction(
    address: str,
) -> None:
    with pytest.raises(ConfigurationError, match="master_address"):
        SGLangWeightSyncScheme("http://127.0.0.1:1", master_address=address)


def test_c11_a_timeout_tells_address_port_and_who_did_not_come(
    three: list[ReferenceEngine],
) -> None:
    three[1].inject(once(INIT, "hang"))
    log = kit.Log(*three)
    sender = kit.make_sender(three, timeout=2.0)
    with kit.takes_at_most(2.0 + SLACK), pytest.raises(UpdateTimeout) as caught:
        sender.update_weights(kit.llama(1))
    told = log.bodies(three[0], INIT)[0]
    assert f"{told['master_address']}:{told['master_port']}" in str(caught.value)
    assert three[1].url in str(caught.value).splitlines()[0]
    sender.shutdown()


# ---- C20


def test_c20_the_next_trainer_connects_after_one_was_killed_between_updates(
    engine: ReferenceEngine, workplace: Trainers, weights_b: str
) -> None:
    log = kit.Log(engine)
    trainer = workplace.start(trainers.update_once, url=engine.url, weights=weights_b)
    trainer.wait_for("version")
    trainer.kill(signal.SIGKILL)
    assert trainer.wait(40) == -signal.SIGKILL
    kit.push(engine, kit.llama(0))
    assert kit.served(engine) == kit.tokens_of(0)
    names = [body["group_name"] for body in log.bodies(engine, INIT)]
    assert len(names) == len(set(names)) == 2


@pytest.mark.parametrize("status", [400, 404, 500])
def test_c20_a_group_that_cannot_be_dropped_stops_nobody(
    status: int, engine: ReferenceEngine
) -> None:
    engine.inject(Fault(LEAVE, "refuse", status=status, message="group does not exist"))
    for seed in (0, 1):
        kit.push(engine, kit.llama(seed))
        assert kit.served(engine) == kit.tokens_of(seed)


def test_c20_a_session_that_a_dead_trainer_left_open_is_closed(engine: ReferenceEngine) -> None:
    engine.call("POST", BEGIN, {})
    kit.push(engine, kit.llama(1))
    assert kit.served(engine) == kit.tokens_of(1)


# ---- C37


def known_groups() -> tuple[int, int, int]:
    world = dist.distributed_c10d._world
    return world.group_count, len(world.pg_map), len(world.pg_names)


def test_c37_one_port_serves_group_after_group_each_with_a_new_name(
    two: list[ReferenceEngine],
) -> None:
    """Beside a second sender that lives on."""
    port, before = free_port(), known_groups()
    log = kit.Log(*two)
    with kit.make_sender(two[1]) as other:
        other.update_weights(kit.llama(0))
        for _ in range(6):
            with kit.make_sender(two[0], master_port=port) as sender:
                sender.update_weights(kit.llama(1))
        other.update_weights(kit.llama(1))
        assert known_groups() == before
    joins = log.bodies(two[0], INIT)
    assert {join["master_port"] for join in joins} == {port}
    assert len({join["group_name"] for join in joins}) == 6
    assert [kit.served(engine) for engine in two] == [kit.tokens_of(1)] * 2


def test_c37_one_sender_connects_again_and_again(engine: ReferenceEngine) -> None:
    before = known_groups()
    log = kit.Log(engine)
    sender = kit.make_sender(engine)
    for _ in range(6):
        sender.update_weights(kit.llama(1))
        sender.shutdown()
    assert known_groups() == before
    assert len({body["group_name"] for body in log.bodies(engine, INIT)}) == 6
    assert kit.served(engine) == kit.tokens_of(1)


def test_c37_a_port_that_somebody_else_holds_is_an_error_before_the_engine_is_told(
    engine: ReferenceEngine,
) -> None:
    log = kit.Log(engine)
    with socket.socket() as foreign:
        foreign.bind(("127.0.0.1", 0))
        foreign.listen()
        port = foreign.getsockname()[1]
        with (
            kit.make_sender(engine, master_port=port) as sender,
            pytest.raises(ConfigurationError, match=str(port)),
        ):
            sender.update_weights(kit.llama(1))
    assert log.count(engine, INIT) == 0


# ---- C45


def has_ipv6() -> bool:
    try:
        with socket.socket(socket.AF_INET6) as probe:
            probe.bind(("::1", 0))
    except OSError:
        return False
    return True


@pytest.mark.skipif(not has_ipv6(), reason="this host has no IPv6 loopback")
@pytest.mark.parametrize("master", ["::1", "[::1]"])
def test_c45_an_engine_and_a_master_on_ipv6_meet_however_the_address_is_written(
    master: str,
) -> None:
    with ReferenceEngine(kit.llama(0), host="::1", release="0.5.9") as engine:
        with kit.make_sender(engine, master_address=master) as sender:
            sender.update_weights(kit.llama(1))
        engine.call("POST", "/flush_cache")
        assert kit.served(engine) == kit.tokens_of(1)


@pytest.mark.parametrize(
    ("release", "told"),
    [("0.5.6", "[fd00::7]"), ("0.5.9", "[fd00::7]"), ("0.5.12", "fd00::7"), ("0.5.23", "fd00::7")],
)
def test_c45_the_form_of_the_address_follows_the_release(release: str, told: str) -> None:
    with FakeServer({**HEALTHY, "version": release}) as server:
        engine = SGLangEngine(server.url, HttpOptions())
        engine.inspect(Deadline(10))
        engine.join(
            address="fd00::7",
            port=1,
            rank_offset=1,
            world_size=2,
            group_name="g",
            backend="gloo",
            deadline=Deadline(10),
        )
        (body,) = [asked.body for asked in server.asked if asked.path == INIT]
    assert body["master_address"] == told


@pytest.mark.parametrize(
    "given",
    [
        {"master_address": "fe80::1%eth0"},
        {"master_address": "[fe80::1%25eth0]"},
        {"server_url": "http://[::1"},
        {"server_url": "http://::1:30000:x"},
    ],
    ids=str,
)
def test_c45_scope_ids_and_unparsable_addresses_are_refused(given: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError):
        SGLangWeightSyncScheme(**{"server_url": "http://[::1]:30000", **given})


def test_c45_no_socket_of_a_closed_sender_is_left(engine: ReferenceEngine) -> None:
    before = listening()
    sender = kit.make_sender(engine)
    sender.update_weights(kit.llama(1))
    sender.shutdown()
    kit.wait_for(lambda: listening() <= before)


def listening() -> int:
    """Listening TCP sockets of this process."""
    own = set()
    for name in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{name}")
        except OSError:
            continue
        if target.startswith("socket:"):
            own.add(target[8:-1])
    tables = [Path(f"/proc/self/net/{name}").read_text() for name in ("tcp", "tcp6")]
    rows = [line.split() for table in tables for line in table.splitlines()[1:]]
    return sum(row[3] == "0A" and row[9] in own for row in rows)
